"""The runtime loop: decode with the best resident draft, prepare better ones (Algorithm 3)."""

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from memspec_core.clock import Clock
from memspec_core.errors import CheckpointError, LoadGivenUpError, MemoryBudgetError
from memspec_core.iteration import Iteration
from memspec_core.measurement.decisions import Decision, Digest, digest_of_prompt, hash_of_context
from memspec_core.measurement.stopwatch import LOAD_WAIT, PREDICTION, PROMPT, Stopwatch
from memspec_core.request import PLAIN, GenerationRequest
from memspec_core.residency.cache import DraftCache
from memspec_core.settings import Settings
from memspec_core.speculation.course import Begin, Course, Interruption
from memspec_core.speculation.proposal import Draft
from memspec_core.strategies import USUAL_LENGTH, Context, Ranking, Strategy
from memspec_core.strategies.utility import DraftCosts, Utility

LONGEST_INTERVAL = 4
"""So many times N, at the most, pass until the next scheduling point where costs are weighed."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Interval:
    """What runs until the next scheduling point, and what the strategy would have run.

    `dear`: whether costs are weighed, and rankings are among those that count. `times`: how often N
    is its length.
    """

    draft: Draft | None
    wanted: str
    settings: Settings
    dear: bool
    times: int = 1

    def after(self, last: "_Interval") -> "_Interval":
        """Return the interval, longer than the last one where rankings are dear and it is the same.

        A choice that has not changed is likely to stay.
        """
        if not self.dear or self.draft is not last.draft or self.name != self.wanted:
            return self
        return replace(self, times=min(2 * last.times, LONGEST_INTERVAL))

    def ends_early(self, done: int, settings: Settings) -> bool:
        """Whether, after so many iterations, new settings take the place of the rest.

        They are to wait for N iterations at the most, however long the interval is.
        """
        whole = done > 0 and done % self.settings.scheduling_interval == 0
        return whole and settings is not self.settings

    @property
    def name(self) -> str:
        return PLAIN if self.draft is None else self.draft.name

    @property
    def iterations(self) -> int:
        return self.times * self.settings.scheduling_interval

    @property
    def length(self) -> int:
        return self.settings.draft_length


class Controller:
    """Runs generations, one at a time, with drafts that a strategy ranks and a cache holds.

    `begin` begins the generation of a request. `settings` is asked at each scheduling point, so
    that K, N, T and gamma that change at run time take effect in the next interval; it is asked
    between iterations too, as longer intervals end early for them. `on_decision` is told each
    decision, where somebody listens.
    """

    def __init__(
        self,
        begin: Begin,
        cache: DraftCache,
        costs: DraftCosts,
        settings: Callable[[], Settings],
        clock: Clock,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> None:
        self._begin = begin
        self._cache = cache
        self._costs = costs
        self._settings = settings
        self._clock = clock
        self._on_decision = on_decision
        self._prompt_digest: Digest | None = None
        self._interruption: Interruption = lambda: None

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
        course = self._begin(request, prompt_ids, interruption)
        self._interruption = interruption
        self._prompt_digest = digest_of_prompt(prompt_ids) if self._on_decision else None
        try:
            yield from self._run(course, strategy)
        except Exception:
            yield course.rest()  # what was held back is part of the answer too
            raise
        finally:
            course.close()
            self._cache.rest()

    def _run(self, course: Course, strategy: Strategy) -> Generator[Iteration, None, None]:
        watch = Stopwatch(self._clock)
        watch.start()
        course.read_prompt()
        watch.lap(PROMPT)
        interval = self._schedule(course, strategy, watch)
        if interval.draft is not None:
            course.catch_up(interval.draft)
            watch.lap(PROMPT)
        while True:
            for done in range(interval.iterations):
                if interval.ends_early(done, self._settings()):
                    break
                iteration = course.iterate(
                    interval.draft, interval.wanted, interval.length, watch.take()
                )
                strategy.observe(iteration)
                yield iteration
                if iteration.finish_reason is not None:
                    return
            interval = self._schedule(course, strategy, watch).after(interval)

    def _schedule(self, course: Course, strategy: Strategy, watch: Stopwatch) -> _Interval:
        """Rank, take the best resident draft, and have better ones made ready."""
        watch.start()
        settings = self._settings()
        context = _context(course, settings, strategy)
        ranking = strategy.rank(context)
        utility = self._utility(ranking, context, course, settings)
        choice = utility.net(ranking) if utility else ranking
        self._cache.count_demand(ranking.best)
        watch.lap(PREDICTION)
        if strategy.waits or (not context.place and self._waits_at_first(strategy, settings)):
            self._wait_for(ranking, strategy)
            watch.lap(LOAD_WAIT)
        active = self._cache.best_resident(choice)
        name = None if active is None else active.name
        costly: frozenset[str] = frozenset()
        if utility and name:
            costly = utility.not_worth_loading(
                self._cache.contenders(ranking),
                ranking,
                name,
                course.remaining_tokens,
                self._cache.load_seconds,
            )
        self._cache.update(ranking, name, strategy.prepares, costly)
        watch.lap(PREDICTION)
        wanted = self._wanted(ranking, choice, name, costly) or PLAIN
        spent, count = watch.spent(PREDICTION), settings.scheduling_interval
        dear = bool(utility and name and utility.is_dear(spent, name, count))
        interval = _Interval(active, wanted, settings, dear)
        if self._on_decision is not None:
            self._on_decision(self._decision(context, strategy, ranking, interval, watch))
        return interval

    def _wanted(
        self, ranking: Ranking, choice: Ranking, active: str | None, costly: frozenset[str]
    ) -> str | None:
        """Return the best draft if it would run were it resident, else the one that runs."""
        best = ranking.best
        if best is None or best in costly or best in self._cache.residents:
            return active
        better = active is None or choice.scores[best] > choice.scores.get(active, 0.0)
        return best if better else active

    def _waits_at_first(self, strategy: Strategy, settings: Settings) -> bool:
        """Whether an answer waits for its first draft: decoding goes on with a resident one."""
        return settings.initial_wait and (strategy.insists or not self._cache.residents)

    def _wait_for(self, ranking: Ranking, strategy: Strategy) -> None:
        """Load the best draft and wait for it; the next best where it cannot be loaded."""
        self._cache.rest()  # nothing runs while decoding waits, so that any draft may make room
        for name in ranking.order:
            if not strategy.insists and not self._cache.may_load(name):
                continue
            try:
                self._cache.require(name, lambda: self._interruption() is not None)
            except LoadGivenUpError:
                return  # the next iteration ends the answer
            except (CheckpointError, MemoryBudgetError) as error:
                if strategy.insists:
                    raise
                _LOG.warning("Decoding goes on without the draft %s: %s", name, error)
            else:
                return

    def _utility(
        self, ranking: Ranking, context: Context, course: Course, settings: Settings
    ) -> Utility | None:
        """Return what weighs the ranking by costs, where it may be weighed."""
        if ranking.outlook is None or not settings.cost_aware:
            return None
        residents = self._cache.residents
        everything = len(context.prompt_ids) + context.place
        unseen = {
            name: course.unseen_tokens(residents[name]) if name in residents else everything
            for name in ranking.scores
        }
        return Utility(self._costs, settings.draft_length or USUAL_LENGTH, unseen)

    def _decision(
        self,
        context: Context,
        strategy: Strategy,
        ranking: Ranking,
        interval: _Interval,
        watch: Stopwatch,
    ) -> Decision:
        return Decision(
            at_seconds=self._clock.now(),
            context_hash=hash_of_context(self._prompt_digest, context.recent_ids),
            place=context.place,
            strategy=strategy.name,
            scores=dict(ranking.scores),
            resident=tuple(self._cache.residents),
            loading=self._cache.loading,
            wanted=interval.wanted,
            active=interval.name,
            prediction_seconds=watch.spent(PREDICTION),
            load_wait_seconds=watch.spent(LOAD_WAIT),
        )


def _context(course: Course, settings: Settings, strategy: Strategy) -> Context:
    count = settings.recent_tokens
    positions = min(count, strategy.reads_states)
    return Context(
        course.prompt_ids,
        course.recent_ids(count),
        course.generated_tokens,
        course.prompt_state if positions else None,
        course.recent_state(positions) if positions else None,
    )
