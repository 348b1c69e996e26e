"""Strategies compared by real runs: the same prompts, drafts and memory for each.

A round is one prompt answered by every strategy in turn, each from the same beginning: no draft is
resident, and, if asked, none of their files is in the page cache. The first load is the only one
that every strategy may wait for; it is left out of the rates, as prompt processing is.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from memspec_core.errors import MeasurementError, SettingsError, TraceError
from memspec_core.evaluation.acceptance import all_gains
from memspec_core.iteration import Iteration
from memspec_core.measurement.trace import Trace, hash_of_prompt, read_trace
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.draft import draft_folder
from memspec_core.models.pieces import forget
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.request import FinishReason, GenerationRequest
from memspec_core.runtime import Runtime
from memspec_core.settings import Settings
from memspec_core.snapshot import DraftState
from memspec_core.strategies import GeneralStatic, StaticStrategy, Strategy
from memspec_core.strategies.known_answer import KnownAnswer
from memspec_core.strategies.oracle import OracleDynamic, OracleStatic
from memspec_core.training.prompts import PromptSet

PAPER_FORM: Mapping[str, object] = {
    "scheduling_interval": 4,
    "draft_length": 3,
    "lookup": False,
    "observation": False,
    "cost_aware": False,
}
"""The runtime as in the paper: N = 4, one draft length, no lookup, nothing weighed by what is seen
or by costs."""

BASELINE = GeneralStatic.name
ORACLES = (OracleStatic.name, OracleDynamic.name)
"""Strategies that know the answer, from a trace."""

PINNED = "static:"
"""Before a draft's name: that draft alone, whatever the domain."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Round:
    """A prompt that every strategy answers in turn, by its set and its place in it.

    `repeat` counts how often it was answered before.
    """

    prompt_set: str
    prompt: int
    repeat: int
    text: str


@dataclass(frozen=True)
class ComparisonPlan:
    """What to compare. `parameters` are the node's; `cold`: files are read from disc each time.

    `strategies`: names of the settings', of oracles, or "static:" and a draft's name. The baseline
    is always measured as well. `trace`: of the same prompts and drafts, for the oracles.
    """

    parameters: Mapping[str, object]
    prompt_sets: tuple[PromptSet, ...]
    strategies: tuple[str, ...]
    max_new_tokens: int = 128
    repeats: int = 1
    cold: bool = True
    trace: Path | None = None

    def settings(self) -> Settings:
        """Return the settings of all runs; raises `SettingsError`."""
        settings = Settings.from_parameters({**self.parameters, "strategy": "memspec"})
        for name in self.strategies:
            draft = name.removeprefix(PINNED)
            if draft != name and draft not in settings.draft_names:
                raise SettingsError(f"There is no draft '{draft}' to compare with.")
            if draft == name and name not in ORACLES:
                Settings.from_parameters({**self.parameters, "strategy": name})
        if set(ORACLES) & set(self.strategies) and not (self.trace and settings.draft_length):
            raise SettingsError(
                "An oracle needs a trace of the prompts (memspec trace), and a fixed draft_length."
            )
        return settings

    def rounds(self) -> list[Round]:
        """Return what is answered, in order; all prompts once before any of them again."""
        return [
            Round(prompt_set.name, index, repeat, text)
            for repeat in range(self.repeats)
            for prompt_set in self.prompt_sets
            for index, text in enumerate(prompt_set.texts)
        ]


@dataclass(frozen=True)
class StrategyRun:
    """One answer with one strategy; seconds by kind, without the first load's `first_wait`.

    `elapsed`: seconds on the clock from the first iteration's beginning to the last one's end;
    `prompt_seconds`: before that, the target's and the first draft's reading of the prompt.
    """

    strategy: str
    prompt_set: str
    prompt: int
    tokens: int
    iterations: int
    desired: float
    fallback: float
    load_wait: float
    prediction: float
    prompt_seconds: float
    first_wait: float
    elapsed: float
    switches: int
    loads: int
    token_ids: tuple[int, ...]
    repeat: int = 0

    @property
    def seconds(self) -> float:
        """The time of decoding: the four kinds."""
        return self.desired + self.fallback + self.load_wait + self.prediction


@dataclass(frozen=True)
class Answered:
    """One answer in full; `run` without the name of a prompt set is one of the warm-up's.

    `load_seconds`: what all of its loads took.
    """

    run: StrategyRun
    load_seconds: float
    prompt_ids: tuple[int, ...]
    iterations: tuple[Iteration, ...]


class Observer(Protocol):
    """Sees what a comparison does."""

    def answered(self, answer: Answered) -> None:
        """See an answer."""
        ...

    def ended(self, runtime: Runtime) -> None:
        """See the runtime at the end, while it is still loaded."""
        ...


def compare(
    plan: ComparisonPlan, progress: Progress, observer: Observer | None = None
) -> list[StrategyRun]:
    """Run every strategy on every prompt.

    Raises `SettingsError`, `CheckpointError`, `MemoryBudgetError`, and `MeasurementError` if an
    answer fails.
    """
    settings = plan.settings()
    trace = None
    if plan.trace is not None:
        trace = read_trace(plan.trace, open_checkpoint(settings.target_path).sha256())
    runtime = Runtime(settings)
    runtime.load()
    try:
        runtime.open()
        runs = _Comparison(plan, settings, runtime, trace, observer).runs(progress)
        if observer is not None:
            observer.ended(runtime)
        return runs
    finally:
        runtime.close()


def compared_strategy(
    name: str, draft_names: Sequence[str], known: Callable[[], KnownAnswer]
) -> Strategy | None:
    """Return an oracle over a known answer, or one draft alone; None for what settings may name."""
    oracles = {kind.name: kind for kind in (OracleStatic, OracleDynamic)}
    if name in oracles:
        return oracles[name](draft_names, known())
    return StaticStrategy(name.removeprefix(PINNED)) if name.startswith(PINNED) else None


class _Comparison:
    def __init__(
        self,
        plan: ComparisonPlan,
        settings: Settings,
        runtime: Runtime,
        trace: Trace | None,
        observer: Observer | None,
    ) -> None:
        self._plan = plan
        self._observer = observer
        self._settings = settings
        self._trace = trace
        self._tokenizer = Tokenizer.of(open_checkpoint(settings.target_path))
        self._runtime = runtime
        self._names = tuple(dict.fromkeys((BASELINE, *plan.strategies)))
        self._folders = [draft_folder(draft.name, draft.path) for draft in settings.drafts]

    def runs(self, progress: Progress) -> list[StrategyRun]:
        rounds = self._plan.rounds()
        runs: list[StrategyRun] = []
        for draft in self._settings.draft_names:  # warms up, and shows what each draft costs
            self._answer(f"{PINNED}{draft}", Round("", 0, 0, rounds[0].text))
        for number, asked in enumerate(rounds):
            # The order turns, so that no strategy always comes after the same one.
            turn = number % len(self._names)
            order = (*self._names[turn:], *self._names[:turn])
            runs += [self._answer(name, asked) for name in order]
            progress("comparing strategies", number + 1, len(rounds))
        return runs

    def _answer(self, name: str, asked: Round) -> StrategyRun:
        self._forget()
        before = self._runtime.snapshot().loads
        iterations: list[Iteration] = []
        moments: list[float] = []

        def listen(iteration: Iteration) -> None:
            iterations.append(iteration)
            moments.append(time.perf_counter())

        request = GenerationRequest(prompt=asked.text, max_new_tokens=self._plan.max_new_tokens)
        result = self._runtime.submit(request, listen, self._strategy(name, request)).result()
        if result.finish_reason is FinishReason.ABORTED:
            raise MeasurementError(result.error)
        first, stats = iterations[0].seconds, result.stats
        after = self._runtime.snapshot().loads
        run = StrategyRun(
            strategy=name,
            prompt_set=asked.prompt_set,
            prompt=asked.prompt,
            tokens=stats.generated_tokens,
            iterations=stats.iterations,
            desired=stats.desired_seconds,
            fallback=stats.fallback_seconds,
            load_wait=stats.load_wait_seconds - first.load_wait,
            prediction=stats.prediction_seconds,
            prompt_seconds=stats.prompt_seconds,
            first_wait=first.load_wait,
            elapsed=moments[-1] - moments[0] + first.decode + first.prediction,
            switches=stats.draft_switches,
            loads=after.loads - before.loads,
            token_ids=result.token_ids,
            repeat=asked.repeat,
        )
        if self._observer is not None:
            ids = tuple(self._prompt_ids(request))
            spent = after.load_seconds_sum - before.load_seconds_sum
            self._observer.answered(Answered(run, spent, ids, tuple(iterations)))
        return run

    def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        return self._tokenizer.prompt_ids(request.validated(()))

    def _strategy(self, name: str, request: GenerationRequest) -> Strategy:
        known = partial(self._known, request)
        compared = compared_strategy(name, self._settings.draft_names, known)
        return compared or self._runtime.strategy(name)

    def _known(self, request: GenerationRequest) -> KnownAnswer:
        """Return what an oracle knows of an answer; raises `TraceError` if the trace has it not."""
        assert self._trace is not None
        ids = self._prompt_ids(request)
        asked = hash_of_prompt(ids)
        prompt = next((p for p in self._trace.prompts if p.prompt_hash == asked), None)
        missing = set(self._settings.draft_names) - set(self._trace.drafts)
        if prompt is None or missing:
            what = f"the draft {min(missing)}" if missing else f"the prompt {request.prompt[:40]!r}"
            raise TraceError(f"The trace in {self._plan.trace} lacks {what}; make it with both.")
        columns = [self._trace.drafts.index(name) for name in self._settings.draft_names]
        length, costs = self._settings.draft_length, self._runtime.draft_costs()
        names = self._settings.draft_names
        loading = self._runtime.snapshot().loads.load_seconds_p50
        return KnownAnswer(
            gains=all_gains(prompt, columns, length),
            capacity=self._settings.resident_capacity,
            interval=self._settings.scheduling_interval,
            iteration_seconds=[costs.iteration_seconds(name, length) for name in names],
            load_seconds=[loading] * len(names),
            catch_up_seconds=[costs.catch_up_seconds(name, 1) for name in names],
            prompt_tokens=len(ids),
            load_slowdown=1.0 / (1.0 - costs.lost_seconds(1.0)),
        )

    def _forget(self) -> None:
        while self._runtime.snapshot().draft_names_in(DraftState.LOADING):
            time.sleep(0.001)
        self._runtime.unload_drafts()
        if self._plan.cold:
            for folder in self._folders:
                for file in folder.iterdir():
                    forget(file)
