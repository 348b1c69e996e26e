"""The bandits, played by hand: what ran and what it gained is scripted."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.strategies.bandit import EXPLORATION, PATIENCE, Bandit, MabAsync, MabSync
from memspec_core.strategies.base import Context, Strategy

NAMES = ("general", "code", "math")
CONTEXT = Context(())


def ran(draft: str, accepted: int, committed: int = 1) -> Iteration:
    return Iteration(
        sequence=0,
        draft=draft,
        wanted="whatever",
        proposed=4,
        accepted=accepted,
        committed=committed,
        token_ids=(),
        text="",
        generated_tokens=0,
        seconds=IterationSeconds(),
    )


def wanted(bandit: Bandit) -> str | None:
    return bandit.rank(CONTEXT).best


def test_what_may_be_waited_for_and_prepared() -> None:
    strategies: tuple[Strategy, ...] = (MabSync(NAMES), MabAsync(NAMES))
    assert [(s.name, s.waits, s.prepares, s.insists) for s in strategies] == [
        ("mab_sync", True, 1, False),
        ("mab_async", False, 1, False),
    ]


def test_each_draft_is_explored_once_then_the_index_decides() -> None:
    bandit = MabAsync(NAMES)
    explored = []
    for draft, accepted in zip(NAMES, (1, 3, 0), strict=True):
        explored.append(wanted(bandit))
        bandit.observe(ran(draft, accepted))
    assert explored == list(NAMES)
    bonus = EXPLORATION * math.sqrt(math.log(3) / 1)
    assert bandit.rank(CONTEXT).scores == pytest.approx(
        {"general": 2 + bonus, "code": 4 + bonus, "math": 1 + bonus}
    )
    assert bandit.rank(CONTEXT).order == ("code", "general", "math")


@pytest.mark.parametrize(
    ("c", "counts", "means", "best"),
    [
        (0.0, (1, 50, 50), (3.0, 2.9, 2.8), "general"),
        (2.0, (50, 50, 1), (3.0, 2.9, 2.0), "math"),  # hardly known, so it might be better
        (0.1, (50, 50, 1), (3.0, 2.9, 2.0), "general"),
        (2.0, (40, 40, 40), (1.0, 2.0, 3.0), "math"),
    ],
)
def test_the_index(c: float, counts: tuple[int, ...], means: tuple[float, ...], best: str) -> None:
    bandit = Bandit(NAMES, c)
    for draft, count, mean in zip(NAMES, counts, means, strict=True):
        tokens = round(count * mean)
        for index in range(count):
            gained = tokens // count + (index < tokens % count)
            bandit.observe(ran(draft, gained - 1))
    ranking = bandit.rank(CONTEXT)
    for draft, count, mean in zip(NAMES, counts, means, strict=True):
        expected = mean + c * math.sqrt(math.log(sum(counts)) / count)
        assert ranking.scores[draft] == pytest.approx(expected)
    assert ranking.best == best


def test_the_reward_goes_to_the_draft_that_ran() -> None:
    """While code loads, general runs on: code stays wanted, and general learns."""
    bandit = MabAsync(NAMES)
    assert wanted(bandit) == "general"
    bandit.observe(ran("general", 0))
    for _ in range(3):
        assert wanted(bandit) == "code"
        bandit.observe(ran("general", 2))
    bandit.observe(ran("code", 4))
    assert wanted(bandit) == "math"
    scores = bandit.rank(CONTEXT).scores
    assert scores["general"] == pytest.approx(10 / 4 + 2 * math.sqrt(math.log(5) / 4))
    assert scores["code"] == pytest.approx(5 + 2 * math.sqrt(math.log(5)))


def test_what_no_draft_ran_counts_for_none() -> None:
    bandit = MabAsync(NAMES)
    bandit.observe(ran("none", 0))
    bandit.observe(ran("lookup", 4))
    bandit.observe(ran("general", 0, committed=0))  # a closing event
    assert set(bandit.rank(CONTEXT).scores.values()) == {1.0}
    assert wanted(bandit) == "general"


def test_a_draft_that_never_comes_is_passed_over() -> None:
    bandit = MabAsync(NAMES)
    bandit.observe(ran("general", 1))
    for _ in range(PATIENCE):
        assert wanted(bandit) == "code"
        bandit.observe(ran("general", 1))
    for _ in range(200):
        draft = wanted(bandit)
        assert draft in ("general", "math")
        bandit.observe(ran(draft, 1))
    assert bandit.rank(CONTEXT).order[-1] == "code"
    bandit.observe(ran("code", 3))  # it came after all
    assert bandit.rank(CONTEXT).order[0] == "code"


def test_patience_begins_anew_whenever_a_draft_runs() -> None:
    bandit = MabAsync(("a", "b"), 0.0)
    bandit.observe(ran("b", 0))
    for _ in range(3):
        for _ in range(PATIENCE):
            assert wanted(bandit) == "a"
            bandit.observe(ran("b", 0))
        bandit.observe(ran("a", 3))


def test_where_all_are_passed_over_each_is_tried_again() -> None:
    bandit = MabAsync(("a", "b"))
    tried = [wanted(bandit) for _ in range(4 * PATIENCE)]
    assert tried == (["a"] * PATIENCE + ["b"] * PATIENCE) * 2


def test_no_drafts_no_ranking() -> None:
    bandit = MabSync(())
    for _ in range(2 * PATIENCE):
        assert bandit.rank(CONTEXT).best is None


@given(
    st.lists(
        st.tuples(st.sampled_from([*NAMES, "none", "lookup"]), st.integers(0, 8), st.booleans()),
        max_size=60,
    )
)
def test_whatever_runs_all_drafts_are_ranked_and_the_unknown_come_first(
    events: list[tuple[str, int, bool]],
) -> None:
    bandit, seen = MabAsync(NAMES), set()
    for draft, accepted, point in events:
        bandit.observe(ran(draft, accepted))
        seen |= {draft} & set(NAMES)
        if point:
            bandit.rank(CONTEXT)
    if sum(point for *_, point in events) < PATIENCE:
        order = bandit.rank(CONTEXT).order
        assert sorted(order) == sorted(NAMES)
        assert set(order[: len(NAMES) - len(seen)]) == set(NAMES) - seen


@given(st.lists(st.floats(1.0, 3.0), min_size=3, max_size=3), st.integers(0, 5))
def test_in_the_long_run_the_best_draft_runs_most(means: list[float], seed: int) -> None:
    means[seed % 3] += 3.0
    bandit, runs = MabSync(NAMES), dict.fromkeys(NAMES, 0)
    owed = dict.fromkeys(NAMES, 0.0)
    for _ in range(400):
        draft = wanted(bandit)
        assert draft is not None
        runs[draft] += 1
        owed[draft] += means[NAMES.index(draft)]
        gained = max(1, int(owed[draft]))
        owed[draft] -= gained
        bandit.observe(ran(draft, gained - 1))
    assert max(runs, key=runs.__getitem__) == NAMES[means.index(max(means))]
