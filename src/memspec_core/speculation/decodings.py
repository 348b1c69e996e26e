"""Generations on one target, as the controller begins them."""

from collections.abc import Callable, Sequence

from memspec_core.clock import Clock
from memspec_core.models.target import Target
from memspec_core.request import LOOKUP, GenerationRequest
from memspec_core.settings import Settings
from memspec_core.speculation.course import Interruption
from memspec_core.speculation.decoding import Decoding
from memspec_core.speculation.lookup import NgramLookup
from memspec_core.speculation.planner import Planner


class Decodings:
    """Begins generations that share a target, a planner and a lookup."""

    def __init__(
        self, target: Target, planner: Planner, settings: Callable[[], Settings], clock: Clock
    ) -> None:
        self._target = target
        self._planner = planner
        self._lookup = NgramLookup()
        self._settings = settings
        self._clock = clock

    def begin(
        self, request: GenerationRequest, prompt_ids: Sequence[int], interruption: Interruption
    ) -> Decoding:
        """Begin the generation of a request; raises `PromptTooLongError`."""
        return Decoding(
            self._target,
            prompt_ids,
            request,
            max_new_tokens=request.max_new_tokens or self._settings().default_max_new_tokens,
            planner=self._planner,
            lookup=self._lookup_for(request),
            interruption=interruption,
            clock=self._clock,
        )

    def _lookup_for(self, request: GenerationRequest) -> NgramLookup | None:
        """Return the lookup for requests that leave the choice to the runtime or name it."""
        wanted = request.draft == LOOKUP or (not request.draft and self._settings().lookup)
        return self._lookup if wanted else None
