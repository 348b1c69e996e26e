"""The runtime loop: decode with the best resident draft, prepare better ones (Algorithm 3)."""

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from memspec_core.clock import Clock
from memspec_core.errors import CheckpointError, MemoryBudgetError
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.models.target import Target
from memspec_core.request import LOOKUP, PLAIN, GenerationRequest
from memspec_core.residency.cache import DraftCache
from memspec_core.settings import Settings
from memspec_core.speculation.decoding import Decoding, Interruption
from memspec_core.speculation.lookup import NgramLookup
from memspec_core.speculation.planner import Planner
from memspec_core.speculation.proposal import Draft
from memspec_core.strategies import Context, Ranking, Strategy

_LOG = logging.getLogger(__name__)


class Controller:
    """Runs generations, one at a time, with drafts that a strategy ranks and a cache holds.

    `settings` is asked at each scheduling point, so that K, N, T and gamma that change at run
    time take effect in the next interval.
    """

    def __init__(
        self,
        target: Target,
        cache: DraftCache,
        planner: Planner,
        settings: Callable[[], Settings],
        clock: Clock,
    ) -> None:
        self._target = target
        self._cache = cache
        self._planner = planner
        self._lookup = NgramLookup()
        self._settings = settings
        self._clock = clock

    def generate(
        self,
        request: GenerationRequest,
        prompt_ids: Sequence[int],
        strategy: Strategy,
        interruption: Interruption,
    ) -> Generator[Iteration, None, None]:
        """Decode until the answer ends, yielding each iteration.

        A generator whose end, by whatever way, leaves all KV caches consistent. Raises
        `PromptTooLongError`, `CheckpointError` and `MemoryBudgetError` before the first token.
        """
        decoding = Decoding(
            self._target,
            prompt_ids,
            request,
            max_new_tokens=request.max_new_tokens or self._settings().default_max_new_tokens,
            planner=self._planner,
            lookup=self._lookup_for(request),
            interruption=interruption,
            clock=self._clock,
        )
        try:
            yield from self._run(decoding, strategy)
        except Exception:
            yield decoding.rest()  # what was held back is part of the answer too
            raise
        finally:
            decoding.close()
            self._cache.rest()

    def _run(self, decoding: Decoding, strategy: Strategy) -> Generator[Iteration, None, None]:
        ranking, seconds = self._ranked(strategy, Context(decoding.prompt_ids))
        active, seconds = self._initial_draft(strategy, ranking, seconds)
        self._cache.update(ranking, _name(active))
        seconds = self._read_prompt(decoding, active, seconds)
        while True:
            settings = self._settings()
            for _ in range(settings.scheduling_interval):
                iteration = decoding.iterate(
                    active, ranking.best or PLAIN, settings.draft_length, seconds
                )
                seconds = IterationSeconds()
                strategy.observe(iteration)
                yield iteration
                if iteration.finish_reason is not None:
                    return
            context = Context(decoding.prompt_ids, decoding.recent_ids(settings.recent_tokens))
            ranking, seconds = self._ranked(strategy, context)
            self._cache.update(ranking, _name(active))
            active = self._cache.best_resident(ranking)

    def _ranked(self, strategy: Strategy, context: Context) -> tuple[Ranking, IterationSeconds]:
        started = self._clock.now()
        ranking = strategy.rank(context)
        return ranking, IterationSeconds(prediction=self._clock.now() - started)

    def _initial_draft(
        self, strategy: Strategy, ranking: Ranking, seconds: IterationSeconds
    ) -> tuple[Draft | None, IterationSeconds]:
        """Load the top draft and wait for it: the only wait."""
        started = self._clock.now()
        draft = next(filter(None, (self._load(name, strategy) for name in ranking.order)), None)
        return draft, replace(seconds, load_wait=self._clock.now() - started)

    def _load(self, name: str, strategy: Strategy) -> Draft | None:
        if not strategy.insists and not self._cache.may_load(name):
            return None
        try:
            return self._cache.require(name)
        except (CheckpointError, MemoryBudgetError) as error:
            if strategy.insists:
                raise
            _LOG.warning("Decoding goes on without the draft %s: %s", name, error)
            return None

    def _lookup_for(self, request: GenerationRequest) -> NgramLookup | None:
        """Return the lookup for requests that leave the choice to the runtime or name it."""
        wanted = request.draft == LOOKUP or (not request.draft and self._settings().lookup)
        return self._lookup if wanted else None

    def _read_prompt(
        self, decoding: Decoding, active: Draft | None, seconds: IterationSeconds
    ) -> IterationSeconds:
        started = self._clock.now()
        decoding.read_prompt(active)
        return replace(seconds, prompt=self._clock.now() - started)


def _name(draft: Draft | None) -> str | None:
    return None if draft is None else draft.name
