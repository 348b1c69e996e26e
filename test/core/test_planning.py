"""The best schedule of a known answer, against every schedule there is."""

from itertools import chain, combinations, permutations
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memspec_core.iteration import Iteration
from memspec_core.strategies.base import Context
from memspec_core.strategies.known_answer import KnownAnswer
from memspec_core.strategies.oracle import OracleDynamic, OracleStatic
from memspec_core.strategies.planning import plan

NAMES = ("general", "code", "math")


def answer(gains: list[list[int]], **changes: object) -> KnownAnswer:
    """Return an answer whose iterations and loads take a second, for K = 2 and N = 1."""
    drafts = len(gains[0])
    fields: dict[str, object] = {
        "gains": np.array(gains),
        "capacity": 2,
        "interval": 1,
        "iteration_seconds": (1.0,) * drafts,
        "load_seconds": (1.0,) * drafts,
        "catch_up_seconds": (0.0,) * drafts,
    }
    return KnownAnswer(**(fields | changes))  # type: ignore[arg-type]


def subsets(items: list[int]) -> chain[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))


class Desk:
    """A moment of a generation, moved on second by second as Algorithms 2 and 3 have it."""

    def __init__(self, known: KnownAnswer, first: int) -> None:
        self.known = known
        self.place = 0
        self.seconds = known.load_seconds[first] if known.first_load_counts else 0.0
        self.seen = {first: 0}
        self.queue: list[tuple[int, float]] = []
        self.landed: list[int] = []

    def copy(self) -> "Desk":
        other = Desk(self.known, 0)
        other.place, other.seconds, other.seen = self.place, self.seconds, dict(self.seen)
        other.queue, other.landed = list(self.queue), list(self.landed)
        return other

    def let_loads_go_on(self, seconds: float) -> None:
        while self.queue and seconds > 0:
            draft, left = self.queue[0]
            spent = min(left, seconds)
            self.queue[0] = (draft, left - spent)
            seconds -= spent
            self.let_land()

    def let_land(self) -> None:
        while self.queue and self.queue[0][1] <= 1e-9:
            self.landed.append(self.queue.pop(0)[0])

    def work(self, seconds: float) -> None:
        slow = self.known.load_slowdown
        while self.queue and seconds > 1e-12:
            spent = min(self.queue[0][1], seconds * slow)
            self.seconds += spent
            seconds -= spent / slow
            self.let_loads_go_on(spent)
        self.seconds += seconds

    def run(self, active: int) -> None:
        known = self.known
        if self.place == 0:
            self.let_loads_go_on(known.catch_up_seconds[active] * known.prompt_tokens)
        self.work(known.catch_up_seconds[active] * (self.place - self.seen[active]))
        for _ in range(known.interval):
            if self.place < len(known.gains):
                self.work(known.iteration_seconds[active])
                self.place += int(known.gains[self.place, active])
        self.seen[active] = self.place
        self.seen |= dict.fromkeys(self.landed, -known.prompt_tokens)
        self.landed = []


def fewest_seconds(desk: Desk) -> float:
    """Try everything."""
    known = desk.known
    if desk.place >= len(known.gains):
        return desk.seconds
    present = {*desk.seen, *(draft for draft, _ in desk.queue)}
    absent = [draft for draft in range(known.gains.shape[1]) if draft not in present]
    best = inf
    for active in desk.seen:
        for victims in subsets([draft for draft in desk.seen if draft != active]):
            for loads in chain.from_iterable(map(permutations, subsets(absent))):
                if len(present) - len(victims) + len(loads) > known.capacity:
                    continue
                then = desk.copy()
                for victim in victims:
                    del then.seen[victim]
                then.queue += [(draft, known.load_seconds[draft]) for draft in loads]
                then.let_land()
                then.run(active)
                best = min(best, fewest_seconds(then))
    return best


@st.composite
def answers(draw: st.DrawFn) -> KnownAnswer:
    drafts = draw(st.integers(1, 3))
    count = draw(st.integers(1, 5))
    gain = st.integers(1, 3)
    row = st.lists(gain, min_size=drafts, max_size=drafts)
    each = {"min_size": drafts, "max_size": drafts}
    return answer(
        draw(st.lists(row, min_size=count, max_size=count)),
        capacity=draw(st.integers(1, 3)),
        interval=draw(st.integers(1, 2)),
        iteration_seconds=draw(st.lists(st.sampled_from([1.0, 1.1, 1.5]), **each)),
        load_seconds=draw(st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.7, 4.0]), **each)),
        catch_up_seconds=draw(st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.3]), **each)),
        prompt_tokens=draw(st.sampled_from([0, 1, 5])),
        load_slowdown=draw(st.sampled_from([1.0, 1.2, 2.0])),
        first_load_counts=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(answers())
def test_no_schedule_is_better(known: KnownAnswer) -> None:
    drafts = range(known.gains.shape[1])
    fewest = min(fewest_seconds(Desk(known, first)) for first in drafts)
    found = plan(known)
    if known.capacity <= 2:
        assert found.exact
        assert found.seconds == pytest.approx(fewest)
    wide = plan(known, width=10_000)
    assert wide.exact
    assert wide.seconds == pytest.approx(fewest)
    assert found.bound_seconds <= fewest + 1e-9 <= found.seconds + 2e-9


def long_answer(seed: int, **changes: object) -> KnownAnswer:
    """Return an answer in which another draft is the best every now and then."""
    random = np.random.default_rng(seed)
    best = np.repeat(random.integers(0, 5, 8), 12)
    chance = np.where(np.arange(5) == best[:, None], 0.8, 0.4)
    right = random.random((*chance.shape, 3)) < chance[..., None]
    gains = 1 + np.cumprod(right, axis=2).sum(axis=2)
    return answer(
        gains.tolist(),
        **({"interval": 4, "load_seconds": (2.7,) * 5, "prompt_tokens": 50} | changes),
    )


@pytest.mark.parametrize("catch_up", [0.0, 0.02])
@pytest.mark.parametrize("load", [2.7, 11.0])
def test_a_plan_is_exact_for_two_and_not_worse_for_more(load: float, catch_up: float) -> None:
    costs = {"load_seconds": (load,) * 5, "catch_up_seconds": (catch_up,) * 5}
    for seed in range(3):
        plans = [plan(long_answer(seed, capacity=k, **costs)) for k in (1, 2, 3, 5)]
        assert plans[0].exact
        assert plans[1].exact
        seconds = [found.seconds for found in plans]
        assert max(seconds[2:]) <= seconds[1] + 1e-9 <= seconds[0] + 2e-9
        for found in plans:
            assert found.bound_seconds <= found.seconds
        known = long_answer(seed)
        assert seconds[0] == pytest.approx(min(map(known.static_seconds, range(5))))


def test_where_memory_does_not_matter_the_best_draft_runs_at_each_place() -> None:
    known = long_answer(0, capacity=5, interval=1, load_seconds=(0.0,) * 5)
    place, iterations = 0, 0
    fewest = np.zeros(len(known.gains) + 1)
    for place in range(len(known.gains) - 1, -1, -1):
        ends = np.minimum(place + known.gains[place], len(known.gains))
        fewest[place] = 1 + fewest[ends].min()
    iterations = int(fewest[0])
    # The first interval's draft is the only resident one, but it may be any.
    assert plan(known).seconds == pytest.approx(iterations)


def test_a_plan_says_what_to_keep_and_what_to_load() -> None:
    gains = [[3, 1, 1]] * 3 + [[1, 3, 1]] * 3 + [[1, 1, 3]] * 3
    found = plan(answer(gains))
    assert found.seconds == 3.0
    orders = {place: step.order for place, step in found.steps.items()}
    assert orders[0][:1] == (0,)
    assert orders[0][1:] == (1,)  # to be there at place 3
    assert orders[3] == (1, 2)
    assert orders[6][0] == 2


# The oracles as strategies


def ran(draft: str, generated: int) -> Iteration:
    return Iteration(0, draft, draft, 3, 2, 3, (), "", generated)


def test_the_static_oracle_takes_the_draft_that_finishes_first() -> None:
    known = answer([[3, 1, 2]] * 6)
    assert OracleStatic(NAMES, known).rank(Context(())).order == ("general",)
    slow = answer([[3, 1, 2]] * 6, iteration_seconds=(2.0, 1.0, 1.0))
    assert OracleStatic(NAMES, slow).rank(Context(())).order == ("math",)


def test_the_dynamic_oracle_follows_its_plan() -> None:
    gains = [[3, 1, 1]] * 3 + [[1, 3, 1]] * 3 + [[1, 1, 3]] * 3
    oracle = OracleDynamic(NAMES, answer(gains))
    assert (oracle.waits, oracle.insists, oracle.prepares) == (False, False, None)
    for place, order in ((0, ("general", "code")), (3, ("code", "math")), (6, ("math", "code"))):
        assert oracle.rank(Context((), place=place)).order == order
        oracle.observe(ran(order[0], place + 3))


def test_the_dynamic_oracle_plans_anew_where_it_is_taken_by_surprise() -> None:
    gains = [[3, 1, 1]] * 3 + [[1, 3, 1]] * 6
    oracle = OracleDynamic(NAMES, answer(gains))
    oracle.rank(Context(()))
    oracle.observe(ran("general", 2))  # one token less than foreseen
    assert oracle.rank(Context((), place=2)).best in ("general", "code")
    oracle.observe(ran("general", 3))
    assert oracle.rank(Context((), place=3)).order[0] == "code"
    oracle.observe(ran("math", 6))  # code was not there; something else put math in
    late = oracle.rank(Context((), place=6))
    assert late.order[0] in ("code", "math")
    oracle.observe(ran("none", 7))  # no draft took part
    assert oracle.rank(Context((), place=7)).order
    # Longer than what is known: it stays with what it had.
    assert oracle.rank(Context((), place=9)).order
    assert oracle.rank(Context((), place=12)).order


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20))))
def test_the_dynamic_oracle_copes_with_whatever_runs(
    seed: int, events: list[tuple[int, int]]
) -> None:
    names = tuple("abcde")
    oracle, place = OracleDynamic(names, long_answer(seed % 2)), 0
    for draft, gained in events[:6]:
        order = oracle.rank(Context((), place=place)).order
        assert 1 <= len(order) <= 2
        place += gained
        oracle.observe(ran(names[draft], place))


def test_an_empty_answer() -> None:
    known = answer([[1, 1, 1]])
    empty = KnownAnswer(**(vars(known) | {"gains": np.zeros((0, 3), np.int64)}))
    assert plan(empty).steps == {}
    assert OracleDynamic(NAMES, empty).rank(Context(())).order == ()
