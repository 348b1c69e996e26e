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
from memspec_core.speculation.structure import Grammars


class Decodings:
    """Begins generations that share a target, a planner, a lookup and grammars.

    `book` is told the bytes that what follows schemas is about to take.
    """

    def __init__(
        self,
        target: Target,
        planner: Planner,
        settings: Callable[[], Settings],
        clock: Clock,
        book: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._target = target
        self._planner = planner
        self._lookup = NgramLookup()
        self._grammars = Grammars(target, book)
        self._settings = settings
        self._clock = clock

    def begin(
        self, request: GenerationRequest, prompt_ids: Sequence[int], interruption: Interruption
    ) -> Decoding:
        """Begin the generation of a request.

        Raises `PromptTooLongError`, `SchemaError` and `MemoryBudgetError`.
        """
        schema = request.json_schema
        return Decoding(
            self._target,
            prompt_ids,
            request,
            max_new_tokens=request.max_new_tokens or self._settings().default_max_new_tokens,
            planner=self._planner,
            lookup=self._lookup_for(request),
            document=self._grammars.begin(schema) if schema else None,
            interruption=interruption,
            clock=self._clock,
        )

    def _lookup_for(self, request: GenerationRequest) -> NgramLookup | None:
        """Return the lookup for requests that leave the choice to the runtime or name it."""
        wanted = request.draft == LOOKUP or (not request.draft and self._settings().lookup)
        return self._lookup if wanted else None
