"""The ranking head, its contexts, and what is observed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memspec_core.errors import PredictorError
from memspec_core.prediction import head as head_module
from memspec_core.prediction.context import (
    BOTH,
    POSITIONS,
    PROMPT,
    RECENT,
    context_vector,
    last_mean,
    prompt_mean,
    recent_mean,
)
from memspec_core.prediction.head import (
    HIDDEN_STATES,
    MANIFEST,
    WEIGHTS,
    PredictorPlan,
    RankingHead,
    load_head,
    save_head,
)
from memspec_core.prediction.observation import ObservedAcceptance, expected_tokens
from memspec_core.prediction.predictor import Predictor

PLAN = PredictorPlan(
    drafts=("code", "math"),
    inputs=RECENT,
    encoder=HIDDEN_STATES,
    hidden_size=3,
    positions=16,
    prompt_positions=16,
    interval=4,
    target_sha256="a" * 64,
    card={"figures": {"top": 0.5}},
)


def array(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


def make_head() -> RankingHead:
    return RankingHead(
        PLAN,
        weight=array([1, 0, 0], [0, 1, 0]),
        bias=array(0, 0),
        acceptance=array([0.8, 0.4], [0.2, 0.6]),
    )


# Contexts


def states(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float16)[:, None] * np.ones(3, np.float16)


def test_a_prompts_newest_token_has_no_state_yet() -> None:
    assert prompt_mean(states(4)).tolist() == [1.5] * 3
    assert prompt_mean(states(39)).tolist() == [np.arange(39 - POSITIONS, 39).mean()] * 3


def test_a_prompt_of_one_token_is_zeros() -> None:
    assert prompt_mean(states(0)).tolist() == [0.0] * 3


def test_recent_is_what_came_before_a_place() -> None:
    assert recent_mean(states(9), 0, 4) is None
    assert array(0, 0, 0).tolist() == np.asarray(recent_mean(states(9), 1, 4)).tolist()
    assert np.asarray(recent_mean(states(9), 6, 4)).tolist() == [3.5] * 3


def test_means_do_not_overflow_half_precision() -> None:
    large = np.full((64, 3), 60000, np.float16)
    assert last_mean(large, 64).tolist() == [float(np.float16(60000))] * 3


def test_forms_of_context() -> None:
    prompt, recent = array(1, 2), array(3, 4)
    assert context_vector(PROMPT, prompt, recent).tolist() == [1, 2]
    assert context_vector(RECENT, prompt, recent).tolist() == [3, 4]
    assert context_vector(BOTH, prompt, recent).tolist() == [1, 2, 3, 4]
    assert context_vector(RECENT, prompt, None).tolist() == [1, 2]
    assert context_vector(BOTH, prompt, None).tolist() == [1, 2, 1, 2]


# Head


def scores(vector: np.ndarray, recent: np.ndarray | None = None) -> dict[str, float]:
    return Predictor(make_head(), observation=False, length=3).scores(vector, recent)


def test_probabilities_are_the_softmax_of_a_linear_map() -> None:
    vector = array(0.5, -1, 7)
    expected = torch.softmax(torch.tensor([0.5, -1.0]), 0).tolist()
    assert list(scores(vector)) == ["code", "math"]
    assert list(scores(vector).values()) == pytest.approx(expected)


@pytest.mark.parametrize("form", [PROMPT, RECENT, BOTH])
def test_a_head_after_its_prompt_gives_what_the_whole_one_does(form: str) -> None:
    plan = replace(PLAN, inputs=form)
    weight = np.random.default_rng(0).normal(size=(2, plan.input_size)).astype(np.float32)
    head = replace(make_head(), plan=plan, weight=weight, bias=array(1, -2))
    predictor = Predictor(head, observation=False, length=3)
    prompt = array(0.5, -1, 7)
    for recent in (None, array(2, 0, 1), array(-3, 4, 0.5)):
        expected = head.logits(context_vector(form, prompt, recent))
        np.testing.assert_allclose(predictor.logits(prompt, recent), expected, rtol=1e-5)


def test_a_prompt_of_another_size_is_refused() -> None:
    weight = np.zeros((2, 6), np.float32)
    head = replace(make_head(), plan=replace(PLAN, inputs=BOTH), weight=weight)
    with pytest.raises(PredictorError, match="reads 3 numbers"):
        Predictor(head, observation=False, length=3).scores(array(1, 2), array(1, 2, 3))


def test_large_logits_do_not_overflow() -> None:
    assert list(scores(array(1e30, 0, 0)).values()) == [1.0, 0.0]


def test_expected_acceptance_mixes_the_labels() -> None:
    assert make_head().expected_acceptance([0.25, 0.75]) == pytest.approx(
        {"code": 0.25 * 0.8 + 0.75 * 0.2, "math": 0.25 * 0.4 + 0.75 * 0.6}
    )


@pytest.mark.parametrize("vector", [array(1, 2), array(1, 2, 3, 4), array([1, 2, 3])])
def test_a_context_of_another_size_is_refused(vector: np.ndarray) -> None:
    with pytest.raises(PredictorError, match="reads 3 numbers"):
        scores(vector)


def test_a_context_that_is_not_finite_is_refused() -> None:
    with pytest.raises(PredictorError, match="not finite"):
        scores(array(np.nan, 0, 0))


def test_a_saved_head_is_the_same(tmp_path: Path) -> None:
    head = make_head()
    save_head(head, tmp_path / "p")
    found = load_head(tmp_path / "p", PLAN.target_sha256)
    assert found.plan == head.plan
    for name in ("weight", "bias", "acceptance"):
        assert np.array_equal(getattr(found, name), getattr(head, name))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p"]


def test_a_head_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_head(make_head(), tmp_path / "p")
    before = (tmp_path / "p" / MANIFEST).read_bytes()

    def full(*_: object, **__: object) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(head_module.json, "dumps", full)
    for name in ("p", "new"):
        with pytest.raises(OSError, match="no space"):
            save_head(make_head(), tmp_path / name)
    assert (tmp_path / "p" / MANIFEST).read_bytes() == before
    assert not (tmp_path / "new").exists()


def test_a_disc_that_fills_up_leaves_the_old_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_head(make_head(), tmp_path / "p")

    def full(*_: object, **__: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        save_head(replace(make_head(), bias=array(5, 5)), tmp_path / "p")
    assert load_head(tmp_path / "p", PLAN.target_sha256).bias.tolist() == [0, 0]


def test_a_missing_predictor(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match=r"no predictor in .*memspec train-predictor"):
        load_head(tmp_path / "none", PLAN.target_sha256)


def test_a_predictor_of_another_target(tmp_path: Path) -> None:
    save_head(make_head(), tmp_path / "p")
    with pytest.raises(PredictorError, match="another target"):
        load_head(tmp_path / "p", "b" * 64)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + b"\x7f", lambda b: b""])
def test_damaged_weights(tmp_path: Path, damage: object) -> None:
    save_head(make_head(), tmp_path / "p")
    file = tmp_path / "p" / WEIGHTS
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(PredictorError, match="damaged"):
        load_head(tmp_path / "p", PLAN.target_sha256)


def rewritten(folder: Path, **changes: object) -> None:
    file = folder / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format_version": 2}, "format 2"),
        ({"inputs": "future"}, "'future'"),
        ({"surprise": 1}, "not the record"),
        ({"drafts": 3}, "not the record"),
        ({"drafts": ["a", "b", "c"]}, "shape"),
        ({"hidden_size": 4}, "shape"),
    ],
)
def test_a_record_that_does_not_fit(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    save_head(make_head(), tmp_path / "p")
    rewritten(tmp_path / "p", **changes)
    with pytest.raises(PredictorError, match=says):
        load_head(tmp_path / "p", PLAN.target_sha256)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_a_record_that_is_none(tmp_path: Path, text: str) -> None:
    save_head(make_head(), tmp_path / "p")
    (tmp_path / "p" / MANIFEST).write_text(text)
    with pytest.raises(PredictorError, match="not the record"):
        load_head(tmp_path / "p", PLAN.target_sha256)


def test_weights_that_are_not_finite() -> None:
    with pytest.raises(PredictorError, match="bias holds values that are not finite"):
        replace(make_head(), bias=array(0, np.inf))


# Observation


def test_expected_tokens() -> None:
    assert expected_tokens(0.0, 3) == 1.0
    assert expected_tokens(1.0, 3) == 4.0
    assert expected_tokens(0.5, 3) == 1.875


def test_unseen_drafts_keep_their_prior() -> None:
    observed = ObservedAcceptance(("a", "b"), length=3, prior_strength=8)
    observed.saw("a", 3, 3)
    assert observed.estimate("b", 0.5) == 0.5
    assert observed.scores({"b": 0.5}) == {"b": 1.875}


def test_the_estimate_is_the_formula() -> None:
    observed = ObservedAcceptance(("a",), length=3, prior_strength=8, discount=0.5)
    observed.saw("a", 3, 3)  # three judged, three right
    observed.saw("a", 3, 1)  # two judged, one right
    assert observed.estimate("a", 0.5) == (8 * 0.5 + 4) / (8 + 5)
    observed.next_interval()
    assert observed.estimate("a", 0.5) == (8 * 0.5 + 2) / (8 + 2.5)
    observed.saw("a", 3, 0)
    assert observed.estimate("a", 0.5) == (8 * 0.5 + 2) / (8 + 3.5)
    observed.saw("a", 0, 0)  # nothing was proposed
    assert observed.estimate("a", 0.5) == (8 * 0.5 + 2) / (8 + 3.5)


def test_hard_text_is_hard_for_all() -> None:
    """The draft that runs gets less right than expected: others are expected to as well."""
    observed = ObservedAcceptance(("a", "b"), length=3, prior_strength=8)
    priors = {"a": 0.6, "b": 0.5}
    observed.scores(priors)
    for _ in range(10):
        observed.saw("a", 2, 0)
    assert observed.ease == pytest.approx(8 / (8 + 0.6 * 10))
    assert observed.estimate("b", 0.5) == pytest.approx(0.5 * observed.ease)
    easy = ObservedAcceptance(("a", "b"), length=3, prior_strength=8)
    easy.scores(priors)
    for _ in range(50):
        easy.saw("a", 3, 3)
    assert easy.ease > 1.2
    assert easy.estimate("b", 0.9) <= 1.0


def test_other_names_are_ignored_and_no_strength_is_no_division_by_zero() -> None:
    observed = ObservedAcceptance(("a",), length=3, prior_strength=0)
    observed.saw("lookup", 3, 3)
    assert observed.estimate("a", 0.3) == 0.3


iterations = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans()).filter(lambda i: i[1] <= i[0]),
    max_size=40,
)


@given(iterations, st.floats(0, 1), st.floats(0, 100), st.floats(0, 1), st.integers(1, 8))
def test_estimates_and_scores_stay_in_bounds(
    seen: list[tuple[int, int, bool]], prior: float, strength: float, discount: float, length: int
) -> None:
    observed = ObservedAcceptance(("a",), length, strength, discount)
    for proposed, accepted, scheduled in seen:
        observed.saw("a", proposed, accepted)
        if scheduled:
            observed.next_interval()
    assert -1e-9 <= observed.estimate("a", prior) <= 1 + 1e-9
    assert 1 - 1e-9 <= observed.scores({"a": prior})["a"] <= length + 1 + 1e-6


@given(st.floats(0.01, 0.99), st.integers(1, 8))
def test_right_proposals_raise_an_estimate_and_wrong_ones_lower_it(prior: float, n: int) -> None:
    observed = ObservedAcceptance(("right", "wrong"), length=3)
    observed.saw("right", n, n)
    observed.saw("wrong", n, 0)
    assert observed.estimate("wrong", prior) < prior < observed.estimate("right", prior)


def test_a_predictor_without_observation_is_the_head() -> None:
    predictor = Predictor(make_head(), observation=False, length=3)
    predictor.observe("code", 3, 0)
    vector = array(1, 0, 0)
    assert predictor.scores(vector, None) == scores(vector)


def test_a_predictor_with_observation_turns_away_from_what_fails() -> None:
    predictor = Predictor(make_head(), observation=True, length=3)
    vector = array(3, 0, 0)
    first = predictor.scores(vector, None)
    assert first["code"] > first["math"]
    for _ in range(200):
        predictor.observe("code", 3, 0)
    later = predictor.scores(vector, None)
    assert later["code"] < later["math"]
    assert later["math"] < first["math"]  # the text seems to be hard
