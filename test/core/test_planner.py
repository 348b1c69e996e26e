"""What the planner proposes, by costs and acceptance."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspec_core.speculation.calibration import NOMINAL, Costs
from memspec_core.speculation.planner import FIRST_PAUSE, Candidate, Plan, Planner

FLAT = Costs((1.0,) * 16, {"good": 0.1, "bad": 0.1})
STEEP = Costs(tuple(1.0 + rows for rows in range(16)), {"good": 0.1})
GOOD, BAD = Candidate("good", 15), Candidate("bad", 15)


def teach(planner: Planner, name: str, accepted: int, proposed: int = 4, times: int = 60) -> None:
    for _ in range(times):
        planner.observe(Plan(name, proposed), proposed, proposed, accepted, 0.1 * proposed, 1.0)


def test_a_draft_that_was_never_seen_is_tried() -> None:
    assert Planner(FLAT).choose([GOOD]).name == "good"


def test_without_a_source_decoding_is_plain() -> None:
    assert Planner(FLAT).choose([]) == Plan("none", 0)


def test_the_better_draft_proposes_the_longer() -> None:
    planner = Planner(FLAT, timed=False)
    teach(planner, "good", 4)
    long = planner.choose([GOOD, BAD])
    assert (long.name, long.length) == ("good", 15)
    teach(planner, "good", 1)
    assert 1 <= planner.choose([GOOD]).length < 5


def test_never_more_than_there_is_room_for() -> None:
    planner = Planner(FLAT, timed=False)
    teach(planner, "good", 4)
    assert planner.choose([Candidate("good", 3)]).length == 3


def test_rows_that_cost_as_much_as_tokens_are_not_worth_it() -> None:
    planner = Planner(STEEP, timed=False)
    teach(planner, "good", 4)
    assert planner.choose([GOOD]) == Plan()


def test_a_lookup_costs_nothing_and_each_certainty_counts_for_itself() -> None:
    planner = Planner(FLAT, timed=False)
    teach(planner, "lookup 4", 3, proposed=3)
    teach(planner, "lookup 2", 0, proposed=3)
    assert planner.choose([Candidate("lookup 4", 3)]).source == "lookup"
    assert planner.choose([Candidate("lookup 2", 3)]).length <= 3
    assert planner.pays("lookup 4")


def test_a_draft_that_is_always_wrong_is_tried_ever_less_often() -> None:
    planner = Planner(NOMINAL, timed=False)
    used = []
    for iteration in range(2000):
        plan = planner.choose([BAD])
        planner.observe(plan, plan.length, plan.length, 0, 0.1, 1.0)
        if plan.length:
            used.append(iteration)
    assert len([iteration for iteration in used if iteration < 30]) < 25
    later = [iteration for iteration in used if iteration >= 100]
    assert 2 <= len(later) < 80
    assert max(b - a for a, b in itertools.pairwise(later)) > 2 * FIRST_PAUSE


def test_a_trial_waits_until_it_can_afford_the_reading() -> None:
    def first_trial(unseen: int) -> int:
        planner = Planner(NOMINAL, timed=False)
        teach(planner, "bad", 0)
        candidate = Candidate("bad", 15, unseen)
        return next(i for i in range(10_000) if planner.choose([candidate]).length)

    assert first_trial(0) < first_trial(100) < first_trial(1000)


def test_a_draft_that_turned_good_is_taken_up_again() -> None:
    planner = Planner(NOMINAL, timed=False)
    for _ in range(300):
        plan = planner.choose([BAD])
        planner.observe(plan, plan.length, plan.length, 0, 0.1, 1.0)
    assert not planner.pays("bad")
    for _ in range(6000):
        plan = planner.choose([BAD])
        planner.observe(plan, plan.length, plan.length, plan.length, 0.1, 1.0)
    assert planner.pays("bad")
    assert planner.choose([BAD]).length > 3


def test_passes_that_became_slow_make_steps_cheap() -> None:
    """A growing context makes a pass dearer: then longer proposals pay."""
    planner = Planner(Costs(tuple(1.0 + 0.1 * rows for rows in range(16)), {"good": 0.2}))
    for _ in range(60):
        planner.observe(Plan("good", 4), 4, 4, 3, 0.8, 1.4)
    short = planner.choose([GOOD]).length
    for _ in range(60):
        planner.observe(Plan("good", 4), 4, 4, 3, 0.8, 5.6)
    assert planner.choose([GOOD]).length > short


STOPS = Candidate("good", 15, stops=True)


def test_a_draft_that_stops_is_asked_for_what_pays() -> None:
    """One more row costs 0.1 and one more step 0.1, of which 0.2 tokens could be made."""
    planner = Planner(Costs(tuple(1.0 + 0.1 * rows for rows in range(16)), {"good": 0.1}), False)
    for _ in range(200):
        planner.observe(Plan("good", 8, 0.1), 1, 2, 1, 0.2, 1.1)  # two steps, one proposal
    plan = planner.choose([STOPS])
    rate = 2.0 / (1.1 + 2 * 0.1)
    assert (plan.name, plan.length) == ("good", 8)
    assert plan.least == pytest.approx(0.1 * rate, rel=0.02)  # the step is taken by then
    assert plan.worth == pytest.approx(0.2 * rate, rel=0.02)
    assert planner.choose([replace(STOPS, most=3)]).length == 3
    assert planner.choose([GOOD]).least == 0.0


def test_rows_that_seem_to_cost_nothing_cost_a_part_of_the_later_ones() -> None:
    rows = (1.0, 1.0, 1.0, 1.0, *(1.0 + 0.2 * more for more in range(1, 13)))
    planner = Planner(Costs(rows, {"good": 0.1}), False)
    plan = planner.choose([STOPS])
    usual = 1.0 / 8  # nine rows take 2.0
    assert plan.worth - plan.least == pytest.approx(0.1 * plan.least / (0.25 * usual))


def test_a_calibration_that_was_disturbed_is_put_right() -> None:
    """Two rows were measured as four times one; in truth they cost a tenth more."""
    costs = Costs((1.0, *(4.0 + 0.1 * rows for rows in range(15))), {"good": 0.1})
    planner, proposed = Planner(costs), []
    for _ in range(1500):
        plan = planner.choose([STOPS])
        count = min(plan.length, 1)
        planner.observe(plan, count, 2 * count, count, 0.2 * count, 1.0 + 0.1 * count)
        proposed.append(count)
    assert sum(proposed[:50]) < 10
    assert sum(proposed[-100:]) > 90


def test_a_draft_that_stops_at_once_does_not_pay() -> None:
    planner = Planner(NOMINAL, timed=False)
    used = []
    for _iteration in range(1000):
        plan = planner.choose([STOPS])
        planner.observe(plan, 0, int(plan.length > 0), 0, 0.1, 1.0)
        used.append(plan.length > 0)
    assert all(used[:4])
    assert sum(used[200:]) < 60
    assert not planner.pays("good")
    for _ in range(3000):
        plan = planner.choose([STOPS])
        count = 2 * (plan.length > 0)
        planner.observe(plan, count, count, count, 0.1, 1.0)
    assert planner.pays("good")


def test_an_untimed_planner_repeats_itself() -> None:
    measured = Planner(FLAT)
    teach(measured, "good", 0)
    assert measured.untimed().choose([GOOD]) == Planner(STEEP).untimed().choose([GOOD])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["good", "bad", "lookup 3", "new"]),
            st.integers(0, 20),
            st.integers(0, 20),
            st.floats(0, 10),
            st.floats(0, 10),
        ),
        max_size=40,
    )
)
def test_whatever_was_seen_a_plan_fits(events: list[tuple[str, int, int, float, float]]) -> None:
    planner = Planner(FLAT)
    for name, proposed, accepted, drafted, verified in events:
        right = min(accepted, proposed)
        planner.observe(Plan(name, proposed), proposed, proposed, right, drafted, verified)
        plan = planner.choose([GOOD, Candidate("lookup 3", 2)])
        assert 0 <= plan.length <= (2 if plan.source == "lookup" else 15)
        assert plan.source in ("good", "lookup", "none")


@pytest.mark.parametrize("name", ["lookup", "lookup 2"])
def test_lookups_take_no_time(name: str) -> None:
    assert FLAT.step_seconds(name) == 0.0
    assert FLAT.step_seconds("unknown") > 0.0
