"""What the result depends on: predictor, storage, memory, lookup, and how often topics change.

Each function simulates the same answers with one thing varied and returns a curve, which is
JSON-able:

    {"name": ..., "x_label": ..., "points": [
        {"x": a number or a text, "strategy": ...,
         "over_general_static": {"mean": ..., "low": ..., "high": ...},
         "tokens_per_second": ..., "fallback": ..., "load_wait": ..., "prediction": ...}, ...]}

`low` and `high` end the 95 % interval over prompts (bootstrap). General-Static runs under the same
conditions as the others at each x; where x is what a user could choose instead, and the curves say
so, all are over General-Static at the first x.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memspec_core.evaluation.comparison import BASELINE, PINNED, StrategyRun
from memspec_core.evaluation.comparison_report import figures_of, speed_over
from memspec_core.evaluation.foretold import Recall
from memspec_core.evaluation.paperlike import PaperLike, paper_like_trace
from memspec_core.evaluation.simulator import ONLY_LOOKUP, SimulationPlan, simulate
from memspec_core.measurement.trace import Trace
from memspec_core.request import LOOKUP
from memspec_core.strategies import PREDICTING

Curve = dict[str, Any]

Progress = Callable[[str, int, int], None]

X = float | str

RECALL_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the way from chance to a predictor that is always right."""

STORAGE_BYTES_PER_SECOND = (80e6, 200e6, 400e6, 800e6, 1.6e9, 3.2e9, 6.4e9)
"""From an SD card (80 MB/s) to a fast NVMe drive."""

SHRINKING = {"fp16": 1, "int8": 2, "int4": 4}
"""How much smaller a draft's weights become."""

PASSAGE_TOKENS = (8, 15, 30, 60, 120)

INTERVALS = (2, 4, 8, 16)
"""N, as in the paper's Figure 10."""

ENCODER_SHARE = 0.039
"""Of the time, at N = 4: what the paper's encoder takes for predictions (section 3.5)."""

MIXED = "mixed"
"""The draft that was made of all domains."""

_SHARES = ("tokens_per_second", "fallback", "load_wait", "prediction")


@dataclass(frozen=True)
class Sweep:
    """The answers and the machine that curves are made of, in `jobs` processes."""

    trace: Trace
    plan: SimulationPlan
    jobs: int = 1
    progress: Progress = lambda *_: None

    def with_parameters(self, **changes: object) -> SimulationPlan:
        """Return the plan with some of the node's parameters changed."""
        return replace(self.plan, parameters={**self.plan.parameters, **changes})

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafts to choose from."""
        return self.plan.drafts or tuple(n for n in self.trace.drafts if n != LOOKUP)

    def curve(
        self, name: str, x_label: str, plans: Mapping[X, SimulationPlan], over_first: bool = False
    ) -> Curve:
        """Simulate a plan for each x; all speeds over General-Static's at the first x, if asked."""
        return self.curve_of(
            name, x_label, {x: (self.trace, plan) for x, plan in plans.items()}, over_first
        )

    def curve_of(
        self,
        name: str,
        x_label: str,
        cases: Mapping[X, tuple[Trace, SimulationPlan]],
        over_first: bool = False,
    ) -> Curve:
        """Do the same with a trace for each x."""
        points: list[dict[str, Any]] = []
        base: Sequence[StrategyRun] = ()
        for number, (x, (trace, plan)) in enumerate(cases.items()):
            runs = simulate(trace, plan, jobs=self.jobs)
            if not base or not over_first:
                base = [run for run in runs if run.strategy == BASELINE]
            points += [_point(x, found, base) for found in _by_strategy(runs).values()]
            self.progress(name, number + 1, len(cases))
        return {"name": name, "x_label": x_label, "points": points}


def predictor_recall(sweep: Sweep, shares: Sequence[float] = RECALL_SHARES) -> Curve:
    """Vary how often the predictor is right, from chance to always."""
    first, second = (min(1.0, among / len(sweep.drafts)) for among in (1, 2))
    recalls = [
        Recall(first + share * (1.0 - first), second + share * (1.0 - second)) for share in shares
    ]
    plans: dict[X, SimulationPlan] = {
        round(recall.top_one, 3): replace(sweep.plan, head=None, recall=recall)
        for recall in recalls
    }
    return sweep.curve("predictor_recall", "share of points with the best draft first", plans)


def storage_speed(
    sweep: Sweep, bytes_per_second: Sequence[float] = STORAGE_BYTES_PER_SECOND
) -> Curve:
    """Vary how fast drafts are read from storage."""
    profile = sweep.plan.profile
    plans: dict[X, SimulationPlan] = {
        rate / 1e6: replace(sweep.plan, profile=replace(profile, storage_bytes_per_second=rate))
        for rate in bytes_per_second
    }
    return sweep.curve("storage_speed", "storage (MB/s)", plans)


def draft_bytes(sweep: Sweep) -> Curve:
    """Keep the bytes for drafts as they are, and make drafts smaller, so that more fit.

    All are over General-Static at the first x. Smaller drafts are assumed to be right as often and
    to take as long: only their loads become shorter and their number larger, so that this is what
    residency alone gives.
    """
    capacity = sweep.plan.settings(sweep.drafts).resident_capacity
    profile = sweep.plan.profile
    plans: dict[X, SimulationPlan] = {}
    for kind, factor in SHRINKING.items():
        fitting = min(capacity * factor, len(sweep.drafts))
        plans[f"{fitting} in {kind}"] = replace(
            sweep.with_parameters(resident_capacity=fitting),
            profile=replace(profile, draft_bytes=profile.draft_bytes / factor),
        )
    return sweep.curve("draft_bytes", "drafts in the same memory", plans, over_first=True)


def lookup_and_alternatives(sweep: Sweep) -> Curve:
    """Compare with one draft for everything and with the lookup alone; lookup beside drafts or not.

    All are over General-Static without the lookup. For traces with a column of the lookup.
    """
    alternatives = [ONLY_LOOKUP]
    if MIXED in sweep.trace.drafts:
        alternatives.append(f"{PINNED}{MIXED}")
    strategies = tuple(dict.fromkeys((*sweep.plan.strategies, *alternatives)))
    plans: dict[X, SimulationPlan] = {
        label: replace(sweep.with_parameters(lookup=beside), strategies=strategies)
        for label, beside in (("drafts alone", False), ("beside the lookup", True))
    }
    return sweep.curve("lookup_and_alternatives", "proposals", plans, over_first=True)


def weighing(sweep: Sweep) -> Curve:
    """Vary what the strategies that predict weigh, for plans with a head."""
    strategies = PREDICTING
    forms = {
        "the paper's form": (False, False),
        "with observation": (True, False),
        "with observation and costs": (True, True),
    }
    plans: dict[X, SimulationPlan] = {
        label: replace(
            sweep.with_parameters(observation=observation, cost_aware=costs), strategies=strategies
        )
        for label, (observation, costs) in forms.items()
    }
    return sweep.curve("weighing", "what is weighed", plans)


def slow_predictions(sweep: Sweep, intervals: Sequence[int] = INTERVALS) -> Curve:
    """Vary N where predictions take as long as those of the paper's encoder."""
    profile = sweep.plan.profile
    settings = sweep.plan.settings(sweep.drafts)
    decoding = 4 * profile.iteration_seconds(settings.draft_length)
    slow = replace(profile, prediction_seconds=ENCODER_SHARE / (1 - ENCODER_SHARE) * decoding)
    plans: dict[X, SimulationPlan] = {
        interval: replace(sweep.with_parameters(scheduling_interval=interval), profile=slow)
        for interval in intervals
    }
    return sweep.curve("slow_predictions", "N", plans)


def topic_changes(
    sweep: Sweep, like: PaperLike, passage_tokens: Sequence[int] = PASSAGE_TOKENS
) -> Curve:
    """Vary how long a passage on one topic is, in generated answers with the paper's contrasts."""
    cases: dict[X, tuple[Trace, SimulationPlan]] = {
        tokens: (paper_like_trace(replace(like, passage_tokens=tokens)), sweep.plan)
        for tokens in passage_tokens
    }
    return sweep.curve_of("topic_changes", "tokens of a passage on one topic", cases)


def parameter(sweep: Sweep, name: str, values: Sequence[int], x_label: str) -> Curve:
    """Vary one of the node's parameters, such as scheduling_interval (the paper's Figure 10)."""
    plans: dict[X, SimulationPlan] = {
        value: sweep.with_parameters(**{name: value}) for value in values
    }
    return sweep.curve(name, x_label, plans)


def answer_length(sweep: Sweep, tokens: Sequence[int]) -> Curve:
    """Vary how many tokens of each answer are generated (the paper's Figure 11)."""
    plans: dict[X, SimulationPlan] = {
        count: replace(sweep.plan, max_new_tokens=count) for count in tokens
    }
    return sweep.curve("answer_length", "tokens of an answer", plans)


def sensitivity_figures(sweep: Sweep, like: PaperLike | None = None) -> dict[str, Curve]:
    """Return all curves that a trace allows, by name; those of a generated trace with `like`.

    Raises what `simulate` does.
    """
    curves = [
        *(predictor_recall(sweep), storage_speed(sweep)),
        *(draft_bytes(sweep), slow_predictions(sweep)),
    ]
    if LOOKUP in sweep.trace.drafts:
        curves.append(lookup_and_alternatives(sweep))
    if sweep.plan.head is not None:
        curves.append(weighing(sweep))
    if like is not None:
        curves.append(topic_changes(sweep, like))
    return {curve["name"]: curve for curve in curves}


def _by_strategy(runs: Sequence[StrategyRun]) -> dict[str, list[StrategyRun]]:
    found: dict[str, list[StrategyRun]] = {}
    for run in runs:
        found.setdefault(run.strategy, []).append(run)
    return found


def _point(x: X, runs: Sequence[StrategyRun], base: Sequence[StrategyRun]) -> dict[str, Any]:
    mean, low, high = speed_over(runs, base)
    figures = figures_of(runs)
    return {
        "x": x,
        "strategy": runs[0].strategy,
        "over_general_static": {"mean": mean, "low": low, "high": high},
        **{name: figures[name] for name in _SHARES},
    }
