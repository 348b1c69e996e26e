"""What the result depends on: predictor, storage, memory, lookup, and how often topics change.

Each function simulates the same answers with one thing varied and returns a curve, which is
JSON-able:

    {"name": ..., "x_label": ..., "points": [
        {"x": a number or a text, "strategy": ...,
         "over_general_static": {"mean": ..., "low": ..., "high": ...},
         "tokens_per_second": ..., "fallback": ..., "load_wait": ..., "prediction": ...}, ...]}

`low` and `high` end the 95 % interval over prompts (bootstrap). The baseline runs under the same
conditions as the others at each x, so that every ratio is of one simulated machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memspec_core.evaluation.comparison_report import ALL, as_json
from memspec_core.evaluation.foretold import Recall
from memspec_core.evaluation.paperlike import PaperLike, paper_like_trace
from memspec_core.evaluation.simulator import SimulationPlan, simulate
from memspec_core.measurement.trace import Trace
from memspec_core.request import LOOKUP

Curve = dict[str, Any]

Progress = Callable[[str, int, int], None]

RECALL_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the way from chance to a predictor that is always right."""

STORAGE_BYTES_PER_SECOND = (80e6, 200e6, 400e6, 800e6, 1.6e9, 3.2e9, 6.4e9)
"""From an SD card (80 MB/s) to a fast NVMe drive."""

PASSAGE_TOKENS = (8, 15, 30, 60, 120)

_SHARES = ("fallback", "load_wait", "prediction")


@dataclass(frozen=True)
class Sweep:
    """The answers and the machine that curves are made of, in `jobs` processes."""

    trace: Trace
    plan: SimulationPlan
    jobs: int = 1
    progress: Progress = lambda *_: None

    def curve(
        self, name: str, x_label: str, variants: Mapping[float | str, SimulationPlan]
    ) -> Curve:
        """Simulate a plan for each x."""
        points: list[dict[str, Any]] = []
        for number, (x, plan) in enumerate(variants.items()):
            points += _points(x, self.trace, plan, self.jobs)
            self.progress(name, number + 1, len(variants))
        return {"name": name, "x_label": x_label, "points": points}


def predictor_recall(sweep: Sweep, shares: Sequence[float] = RECALL_SHARES) -> Curve:
    """Vary how often the predictor is right, from chance to always."""
    drafts = len([name for name in sweep.trace.drafts if name != LOOKUP])
    variants: dict[float | str, SimulationPlan] = {}
    for share in shares:
        first, second = (
            chance + share * (1.0 - chance) for chance in (1 / drafts, min(1.0, 2 / drafts))
        )
        plan = replace(sweep.plan, head=None, recall=Recall(first, second))
        variants[round(first, 3)] = plan
    return sweep.curve("predictor_recall", "share of points with the best draft first", variants)


def storage_speed(
    sweep: Sweep, bytes_per_second: Sequence[float] = STORAGE_BYTES_PER_SECOND
) -> Curve:
    """Vary how fast drafts are read from storage."""
    profile = sweep.plan.profile
    variants: dict[float | str, SimulationPlan] = {
        rate / 1e6: replace(sweep.plan, profile=replace(profile, storage_bytes_per_second=rate))
        for rate in bytes_per_second
    }
    return sweep.curve("storage_speed", "storage (MB/s)", variants)


def topic_changes(
    sweep: Sweep, like: PaperLike, passage_tokens: Sequence[int] = PASSAGE_TOKENS
) -> Curve:
    """Vary how long a passage on one topic is, in generated answers with the paper's contrasts."""
    points: list[dict[str, Any]] = []
    name = "topic_changes"
    for number, tokens in enumerate(passage_tokens):
        trace = paper_like_trace(replace(like, passage_tokens=tokens))
        points += _points(tokens, trace, sweep.plan, sweep.jobs)
        sweep.progress(name, number + 1, len(passage_tokens))
    return {
        "name": name,
        "x_label": "tokens from one change of topic to the next",
        "points": points,
    }


def _points(x: float | str, trace: Trace, plan: SimulationPlan, jobs: int) -> list[dict[str, Any]]:
    figures = as_json(simulate(trace, plan, jobs=jobs))
    whole = figures.get(ALL) or next(iter(figures.values()))
    return [
        {
            "x": x,
            "strategy": strategy,
            "over_general_static": interval(found["over_general_static"]),
            "tokens_per_second": found["tokens_per_second"],
            **{share: found[share] for share in _SHARES},
        }
        for strategy, found in whole.items()
    ]


def interval(ends: Sequence[float]) -> dict[str, float]:
    """Return a mean with the ends of its interval by name."""
    mean, low, high = ends
    return {"mean": mean, "low": low, "high": high}
