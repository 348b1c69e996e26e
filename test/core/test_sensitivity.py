"""Curves of what the result depends on."""

import json
from dataclasses import replace

from core.test_simulator import plan_for, traced
from memspec_core.evaluation.paperlike import PaperLike
from memspec_core.evaluation.sensitivity import (
    Curve,
    Sweep,
    predictor_recall,
    storage_speed,
    topic_changes,
)

STRATEGIES = ("memspec", "mab_async")


def sweep(**changes: object) -> Sweep:
    return Sweep(traced(), replace(plan_for(**changes), strategies=STRATEGIES))


def of(curve: Curve, strategy: str, figure: str = "over_general_static") -> list[float]:
    """Return one strategy's figures along a curve."""
    found = [point[figure] for point in curve["points"] if point["strategy"] == strategy]
    return [one["mean"] if isinstance(one, dict) else one for one in found]


def test_a_better_predictor_is_faster() -> None:
    curve = predictor_recall(sweep(), (0.0, 1.0))
    assert [point["x"] for point in curve["points"][::3]] == [0.2, 1.0]
    worst, best = of(curve, "memspec")
    assert worst < best
    assert len(set(of(curve, "mab_async"))) == 1
    assert json.loads(json.dumps(curve)) == curve
    for point in curve["points"]:
        ends = point["over_general_static"]
        assert ends["low"] <= ends["mean"] <= ends["high"]


def test_faster_storage_leaves_less_fallback() -> None:
    curve = storage_speed(sweep(), (2e5, 5e5, 1e9))
    fallback = of(curve, "memspec", "fallback")
    assert fallback[0] > fallback[1] > fallback[2]
    assert curve["points"][0]["x"] == 0.2


def test_topics_that_change_more_often() -> None:
    curve = topic_changes(sweep(), PaperLike(prompts=1, tokens=64), (8, 64))
    assert [point["x"] for point in curve["points"]] == [8] * 3 + [64] * 3
    assert of(curve, "general_static") == [1.0, 1.0]
