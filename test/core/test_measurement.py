"""Counts and times, read from the events of iterations."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.tiny import ManualClock
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.measurement.counters import WINDOW_SECONDS, RuntimeCounters
from memspec_core.measurement.statistics import (
    GenerationRecorder,
    decoding_seconds,
    summed_usage,
)
from memspec_core.request import FinishReason, GenerationResult, GenerationStats


def ran(draft: str = "a", wanted: str = "", decode: float = 1.0, **fields: Any) -> Iteration:
    seconds = IterationSeconds(
        decode, **{k: fields.pop(k) for k in ("prediction", "load_wait", "prompt") if k in fields}
    )
    values: dict[str, Any] = {
        "sequence": 0,
        "proposed": 0 if draft == "none" else 3,
        "accepted": 0,
        "committed": 1,
        "token_ids": (1,),
        "text": "a",
        "generated_tokens": 1,
    }
    return Iteration(draft=draft, wanted=wanted or draft, seconds=seconds, **(values | fields))


def recorded(*iterations: Iteration) -> GenerationStats:
    recorder, total = GenerationRecorder(prompt_tokens=7), 0
    for iteration in iterations:
        total += iteration.committed
        recorder.add(replace(iteration, generated_tokens=total))
    return recorder.stats(0.25)


def test_the_breakdown_of_a_generation() -> None:
    stats = recorded(
        ran("a", decode=2.0, prediction=0.1, load_wait=0.5, prompt=3.0, accepted=2, committed=3),
        ran("a", wanted="b", decode=1.0, accepted=1, committed=2),
        ran("b", decode=1.5, prediction=0.1, committed=1),
    )
    assert (stats.desired_seconds, stats.fallback_seconds) == (3.5, 1.0)
    assert (stats.load_wait_seconds, stats.prediction_seconds) == (0.5, pytest.approx(0.2))
    assert stats.prompt_seconds == 3.0  # apart: it is no decoding
    assert decoding_seconds(stats) == pytest.approx(5.2)
    assert stats.tokens_per_second == pytest.approx(6 / 5.2)
    assert stats.time_to_first_token_seconds == 0.25
    assert (stats.prompt_tokens, stats.generated_tokens, stats.iterations) == (7, 6, 3)
    assert (stats.drafted_tokens, stats.accepted_tokens) == (9, 3)
    assert stats.mean_accepted == 1.0
    assert stats.draft_switches == 1


def test_what_each_draft_did() -> None:
    stats = recorded(
        ran("a", decode=2.0, accepted=2, committed=3), ran("none"), ran("a", accepted=1)
    )
    a, plain = stats.drafts
    assert (a.draft, a.iterations, a.drafted_tokens, a.accepted_tokens) == ("a", 2, 6, 3)
    assert (a.generated_tokens, a.seconds) == (4, 3.0)
    assert (plain.draft, plain.iterations, plain.drafted_tokens) == ("none", 1, 0)
    assert (a.judged_at, a.accepted_at) == ((2, 2, 1), (2, 1))
    summed = summed_usage([stats, recorded(ran("a", accepted=3))])["a"]
    assert summed.drafted_tokens == 9
    assert (summed.judged_at, summed.accepted_at) == ((3, 3, 2), (3, 2, 1))


def test_switches_are_between_drafts_not_to_plain_and_back() -> None:
    assert recorded(ran("a"), ran("none"), ran("a"), ran("b"), ran("a")).draft_switches == 2


def test_a_closing_event_is_no_iteration() -> None:
    closing = ran("a", decode=0.0, proposed=0, committed=0, prediction=0.5)
    stats = recorded(ran("a"), closing)
    assert stats.iterations == 1
    assert stats.prediction_seconds == 0.5
    assert stats.drafts[0].iterations == 1


def test_nothing_happened() -> None:
    stats = recorded()
    assert (stats.mean_accepted, stats.tokens_per_second, stats.drafts) == (0.0, 0.0, ())


durations = st.floats(0.001, 10.0)
iterations = st.builds(
    ran,
    st.sampled_from(["a", "b", "none"]),
    st.sampled_from(["a", "b", "none"]),
    durations,
    prediction=durations,
    load_wait=durations,
    accepted=st.integers(0, 3),
    committed=st.integers(0, 4),
)


@given(st.lists(iterations, max_size=15))
def test_every_moment_and_token_is_counted_once(events: list[Iteration]) -> None:
    stats = recorded(*events)
    clock = ManualClock()
    counters = RuntimeCounters(clock)
    for event in events:
        counters.count_iteration(event)
    spent = sum(e.seconds.decode + e.seconds.prediction + e.seconds.load_wait for e in events)
    assert decoding_seconds(stats) == pytest.approx(spent)
    assert sum(usage.seconds for usage in stats.drafts) == pytest.approx(
        stats.desired_seconds + stats.fallback_seconds
    )
    tokens = sum(event.committed for event in events)
    assert stats.generated_tokens == sum(u.generated_tokens for u in stats.drafts) == tokens
    shown = counters.snapshot()
    assert shown.fallback_seconds == pytest.approx(stats.fallback_seconds)
    if events:
        wait = stats.load_wait_seconds / spent
        total = shown.desired_ratio + shown.fallback_ratio + shown.predictor_ratio + wait
        assert total == pytest.approx(1.0)
        assert shown.fallback_ratio_window == pytest.approx(shown.fallback_ratio)
        assert shown.tokens_per_second_mean == pytest.approx(tokens / spent)


def test_the_window_of_a_minute() -> None:
    clock = ManualClock()
    counters = RuntimeCounters(clock)
    counters.count_iteration(ran("a", wanted="b", decode=2.0))
    clock.seconds += WINDOW_SECONDS / 2
    counters.count_iteration(ran("a", decode=2.0))
    assert counters.snapshot().fallback_ratio_window == 0.5
    clock.seconds += WINDOW_SECONDS / 2 + 1.0
    assert counters.snapshot().fallback_ratio_window == 0.0
    assert counters.snapshot().fallback_ratio == 0.5
    clock.seconds += WINDOW_SECONDS
    assert counters.snapshot().fallback_ratio_window == 0.0


def test_speed_now_and_on_the_whole() -> None:
    clock = ManualClock()
    counters = RuntimeCounters(clock)
    counters.count_iteration(ran("a", decode=1.0, committed=2))
    assert counters.snapshot().tokens_per_second_now == 2.0
    clock.seconds += 5.0
    assert counters.snapshot().tokens_per_second_now == 0.0
    counters.count_iteration(ran("a", decode=0.5, committed=4))
    shown = counters.snapshot()
    assert (shown.tokens_per_second_now, shown.tokens_per_second_mean) == (8.0, 4.0)


def test_how_generations_ended() -> None:
    counters = RuntimeCounters(ManualClock())
    for reason in FinishReason:
        counters.count_accepted()
        counters.count_result(
            GenerationResult("", (), reason, stats=GenerationStats(time_to_first_token_seconds=0.5))
        )
    counters.count_rejected()
    shown = counters.snapshot()
    assert (shown.accepted, shown.succeeded, shown.cancelled, shown.aborted, shown.rejected) == (
        6,
        4,
        1,
        1,
        1,
    )
    assert shown.time_to_first_token_seconds == 0.0  # none of them had a token
    stats = GenerationStats(generated_tokens=1, time_to_first_token_seconds=0.5)
    counters.count_result(GenerationResult("a", (1,), FinishReason.LENGTH, stats=stats))
    assert counters.snapshot().time_to_first_token_seconds == 0.5


def test_acceptance_and_uses_of_a_draft() -> None:
    counters = RuntimeCounters(ManualClock())
    assert (counters.acceptance("a"), counters.uses("a")) == (0.0, 0)
    counters.count_iteration(ran("a", accepted=3))
    counters.count_iteration(ran("a", accepted=0))
    counters.count_iteration(ran("none"))
    assert (counters.acceptance("a"), counters.uses("a")) == (0.5, 2)
    assert counters.acceptance("none") == 0.0
    assert counters.acceptance_by_position("a") == (0.5, 1.0, 1.0)
    assert counters.acceptance_by_position("none") == ()
