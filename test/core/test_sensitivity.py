"""Curves of what the result depends on."""

import json
from dataclasses import replace

import numpy as np

from core.test_simulator import plan_for, traced
from memspec_core.evaluation.paperlike import PaperLike
from memspec_core.evaluation.sensitivity import (
    Curve,
    Sweep,
    answer_length,
    draft_bytes,
    parameter,
    predictor_recall,
    sensitivity_figures,
    slow_predictions,
    storage_speed,
    topic_changes,
    weighing,
)
from memspec_core.measurement.trace import Trace

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


def test_slow_predictions_make_short_intervals_dear() -> None:
    curve = slow_predictions(sweep(), (1, 4))
    assert [point["x"] for point in curve["points"][::3]] == [1, 4]
    often, seldom = of(curve, "memspec", "prediction")
    assert seldom < 0.05 < often


def test_topics_that_change_more_often() -> None:
    curve = topic_changes(sweep(), PaperLike(prompts=1, tokens=64), (8, 64))
    assert [point["x"] for point in curve["points"]] == [8] * 3 + [64] * 3
    assert of(curve, "general_static") == [1.0, 1.0]


def test_smaller_drafts_in_the_same_memory() -> None:
    curve = draft_bytes(sweep())
    assert [p["x"] for p in curve["points"][::3]] == ["2 in fp16", "4 in int8", "5 in int4"]
    fallback = of(curve, "memspec", "fallback")
    assert fallback[0] > fallback[2]
    # The baseline is never waited for: the same at each x.
    assert of(curve, "general_static") == [1.0, 1.0, 1.0]


def with_lookup() -> Trace:
    """Return answers with a lookup that is right at every fourth place."""
    trace = traced(1)
    names = ("mixed", *trace.drafts[1:], "lookup")
    prompts = []
    for prompt in trace.prompts:
        matched = np.where(np.arange(len(prompt.token_ids)) % 4 == 0, 4, 0).astype(np.uint8)
        accepted = np.column_stack([prompt.accepted, np.where(matched, 3, 0).astype(np.uint8)])
        prompts.append(replace(prompt, accepted=accepted, matched=matched))
    return Trace(replace(trace.header, drafts=dict.fromkeys(names, "")), prompts)


def test_the_lookup_and_one_draft_for_all() -> None:
    plan = replace(plan_for(), strategies=("memspec",), drafts=("code", "math"))
    figures = sensitivity_figures(Sweep(with_lookup(), plan), PaperLike(prompts=1, tokens=40))
    assert set(figures) == {
        *("predictor_recall", "storage_speed", "draft_bytes", "slow_predictions"),
        *("lookup_and_alternatives", "topic_changes"),
    }
    curve = figures["lookup_and_alternatives"]
    alone, beside = of(curve, "memspec")
    assert beside > alone
    assert len(of(curve, "static:mixed")) == 2
    lookup = of(curve, "static:lookup")
    assert lookup[0] == lookup[1]
    assert of(curve, "general_static")[0] == 1.0 < of(curve, "general_static")[1]


def test_what_is_weighed() -> None:
    curve = weighing(replace(sweep(), plan=replace(plan_for(), recall=None, head=None)))
    assert [point["x"] for point in curve["points"][::3]] == [
        "the paper's form",
        "with observation",
        "with observation and costs",
    ]


def test_parameters_and_lengths() -> None:
    curve = parameter(sweep(), "scheduling_interval", (2, 8), "N")
    assert curve["name"] == "scheduling_interval"
    assert [point["x"] for point in curve["points"]] == [2] * 3 + [8] * 3
    curve = answer_length(sweep(), (20, 60))
    assert [point["x"] for point in curve["points"]] == [20] * 3 + [60] * 3
