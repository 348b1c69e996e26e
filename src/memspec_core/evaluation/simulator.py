"""Strategies compared on a simulated machine: the runtime's own loop over traced answers.

Controller, strategies, cache and ledger are those of the runtime; clock, loader and generations are
simulated from a hardware profile and a trace. Each answer begins with nothing resident, as in the
paper. Proposals are chains of a fixed length. Where the parameter `lookup` is set, which it is not
by default here, a lookup that is sure goes before the draft, as in the runtime with a fixed length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np

from memspec_core.controller import Controller
from memspec_core.errors import SettingsError, TraceError
from memspec_core.evaluation.acceptance import all_gains, gains
from memspec_core.evaluation.comparison import (
    BASELINE,
    ORACLES,
    PINNED,
    StrategyRun,
    compared_strategy,
)
from memspec_core.evaluation.foretold import Foresight, Foretold
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
from memspec_core.speculation.decoding import SURE_MATCH
from memspec_core.strategies import PREDICTING, Strategy, create_strategy
from memspec_core.strategies.known_answer import KnownAnswer
from memspec_core.strategies.memspec import MemSpec, PredictionOnly

SIMULATED_STRATEGIES = (*STRATEGY_NAMES, *ORACLES)

ONLY_LOOKUP = f"{PINNED}{LOOKUP}"
"""The lookup alone, without drafts."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SimulationPlan:
    """What to simulate.

    `strategies`: names of the settings', of the oracles, or "static:" and a draft's name, or
    "lookup"; the baseline is always among them. `parameters` are the node's; draft_length must be
    fixed. `head` is the predictor of the strategies that have one; with a `recall` instead, they
    foretell with that. `max_new_tokens` 0 takes the answers as long as they were traced.
    `budget_bytes` for drafts bounds them beside K; 0: there is room for all. `drafts`: those of the
    trace that strategies choose from, all if empty; "static:" may name any other as well.
    """

    profile: Profile
    strategies: tuple[str, ...] = SIMULATED_STRATEGIES
    parameters: Mapping[str, object] = field(default_factory=dict)
    head: RankingHead | None = None
    recall: Foresight | None = None
    max_new_tokens: int = 0
    budget_bytes: float = 0.0
    drafts: tuple[str, ...] = ()

    def settings(self, traced: Sequence[str]) -> Settings:
        """Return the runtime's settings; raises `SettingsError`, or `ProfileError`."""
        missing = set(self.drafts) - set(traced)
        if missing:
            raise SettingsError(f"The trace has no draft '{min(missing)}'.")
        settings = Settings.from_parameters(
            {"lookup": False, **self.parameters, "drafts.names": list(self.drafts or traced)}
        )
        if not settings.draft_length:
            raise SettingsError("draft_length is 0; the simulator needs a fixed one, such as 3.")
        self.profile.iteration_seconds(settings.draft_length)
        for name in self.strategies:
            draft = name.removeprefix(PINNED)
            known = (*traced, LOOKUP) if draft != name else SIMULATED_STRATEGIES
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
    lookup = trace.drafts.index(LOOKUP) if LOOKUP in trace.drafts else None
    if lookup is None and (settings.lookup or ONLY_LOOKUP in plan.strategies):
        raise TraceError("The trace has no column of the lookup; set lookup to false.")
    simulator = Simulator(plan, settings, columns, lookup=lookup, record=record)
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
    # Each process is given all prompts once: with the target's states they are large.
    with ProcessPoolExecutor(jobs, initializer=_Share.begin, initargs=(simulator, prompts)) as pool:
        yield from pool.map(_Share.runs, range(len(prompts)), chunksize=8)


class _Share:
    """What a process of its own simulates."""

    simulator: ClassVar["Simulator"]
    prompts: ClassVar[Sequence[TracedPrompt]]

    @classmethod
    def begin(cls, simulator: "Simulator", prompts: Sequence[TracedPrompt]) -> None:
        cls.simulator, cls.prompts = simulator, prompts

    @classmethod
    def runs(cls, number: int) -> list[StrategyRun]:
        return cls.simulator.runs(cls.prompts[number], number)


class Simulator:
    """Answers traced prompts on one machine with one set of parameters.

    `columns`: where each draft stands in the traced prompts, `lookup` where the lookup does.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        settings: Settings,
        columns: Mapping[str, int],
        *,
        lookup: int | None = None,
        record: SimulationRecord | None = None,
    ) -> None:
        self._plan = plan
        self._record = record
        self._settings = settings
        self._columns = columns
        self._lookup = lookup
        self._request = GenerationRequest(prompt="-")

    def runs(self, prompt: TracedPrompt, number: int) -> list[StrategyRun]:
        """Answer a prompt with each strategy; the number tells prompts apart."""
        usual = self._replay(prompt, self._settings.lookup)
        runs = []
        for name in dict.fromkeys((BASELINE, *self._plan.strategies)):
            alone = name.removeprefix(PINNED)
            replay = usual
            if name == ONLY_LOOKUP:
                replay = self._replay(prompt, lookup=True)
            elif alone != name and alone not in usual.columns:
                replay = self._replay(prompt, self._settings.lookup, (alone,))
            runs.append(self._run(name, replay, number))
        return runs

    def iterations(
        self,
        strategy: Strategy,
        prompt: TracedPrompt,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> list[Iteration]:
        """Answer a prompt with a strategy of one's own; rankings take no time."""
        replay = self._replay(prompt, self._settings.lookup)
        machine = _Machine(replay, self._settings, self._plan.budget_bytes)
        return list(machine.generate(self._request, strategy, on_decision))

    def known_answer(self, prompt: TracedPrompt) -> KnownAnswer:
        """Return what an oracle knows of a prompt's answer on this machine."""
        return self._known(self._replay(prompt, self._settings.lookup))

    def _replay(self, prompt: TracedPrompt, lookup: bool, drafts: Sequence[str] = ()) -> Replay:
        """Return what the answer is replayed from, with the candidate drafts or with others."""
        length = self._settings.draft_length
        names = drafts or self._settings.draft_names
        limit = self._plan.max_new_tokens or len(prompt.token_ids)
        looked_up = None
        if lookup and self._lookup is not None:
            looked_up = gains(prompt, self._lookup, length)
        return Replay(
            prompt,
            all_gains(prompt, [self._columns[name] for name in names], length)[:limit],
            {name: place for place, name in enumerate(names)},
            self._plan.profile,
            looked_up,
        )

    def _known(self, replay: Replay) -> KnownAnswer:
        """Return what an oracle knows; not that an iteration with a lookup takes less time."""
        length = self._settings.draft_length
        of = [self._plan.profile.of(name) for name in replay.columns]
        gained = replay.gains
        if replay.looked_up is not None:
            sure = replay.prompt.matched[: len(gained)] >= SURE_MATCH
            gained = np.where(sure[:, None], replay.looked_up[: len(gained), None], gained)
        return KnownAnswer(
            gains=gained,
            capacity=self._settings.resident_capacity,
            interval=self._settings.scheduling_interval,
            iteration_seconds=[profile.iteration_seconds(length) for profile in of],
            load_seconds=[profile.background_load_seconds for profile in of],
            catch_up_seconds=[profile.catch_up_seconds for profile in of],
            prompt_tokens=len(replay.prompt.prompt_ids),
            load_slowdown=self._plan.profile.load_slowdown,
        )

    def _run(self, name: str, replay: Replay, number: int) -> StrategyRun:
        machine = _Machine(replay, self._settings, self._plan.budget_bytes, number)
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
            prompt_seconds=first.prompt,
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
        compared = compared_strategy(name, tuple(replay.columns), partial(self._known, replay))
        if compared is not None:
            return compared
        if name not in PREDICTING:
            return create_strategy(replace(self._settings, strategy=name))
        return TimedStrategy(
            self._predicting(name, replay, number), self._plan.profile.prediction_seconds, clock
        )

    def _predicting(self, name: str, replay: Replay, number: int) -> Strategy:
        if self._plan.recall is None:
            return create_strategy(replace(self._settings, strategy=name), self._plan.head)
        prepares = {kind.name: kind.prepares for kind in (MemSpec, PredictionOnly)}[name]
        return Foretold(
            name, prepares, tuple(replay.columns), replay.gains, self._plan.recall, number
        )


class _Machine:
    """A simulated machine with a controller on it, for one generation."""

    def __init__(
        self, replay: Replay, settings: Settings, budget_bytes: float, seed: int = 0
    ) -> None:
        self._replay = replay
        self._settings = settings
        self.clock = SimulatedClock()
        self._loader = SimulatedLoader(
            replay.profile, len(replay.prompt.prompt_ids), self.clock, seed
        )
        sizes = {name: int(replay.profile.of(name).draft_bytes) for name in replay.columns}
        self.cache = DraftCache(
            {name: DraftBytes(size, 0) for name, size in sizes.items()},
            self._loader,
            Ledger(int(budget_bytes) or sum(sizes.values())),
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
