"""The curves of sensitivity beyond the paper, part by part, and as figures."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from memspec_core.evaluation.comparison import BASELINE
from memspec_core.evaluation.paperlike import PaperLike
from memspec_core.evaluation.reproduction.estimates import Estimate
from memspec_core.evaluation.reproduction.figures import (
    BARS,
    LINES,
    MAB_ASYNC,
    PREDICTION_ONLY,
    Form,
    Panel,
    Value,
)
from memspec_core.evaluation.reproduction.folder import Output
from memspec_core.evaluation.reproduction.measured import SWEPT, Measured, Progress, Simulated
from memspec_core.evaluation.sensitivity import (
    Curve,
    Sweep,
    draft_bytes,
    lookup_and_alternatives,
    predictor_recall,
    slow_predictions,
    storage_speed,
    topic_changes,
    weighing,
)
from memspec_core.measurement.trace import Trace
from memspec_core.request import LOOKUP

_BASIC: dict[str, Callable[[Sweep], Curve]] = {
    "predictor_recall": predictor_recall,
    "storage_speed": storage_speed,
    "draft_bytes": draft_bytes,
    "slow_predictions": slow_predictions,
}

_TOKENS_A_SECOND = "tokens/s, over General-Static"


def simulate_curves(
    setting: Simulated,
    every_draft: Trace,
    output: Output,
    progress: Progress,
    like: PaperLike | None = None,
) -> dict[str, Curve]:
    """Simulate all curves that a setting allows, taking over those that are done.

    `every_draft`: its prompts with all drafts that were traced, to compare with. `like`: how a
    generated setting was generated.
    """
    makers = {**_BASIC, "weighing": weighing}
    if LOOKUP in every_draft.drafts:
        makers["lookup_and_alternatives"] = lookup_and_alternatives
    if like is not None:
        makers["topic_changes"] = partial(topic_changes, like=like)

    def shown(name: str, done: int, total: int) -> None:
        progress(f"{setting.name} {name}", done, total)

    plan = setting.plan(setting.base, SWEPT, drafts=setting.trace.drafts)
    sweep = Sweep(every_draft, plan, setting.jobs, shown)
    return {
        name: output.part(f"{setting.name}_{name}", lambda make=make: make(sweep))  # type: ignore[misc]
        for name, make in makers.items()
    }


def curve_panel(name: str, measured: Measured) -> Panel | None:
    """Return a curve as a figure."""
    curve = measured.curves.get(name)
    if curve is None:
        return None
    values = [_value(point) for point in curve["points"]]
    if all(value.estimate.mean == 1.0 for value in values if value.series == BASELINE):
        values = [value for value in values if value.series != BASELINE]
    series = dict.fromkeys(value.series for value in values)
    ordered = (value for one in series for value in values if value.series == one)
    return Panel(measured.name, tuple(ordered))


def _value(point: Mapping[str, Any]) -> Value:
    strategy, x, over = point["strategy"], point["x"], point["over_general_static"]
    return Value(
        strategy,
        x if isinstance(x, str) else f"{x:g}",
        Estimate(over["mean"], over["low"], over["high"]),
        tabled=strategy not in (MAB_ASYNC, PREDICTION_ONLY),
    )


def _form(name: str, about: str, kind: str, x_label: str = "", x_name: str = "{}") -> Form:
    return Form(
        f"sensitivity_{name}",
        "Sensitivity",
        about,
        kind,
        _TOKENS_A_SECOND,
        x_label,
        (),
        partial(curve_panel, name),
        x_name,
    )


CURVE_FORMS = (
    _form(
        "predictor_recall",
        "how often the predictor is right",
        LINES,
        "share of points at which the best draft comes first, as set",
        "best first at {}",
    ),
    _form("storage_speed", "how fast drafts are read", LINES, "MB/s of the storage", "{} MB/s"),
    _form(
        "slow_predictions",
        "the scheduling interval, were predictions as slow as those of the paper's encoder",
        LINES,
        "iterations between scheduling points",
        "N = {}",
    ),
    _form("draft_bytes", "smaller drafts in the same memory", BARS),
    _form("lookup_and_alternatives", "the lookup, and one draft for all", BARS),
    _form("weighing", "what MemSpec weighs", BARS),
    _form(
        "topic_changes",
        "how long a passage is on one topic",
        LINES,
        "tokens of a passage",
        "passages of {} tokens",
    ),
)
