"""Strategies compared on a simulated machine: the runtime's own loop over traced answers.

Controller, strategies, cache and ledger are those of the runtime; clock, loader and generations are
simulated from a hardware profile and a trace. Each answer begins with nothing resident, as in the
paper. Proposals are chains of a fixed length, and the lookup is left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from memspec_core.controller import Controller
from memspec_core.errors import SettingsError, TraceError
from memspec_core.evaluation.acceptance import all_gains
from memspec_core.evaluation.comparison import (
    BASELINE,
    ORACLES,
    PINNED,
    StrategyRun,
    compared_strategy,
)
from memspec_core.evaluation.foretold import Foretold, Recall
from memspec_core.evaluation.profiles import Profile
from memspec_core.evaluation.simulated import (
    Replay,
    ReplayedCourse,
    SimulatedClock,
    SimulatedCosts,
    SimulatedLoader,
    TimedStrategy,
)
from memspec_core.evaluation.simulation_record import SimulationRecord
from memspec_core.iteration import Iteration
from memspec_core.measurement.decisions import Decision
from memspec_core.measurement.trace import Trace, TracedPrompt
from memspec_core.prediction.head import RankingHead
from memspec_core.request import LOOKUP, GenerationRequest
from memspec_core.residency.cache import DraftBytes, DraftCache
from memspec_core.residency.ledger import Ledger
from memspec_core.settings import STRATEGY_NAMES, Settings
from memspec_core.strategies import Strategy, create_strategy
from memspec_core.strategies.known_answer import KnownAnswer
from memspec_core.strategies.memspec import MemSpec, PredictionOnly

SIMULATED_STRATEGIES = (*STRATEGY_NAMES, *ORACLES)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SimulationPlan:
    """What to simulate.

    `strategies`: names of the settings', of the oracles, or "static:" and a draft's name; the
    baseline is always among them. `parameters` are the node's; draft_length must be fixed.
    `head` is the predictor of the strategies that have one; with a `recall` instead, they foretell
    with that. `max_new_tokens` 0 takes the answers as long as they were traced.
    """

    profile: Profile
    strategies: tuple[str, ...] = SIMULATED_STRATEGIES
    parameters: Mapping[str, object] = field(default_factory=dict)
    head: RankingHead | None = None
    recall: Recall | None = None
    max_new_tokens: int = 0

    def settings(self, drafts: Sequence[str]) -> Settings:
        """Return the runtime's settings; raises `SettingsError`, or `ProfileError`."""
        settings = Settings.from_parameters({**self.parameters, "drafts.names": list(drafts)})
        if not settings.draft_length:
            raise SettingsError("draft_length is 0; the simulator needs a fixed one, such as 3.")
        self.profile.iteration_seconds(settings.draft_length)
        for name in self.strategies:
            draft = name.removeprefix(PINNED)
            known = drafts if draft != name else SIMULATED_STRATEGIES
            if draft not in known:
                raise SettingsError(f"Unknown strategy '{name}'; there are {', '.join(known)}.")
        return settings


def simulate(
    trace: Trace,
    plan: SimulationPlan,
    progress: Progress = lambda *_: None,
    jobs: int = 1,
    record: SimulationRecord | None = None,
) -> list[StrategyRun]:
    """Answer every prompt of a trace with every strategy, in `jobs` processes.

    Where a `record` gets every generation, it is one process.
    Raises `SettingsError`, `ProfileError`, and `TraceError` if the draft length was not traced.
    """
    columns = {name: column for column, name in enumerate(trace.drafts) if name != LOOKUP}
    settings = plan.settings(tuple(columns))
    if settings.draft_length > trace.header.length:
        raise TraceError(
            f"The trace has {trace.header.length} proposals at each place; draft_length is "
            f"{settings.draft_length}. Trace with a larger length."
        )
    simulator = Simulator(plan, settings, columns, record)
    jobs = 1 if record else jobs
    count = len(trace.prompts)
    runs: list[StrategyRun] = []
    for number, found in enumerate(_spread(simulator, trace.prompts, jobs)):
        runs += found
        progress("simulating", number + 1, count)
    return runs


def _spread(
    simulator: "Simulator", prompts: Sequence[TracedPrompt], jobs: int
) -> Iterator[list[StrategyRun]]:
    if jobs < 2:
        yield from map(simulator.runs, prompts, range(len(prompts)))
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(simulator.runs, prompts, range(len(prompts)), chunksize=8)


class Simulator:
    """Answers traced prompts on one machine with one set of parameters.

    `columns`: where each draft stands in the traced prompts.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        settings: Settings,
        columns: Mapping[str, int],
        record: SimulationRecord | None = None,
    ) -> None:
        self._plan = plan
        self._record = record
        self._settings = settings
        self._traced = tuple(columns.values())
        self._columns = {name: place for place, name in enumerate(columns)}
        self._request = GenerationRequest(prompt="-")

    def runs(self, prompt: TracedPrompt, number: int) -> list[StrategyRun]:
        """Answer a prompt with each strategy; the number tells prompts apart."""
        replay = self._replay(prompt)
        names = dict.fromkeys((BASELINE, *self._plan.strategies))
        return [self._run(name, replay, number) for name in names]

    def iterations(
        self,
        strategy: Strategy,
        prompt: TracedPrompt,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> list[Iteration]:
        """Answer a prompt with a strategy of one's own; rankings take no time."""
        machine = _Machine(self._replay(prompt), self._settings)
        return list(machine.generate(self._request, strategy, on_decision))

    def known_answer(self, prompt: TracedPrompt) -> KnownAnswer:
        """Return what an oracle knows of a prompt's answer on this machine."""
        return self._known(self._replay(prompt))

    def _replay(self, prompt: TracedPrompt) -> Replay:
        gains = all_gains(prompt, self._traced, self._settings.draft_length)
        limit = self._plan.max_new_tokens or len(gains)
        return Replay(prompt, gains[:limit], self._columns, self._plan.profile)

    def _known(self, replay: Replay) -> KnownAnswer:
        profile, drafts = self._plan.profile, len(self._columns)
        length = self._settings.draft_length
        return KnownAnswer(
            gains=replay.gains,
            capacity=self._settings.resident_capacity,
            interval=self._settings.scheduling_interval,
            iteration_seconds=(profile.iteration_seconds(length),) * drafts,
            load_seconds=(profile.load_seconds,) * drafts,
            catch_up_seconds=(profile.catch_up_seconds,) * drafts,
            prompt_tokens=len(replay.prompt.prompt_ids),
            load_slowdown=profile.load_slowdown,
        )

    def _run(self, name: str, replay: Replay, number: int) -> StrategyRun:
        machine = _Machine(replay, self._settings)
        strategy = self._strategy(name, replay, number, machine.clock)
        events = self._generated(machine, strategy, replay)
        first = events[0].seconds
        fallback = sum(event.seconds.decode for event in events if event.fallback)
        ran = [event.draft for event in events if not event.plain]
        return StrategyRun(
            strategy=name,
            prompt_set=replay.prompt.domain,
            prompt=number,
            tokens=events[-1].generated_tokens,
            iterations=len(events),
            desired=sum(event.seconds.decode for event in events) - fallback,
            fallback=fallback,
            load_wait=sum(event.seconds.load_wait for event in events[1:]),
            prediction=sum(event.seconds.prediction for event in events),
            first_wait=first.load_wait,
            elapsed=machine.clock.seconds - first.load_wait - first.prompt,
            switches=sum(one != other for one, other in pairwise(ran)),
            loads=machine.cache.counters().loads,
            token_ids=(),
        )

    def _generated(
        self, machine: "_Machine", strategy: Strategy, replay: Replay
    ) -> list[Iteration]:
        record, prompt = self._record, replay.prompt
        if record is None:
            return list(machine.generate(self._request, strategy))
        tell = record.begin(prompt, strategy.name, self._settings, replay.profile.name)
        events = machine.generate(self._request, strategy, tell)
        return list(record.follow(events, prompt, machine.clock, machine.cache))

    def _strategy(self, name: str, replay: Replay, number: int, clock: SimulatedClock) -> Strategy:
        compared = compared_strategy(name, tuple(self._columns), partial(self._known, replay))
        if compared is not None:
            return compared
        if name not in (MemSpec.name, PredictionOnly.name):
            return create_strategy(replace(self._settings, strategy=name))
        return TimedStrategy(
            self._predicting(name, replay, number), self._plan.profile.prediction_seconds, clock
        )

    def _predicting(self, name: str, replay: Replay, number: int) -> Strategy:
        if self._plan.recall is None:
            return create_strategy(replace(self._settings, strategy=name), self._plan.head)
        prepares = {kind.name: kind.prepares for kind in (MemSpec, PredictionOnly)}[name]
        return Foretold(
            name, prepares, tuple(self._columns), replay.gains, self._plan.recall, number
        )


class _Machine:
    """A simulated machine with a controller on it, for one generation."""

    def __init__(self, replay: Replay, settings: Settings) -> None:
        self._replay = replay
        self._settings = settings
        self.clock = SimulatedClock()
        self._loader = SimulatedLoader(replay.profile, len(replay.prompt.prompt_ids), self.clock)
        size = int(replay.profile.draft_bytes)
        drafts = len(replay.columns)
        self.cache = DraftCache(
            dict.fromkeys(replay.columns, DraftBytes(size, 0)),
            self._loader,
            Ledger(size * drafts),
            settings.resident_capacity,
            self.clock,
        )

    def generate(
        self,
        request: GenerationRequest,
        strategy: Strategy,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> Iterator[Iteration]:
        """Generate the answer."""
        controller = Controller(
            lambda *_: ReplayedCourse(self._replay, self._loader, self.clock),
            self.cache,
            SimulatedCosts(self._replay.profile),
            lambda: self._settings,
            self.clock,
            on_decision,
        )
        ids: Sequence[int] = self._replay.prompt.prompt_ids  # type: ignore[assignment]
        return controller.generate(request, ids, strategy, lambda: None)
