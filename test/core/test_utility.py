"""What catching up and loading cost, against what a draft is expected to add."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspec_core.strategies import Outlook, Ranking
from memspec_core.strategies.utility import HORIZON, Utility


class Costs:
    """Each iteration takes a second (of the draft "slow" two), and each token a tenth to read."""

    def iteration_seconds(self, draft: str, length: int) -> float:
        return 2.0 if draft == "slow" else 1.0

    def catch_up_seconds(self, draft: str, tokens: int) -> float:
        return 0.1 * tokens

    def lost_seconds(self, load_seconds: float) -> float:
        return 0.5 * load_seconds


def utility(**unseen: int) -> Utility:
    return Utility(Costs(), 3, unseen)


def test_the_utility_is_the_formula() -> None:
    net = utility(a=80, b=0).net(Ranking({"a": 3.0, "b": 2.0, "slow": 3.5})).scores
    assert net == pytest.approx({"a": HORIZON * 3 / (HORIZON + 8), "b": 2.0, "slow": 1.75})


def test_a_draft_must_be_better_by_what_reading_takes() -> None:
    for tokens, best in ((0, "a"), (40, "b")):
        assert utility(a=tokens).net(Ranking({"b": 2.0, "a": 2.2})).best == best


def outlook() -> Ranking:
    """Two topics, equally likely; "a" is the better one in the second by 2 tokens."""
    tokens = {"run": [2.0, 2.0], "a": [1.0, 4.0], "worse": [1.0, 1.0]}
    means = {name: float(np.mean(of)) for name, of in tokens.items()}
    return Ranking(means, Outlook([0.5, 0.5], tokens.__getitem__))


def test_a_load_must_pay_before_the_answers_end() -> None:
    weighed = utility(a=10)
    # 1 token an iteration more, against 1 second of reading in which 2.5 are made.
    assert "a" not in weighed.not_worth_loading(["a"], outlook(), "run", 100, 0.0)
    assert "a" in weighed.not_worth_loading(["a"], outlook(), "run", 4, 0.0)
    # A load slows decoding.
    enough = 60.0 / 0.5
    assert "a" in weighed.not_worth_loading(["a"], outlook(), "run", 100, enough)


def test_what_can_add_nothing_is_not_loaded() -> None:
    assert utility().not_worth_loading(["a", "worse"], outlook(), "run", 1000, 0.0) == {"worse"}


def test_nothing_is_left_out_where_nothing_can_be_compared() -> None:
    plain = Ranking({"a": 1.0, "b": 0.5})
    assert utility().not_worth_loading(["b"], plain, "a", 1, 9.0) == frozenset()


@given(
    scores=st.dictionaries(st.sampled_from("abcdef"), st.floats(1.0, 5.0), min_size=1),
    unseen=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5000)),
)
def test_weighing_never_raises_a_score(scores: dict[str, float], unseen: dict[str, int]) -> None:
    net = utility(**unseen).net(Ranking(scores)).scores
    assert set(net) == set(scores)
    assert all(0 < net[name] <= scores[name] + 1e-9 for name in scores)
