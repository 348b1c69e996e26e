"""Strategies compared by real runs: the same prompts, drafts and memory for each.

A round is one prompt answered by every strategy in turn, each from the same beginning: no draft is
resident, and, if asked, none of their files is in the page cache. The first load is the only one
that every strategy may wait for; it is left out of the rates, as prompt processing is.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memspec_core.errors import MeasurementError, SettingsError
from memspec_core.iteration import Iteration
from memspec_core.models.draft import draft_folder
from memspec_core.models.pieces import forget
from memspec_core.request import FinishReason, GenerationRequest
from memspec_core.runtime import Runtime
from memspec_core.settings import Settings
from memspec_core.snapshot import DraftState
from memspec_core.strategies import GeneralStatic, StaticStrategy, Strategy
from memspec_core.training.prompts import PromptSet

PAPER_FORM: Mapping[str, object] = {
    "draft_length": 3,
    "lookup": False,
    "observation": False,
    "cost_aware": False,
}
"""The runtime without what this project adds to the paper: one length, no lookup, nothing weighed
by what is seen or by costs."""

BASELINE = GeneralStatic.name
PINNED = "static:"
"""Before a draft's name: that draft alone, whatever the domain."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ComparisonPlan:
    """What to compare. `parameters` are the node's; `cold`: files are read from disc each time.

    `strategies`: names of the settings', or "static:" and a draft's name. The baseline is always
    measured as well.
    """

    parameters: Mapping[str, object]
    prompt_sets: tuple[PromptSet, ...]
    strategies: tuple[str, ...]
    max_new_tokens: int = 128
    repeats: int = 1
    cold: bool = True

    def settings(self) -> Settings:
        """Return the settings of all runs; raises `SettingsError`."""
        settings = Settings.from_parameters({**self.parameters, "strategy": "memspec"})
        for name in self.strategies:
            draft = name.removeprefix(PINNED)
            if draft != name and draft not in settings.draft_names:
                raise SettingsError(f"There is no draft '{draft}' to compare with.")
            if draft == name:
                Settings.from_parameters({**self.parameters, "strategy": name})
        return settings


@dataclass(frozen=True)
class StrategyRun:
    """One answer with one strategy; seconds by kind, without the first load's `first_wait`.

    `elapsed`: seconds on the clock from the first iteration's beginning to the last one's end.
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
    first_wait: float
    elapsed: float
    switches: int
    loads: int
    token_ids: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """The time of decoding: the four kinds."""
        return self.desired + self.fallback + self.load_wait + self.prediction


def compare(plan: ComparisonPlan, progress: Progress) -> list[StrategyRun]:
    """Run every strategy on every prompt.

    Raises `SettingsError`, `CheckpointError`, `MemoryBudgetError`, and `MeasurementError` if an
    answer fails.
    """
    settings = plan.settings()
    runtime = Runtime(settings)
    runtime.load()
    try:
        runtime.open()
        return _Comparison(plan, settings, runtime).runs(progress)
    finally:
        runtime.close()


class _Comparison:
    def __init__(self, plan: ComparisonPlan, settings: Settings, runtime: Runtime) -> None:
        self._plan = plan
        self._runtime = runtime
        self._names = tuple(dict.fromkeys((BASELINE, *plan.strategies)))
        self._folders = [draft_folder(draft.name, draft.path) for draft in settings.drafts]

    def runs(self, progress: Progress) -> list[StrategyRun]:
        prompts = [
            (prompt_set.name, index, text)
            for _ in range(self._plan.repeats)
            for prompt_set in self._plan.prompt_sets
            for index, text in enumerate(prompt_set.texts)
        ]
        runs: list[StrategyRun] = []
        self._answer(BASELINE, "", 0, prompts[0][2])  # warms up
        for number, (set_name, index, text) in enumerate(prompts):
            # The order turns, so that no strategy always comes after the same one.
            turn = number % len(self._names)
            order = (*self._names[turn:], *self._names[:turn])
            runs += [self._answer(name, set_name, index, text) for name in order]
            progress("comparing strategies", number + 1, len(prompts))
        return runs

    def _answer(self, name: str, set_name: str, index: int, text: str) -> StrategyRun:
        self._forget()
        loads = self._runtime.snapshot().loads.loads
        iterations: list[Iteration] = []
        moments: list[float] = []

        def listen(iteration: Iteration) -> None:
            iterations.append(iteration)
            moments.append(time.perf_counter())

        request = GenerationRequest(prompt=text, max_new_tokens=self._plan.max_new_tokens)
        result = self._runtime.submit(request, listen, self._strategy(name)).result()
        if result.finish_reason is FinishReason.ABORTED:
            raise MeasurementError(result.error)
        first, stats = iterations[0].seconds, result.stats
        return StrategyRun(
            strategy=name,
            prompt_set=set_name,
            prompt=index,
            tokens=stats.generated_tokens,
            iterations=stats.iterations,
            desired=stats.desired_seconds,
            fallback=stats.fallback_seconds,
            load_wait=stats.load_wait_seconds - first.load_wait,
            prediction=stats.prediction_seconds,
            first_wait=first.load_wait,
            elapsed=moments[-1] - moments[0] + first.decode + first.prediction,
            switches=stats.draft_switches,
            loads=self._runtime.snapshot().loads.loads - loads,
            token_ids=result.token_ids,
        )

    def _strategy(self, name: str) -> Strategy:
        draft = name.removeprefix(PINNED)
        return StaticStrategy(draft) if draft != name else self._runtime.strategy(name)

    def _forget(self) -> None:
        while self._runtime.snapshot().draft_names_in(DraftState.LOADING):
            time.sleep(0.001)
        self._runtime.unload_drafts()
        if self._plan.cold:
            for folder in self._folders:
                for file in folder.iterdir():
                    forget(file)
