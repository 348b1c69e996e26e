"""The draft model cache, Algorithm 2, with a loader that the test drives by hand."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.test_loader import NamedDraft
from core.tiny import ManualClock
from memspec_core.errors import CheckpointError, MemoryBudgetError
from memspec_core.residency.cache import RETRY_SECONDS, DraftBytes, DraftCache
from memspec_core.residency.ledger import Ledger
from memspec_core.residency.loader import FinishedLoad
from memspec_core.snapshot import DraftState
from memspec_core.strategies.base import Ranking

NAMES = "abcdef"
SIZE = DraftBytes(weights=10, kv=5)


class HandLoader:
    """A loader whose loads end when the test says so; `wait` lets the oldest one end."""

    def __init__(self) -> None:
        self.under_way: list[str] = []
        self.started: list[str] = []
        self.broken: set[str] = set()
        self.seconds = 0.5
        self._ended: list[FinishedLoad] = []

    def start(self, name: str) -> None:
        assert name not in self.under_way, "loaded twice at once"
        self.under_way.append(name)
        self.started.append(name)

    def land(self, *names: str) -> None:
        for name in names or tuple(self.under_way):
            self.under_way.remove(name)
            if name in self.broken:
                self._ended.append(FinishedLoad(name, self.seconds, error=f"{name} is broken."))
            else:
                self._ended.append(FinishedLoad(name, self.seconds, NamedDraft(name)))

    def finished(self) -> list[FinishedLoad]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, _give_up: Callable[[], bool] = lambda: False) -> FinishedLoad:
        if not self._ended:
            assert self.under_way, "waits for a load that nobody started"
            self.land(self.under_way[0])
        return self._ended.pop(0)


class Room:
    """A cache with everything around it."""

    def __init__(
        self,
        capacity: int = 2,
        budget: int = 1000,
        names: str = NAMES,
        sizes: dict[str, DraftBytes] | None = None,
    ) -> None:
        self.loader = HandLoader()
        self.ledger = Ledger(budget)
        self.clock = ManualClock()
        self.changes = 0
        sizes = sizes or dict.fromkeys(names, SIZE)
        self.cache = DraftCache(
            sizes, self.loader, self.ledger, capacity, self.clock, self._changed
        )

    def _changed(self) -> None:
        self.changes += 1

    def names(self, *states: DraftState) -> str:
        return "".join(name for name in NAMES if self.cache.state(name) in states)

    @property
    def resident(self) -> str:
        return self.names(DraftState.RESIDENT, DraftState.ACTIVE)

    @property
    def loading(self) -> str:
        return self.names(DraftState.LOADING)


def ranking(order: str) -> Ranking:
    return Ranking({name: 1.0 - place / 10.0 for place, name in enumerate(order)})


def filled(order: str, **how: int) -> Room:
    """A room in which the working set of a ranking is resident and its first draft active."""
    room = Room(**how)
    room.cache.update(ranking(order), None)
    room.loader.land()
    room.cache.best_resident(ranking(order))
    return room


def test_the_working_set_is_loaded_in_the_order_of_the_ranking() -> None:
    room = Room(capacity=3)
    room.cache.update(ranking("cabde"), None)
    assert room.loader.started == ["c", "a", "b"]
    assert room.loading == "abc"
    room.loader.land()
    room.cache.collect()
    assert room.resident == "abc"


def test_the_best_resident_draft_runs_until_the_wanted_one_has_come() -> None:
    room = filled("ab")
    wanted = ranking("cab")
    room.cache.update(wanted, "a")
    assert room.loader.under_way == ["c"]
    first = room.cache.best_resident(wanted)
    assert first is not None
    assert first.name == "a"  # fallback
    room.loader.land("c")
    second = room.cache.best_resident(wanted)
    assert second is not None
    assert second.name == "c"


def test_what_is_too_costly_is_not_loaded_but_stays_where_it_is() -> None:
    room = filled("ab")
    room.cache.update(ranking("cba"), "a", None, {"c", "b"})
    assert room.resident == "ab"
    assert room.loader.under_way == []
    assert room.cache.score("c") > room.cache.score("b")
    room.cache.update(ranking("cba"), "a", None, {"b"})
    assert room.loader.under_way == ["c"]


def test_contenders_are_the_absent_ones_that_may_get_a_place() -> None:
    room = filled("ab")
    assert room.cache.contenders(ranking("cabde")) == ["c"]
    assert room.cache.contenders(ranking("abcde")) == []
    assert room.cache.contenders(ranking("cadeb")) == ["c", "d", "e"]


def test_demand_is_met_or_missed() -> None:
    room = filled("ab")
    for wanted in ("a", "c", "b", None):
        room.cache.count_demand(wanted)
    counters = room.cache.counters()
    assert (counters.hits, counters.misses) == (2, 1)


def test_the_lowest_scored_draft_outside_the_working_set_goes() -> None:
    room = filled("abc", capacity=3)
    room.cache.update(Ranking({"d": 0.9, "c": 0.8, "e": 0.7, "b": 0.2, "a": 0.1}), "c")
    # W is d, c, e: a goes for d and b for e; c is active and in W.
    assert room.resident == "c"
    assert room.loader.under_way == ["d", "e"]
    assert room.cache.counters().evictions == 2


def test_the_active_draft_stays_even_when_it_is_ranked_last() -> None:
    room = filled("a", capacity=1)
    room.cache.update(ranking("bcda"), "a")
    assert room.resident == "a"
    assert room.loader.under_way == []
    room.cache.update(ranking("bcda"), None)
    assert room.resident == ""
    assert room.loader.under_way == ["b"]


def test_what_is_resident_and_wanted_is_left_alone() -> None:
    room = filled("ab")
    before = room.changes
    room.cache.update(ranking("ba"), "a")
    assert room.loader.started == ["a", "b"]
    assert room.cache.counters().evictions == 0
    assert room.changes == before


def test_no_draft_is_resident_at_first() -> None:
    room = Room()
    assert room.cache.best_resident(ranking("ab")) is None
    assert room.cache.best_resident(Ranking({})) is None


def test_memory_bounds_the_resident_set_as_well() -> None:
    room = Room(capacity=4, budget=2 * 15 + 14)
    room.cache.update(ranking("abcd"), None)
    assert room.loader.under_way == ["a", "b"]
    assert room.ledger.free_bytes == 14


def test_loads_under_way_and_resident_drafts_are_on_the_ledger() -> None:
    room = Room()
    room.cache.update(ranking("ab"), None)
    books = room.ledger.snapshot()
    assert (books.in_flight_bytes, books.draft_bytes, books.kv_bytes) == (20, 0, 10)
    room.loader.land("a")
    room.cache.collect()
    books = room.ledger.snapshot()
    assert (books.in_flight_bytes, books.draft_bytes, books.kv_bytes) == (10, 10, 10)
    room.loader.land("b")
    room.cache.collect()
    room.cache.clear()
    assert room.ledger.snapshot().used_bytes == 0
    assert room.resident == ""


# The working set, and loads that it has overtaken


def test_what_does_not_fit_is_passed_over_for_what_does() -> None:
    small, large = DraftBytes(10, 5), DraftBytes(100, 5)
    room = Room(capacity=3, budget=120, sizes={"a": small, "b": large, "c": large, "d": small})
    room.cache.update(ranking("abcd"), None)
    assert room.loader.started == ["a", "b"]  # 120 bytes together
    room = Room(capacity=3, budget=119, sizes={"a": small, "b": large, "c": large, "d": small})
    room.cache.update(ranking("abcd"), None)
    assert room.loader.started == ["a", "d"]


@given(
    st.lists(st.integers(1, 60), min_size=6, max_size=6),
    st.integers(1, 6),
    st.integers(0, 200),
    st.permutations(NAMES),
)
def test_the_working_set_is_the_best_that_fits(
    sizes: list[int], capacity: int, budget: int, order: list[str]
) -> None:
    amounts = dict(zip(NAMES, sizes, strict=True))
    room = Room(capacity, budget, sizes={name: DraftBytes(n, 0) for name, n in amounts.items()})
    for _ in range(3):
        room.cache.update(ranking("".join(order)), None)
        room.loader.land()
    room.cache.collect()
    expected: list[str] = []
    for name in order:
        if len(expected) < capacity and sum(amounts[n] for n in (*expected, name)) <= budget:
            expected.append(name)
    assert room.resident == "".join(sorted(expected))
    assert room.loader.started == expected  # each once


def test_the_active_drafts_share_counts() -> None:
    room = filled("a", budget=30)
    room.cache.update(ranking("bcda"), "a")
    assert room.loader.under_way == ["b"]
    assert room.resident == "a"


def test_memory_that_only_a_load_takes_is_on_the_books_until_it_lands() -> None:
    size = DraftBytes(weights=10, kv=5, transient=20)
    room = Room(budget=60, sizes={"a": size, "b": size})
    room.cache.update(ranking("ab"), None)
    assert room.loader.under_way == ["a"]
    assert room.ledger.snapshot().in_flight_bytes == 30
    room.loader.land()
    room.cache.update(ranking("ab"), None)
    assert room.resident == "a"
    assert room.loader.under_way == ["b"]
    room.loader.land()
    room.cache.collect()
    assert room.ledger.snapshot().used_bytes == 30


def test_no_more_are_prepared_than_the_strategy_wants() -> None:
    room = filled("a", capacity=4)
    room.cache.update(ranking("bcda"), "a", most=1)
    assert room.loader.started == ["a", "b"]
    room.loader.land()
    room.cache.update(ranking("cbda"), "b", most=1)
    assert room.loader.under_way == ["c"]
    assert room.resident == "ab"  # nothing goes while there is room


def test_a_load_that_was_overtaken_is_dropped_where_its_place_is_needed() -> None:
    room = filled("a")
    room.cache.update(ranking("ba"), "a")
    assert room.loader.under_way == ["b"]
    room.cache.update(ranking("ca"), "a")
    assert room.loader.under_way == ["b"]  # c has to wait for a place
    room.loader.land("b")
    room.cache.update(ranking("ca"), "a")
    assert room.resident == "a"
    assert room.loader.under_way == ["c"]
    assert room.ledger.snapshot().used_bytes == 30
    assert room.cache.counters().evictions == 0


def test_a_load_that_was_overtaken_stays_where_there_is_room() -> None:
    room = filled("a", capacity=3)
    room.cache.update(ranking("ba"), "a")
    room.cache.update(ranking("ca"), "a")
    room.loader.land("b")
    room.cache.update(ranking("ca"), "a")
    assert room.resident == "ab"
    assert room.loading == "c"


def test_nothing_is_evicted_for_a_draft_that_has_no_room_even_then() -> None:
    sizes = dict.fromkeys("ab", SIZE) | {"c": DraftBytes(1000, 0)}
    room = Room(budget=40, sizes=sizes)
    room.cache.update(ranking("ab"), None)
    room.loader.land()
    room.cache.update(ranking("c"), None)
    assert room.resident == "ab"
    with pytest.raises(MemoryBudgetError, match="draft c"):
        room.cache.require("c")
    assert room.resident == "ab"


def test_a_capacity_beyond_the_number_of_drafts() -> None:
    room = filled("abc", capacity=64, names="abc")
    assert room.cache.counters().evictions == 0
    assert room.names(DraftState.RESIDENT, DraftState.ACTIVE) == "abc"


def test_a_budget_below_one_draft_leaves_plain_decoding() -> None:
    room = Room(budget=14)
    room.cache.update(ranking("abc"), None)
    assert room.loader.started == []
    assert room.cache.best_resident(ranking("abc")) is None


# Under memory pressure


def test_a_limit_lets_all_go_but_the_active_draft_and_the_pins() -> None:
    room = filled("abcd", capacity=4)
    room.cache.pin("d", pinned=True)
    room.cache.limit(1)
    assert room.resident == "ad"
    room.cache.update(ranking("abcd"), "a")
    assert room.resident + room.loading == "ad"
    room.cache.limit(1, pins_stay=False)
    assert room.resident == "a"
    with pytest.raises(MemoryBudgetError, match="short of memory"):
        room.cache.pin("b", pinned=True)


def test_a_limit_of_none_at_all_takes_the_active_draft_at_the_next_scheduling_point() -> None:
    room = filled("ab")
    room.cache.limit(0, pins_stay=False)
    assert room.resident == "a"
    assert room.cache.best_resident(ranking("ab")) is None
    room.cache.update(ranking("ab"), None)
    assert room.resident + room.loading == ""
    assert room.ledger.snapshot().used_bytes == 0
    with pytest.raises(MemoryBudgetError, match="short of memory"):
        room.cache.require("a")


def test_a_load_that_lands_under_pressure_is_dropped() -> None:
    room = filled("a", capacity=3)
    room.cache.update(ranking("abc"), "a")
    room.cache.limit(1)
    room.loader.land()
    room.cache.collect()
    assert room.resident == "a"
    assert room.ledger.snapshot().used_bytes == 15


def test_without_a_limit_working_set_and_pins_come_back() -> None:
    room = filled("ab", capacity=3)
    room.cache.pin("f", pinned=True)
    room.loader.land()
    room.cache.collect()
    room.cache.limit(1, pins_stay=False)
    assert room.resident == "a"
    room.cache.limit(None)
    room.cache.update(ranking("abc"), "a")
    assert room.loader.under_way == ["f", "b"]


# Waiting for a draft


def test_require_returns_what_is_resident_at_once() -> None:
    room = filled("ab")
    assert room.cache.require("b").name == "b"
    assert room.loader.started == ["a", "b"]


def test_require_waits_for_a_load_that_is_under_way() -> None:
    room = Room()
    room.cache.update(ranking("ab"), None)
    assert room.cache.require("b").name == "b"
    assert room.loader.started == ["a", "b"]


def test_require_makes_room() -> None:
    room = filled("ab")
    room.cache.rest()
    assert room.cache.require("c").name == "c"
    assert len(room.resident) == 2


def test_require_when_the_cache_is_full_of_loading_drafts() -> None:
    room = Room()
    room.cache.update(ranking("ab"), None)
    assert room.cache.require("c").name == "c"
    assert "c" in room.resident
    assert len(room.resident + room.loading) <= 2
    assert sorted(room.loader.started) == ["a", "b", "c"]


def test_require_when_the_loading_drafts_fail() -> None:
    room = Room()
    room.loader.broken = {"a", "b"}
    room.cache.update(ranking("ab"), None)
    assert room.cache.require("c").name == "c"


def test_require_of_a_broken_draft_says_why() -> None:
    room = Room()
    room.loader.broken = {"a"}
    with pytest.raises(CheckpointError, match="a is broken"):
        room.cache.require("a")
    assert room.cache.state("a") is DraftState.FAILED
    assert room.cache.error("a") == "a is broken."
    assert room.ledger.snapshot().used_bytes == 0


def test_require_tries_a_failed_draft_again_although_it_rests() -> None:
    room = Room()
    room.loader.broken = {"a"}
    with pytest.raises(CheckpointError):
        room.cache.require("a")
    room.loader.broken.clear()
    assert room.cache.require("a").name == "a"
    assert room.cache.error("a") == ""
    assert room.cache.counters().failures == 1


def test_require_without_room_is_refused() -> None:
    room = Room(budget=14)
    with pytest.raises(MemoryBudgetError, match="draft a"):
        room.cache.require("a")
    assert room.loader.started == []
    pinned = Room(capacity=1)
    pinned.cache.pin("a", pinned=True)
    pinned.loader.land()
    with pytest.raises(MemoryBudgetError, match="resident_capacity is 1"):
        pinned.cache.require("b")


# Failures


def test_a_failed_draft_rests_longer_after_each_failure() -> None:
    room = Room(capacity=1)
    room.loader.broken = {"a"}
    pauses = []
    for _ in range(10):
        room.cache.update(ranking("a"), None)
        assert room.loader.under_way == ["a"]
        room.loader.land()
        room.cache.collect()
        failed_at = room.clock.seconds
        while not room.cache.may_load("a"):
            room.cache.update(ranking("a"), None)
            assert room.loader.under_way == []
            room.clock.seconds += RETRY_SECONDS / 2
        pauses.append(room.clock.seconds - failed_at)
    assert pauses[:4] == [30, 60, 120, 240]
    assert pauses[-1] == 3600
    assert room.cache.counters().failures == 10


def test_a_failed_draft_leaves_its_place_to_the_next() -> None:
    room = Room(capacity=2)
    room.loader.broken = {"a"}
    room.cache.update(ranking("abc"), None)
    room.loader.land()
    room.cache.update(ranking("abc"), None)
    room.loader.land()
    best = room.cache.best_resident(ranking("abc"))
    assert best is not None
    assert best.name == "b"
    assert room.resident == "bc"


def test_a_draft_that_loads_has_its_failures_forgotten() -> None:
    room = Room()
    room.loader.broken = {"a"}
    with pytest.raises(CheckpointError):
        room.cache.require("a")
    room.loader.broken.clear()
    room.clock.seconds += RETRY_SECONDS
    room.cache.update(ranking("a"), None)
    room.loader.land()
    room.cache.collect()
    assert room.cache.state("a") is DraftState.RESIDENT


# Pins and capacity


def test_a_pinned_draft_is_loaded_and_stays() -> None:
    room = filled("ab")
    room.cache.rest()
    room.cache.pin("c", pinned=True)
    assert room.loader.under_way == ["c"]
    room.loader.land()
    room.cache.update(ranking("def"), None)
    assert "c" in room.resident
    assert room.cache.pinned("c")
    room.cache.pin("c", pinned=False)
    room.loader.land()
    room.cache.update(ranking("def"), None)
    assert "c" not in room.resident


def test_pinning_does_not_evict_the_active_draft_or_another_pin() -> None:
    room = filled("a", capacity=1)
    with pytest.raises(MemoryBudgetError, match="resident_capacity is 1"):
        room.cache.pin("b", pinned=True)
    assert room.resident == "a"
    assert not room.cache.pinned("b")
    room.cache.rest()
    room.cache.pin("b", pinned=True)
    with pytest.raises(MemoryBudgetError, match="1 drafts are pinned"):
        room.cache.pin("c", pinned=True)
    room.cache.pin("b", pinned=True)  # it is pinned already, which is no error


def test_pinning_without_memory_is_refused() -> None:
    room = Room(budget=14)
    with pytest.raises(MemoryBudgetError, match=r"0\.0 MiB of the budget are free"):
        room.cache.pin("a", pinned=True)
    assert not room.cache.pinned("a")


def test_a_lower_capacity_takes_effect_at_the_next_update() -> None:
    room = filled("abc", capacity=3)
    room.cache.set_capacity(1)
    assert room.resident == "abc"
    room.cache.update(ranking("abc"), "a")
    assert room.resident == "a"


def test_a_higher_capacity_lets_more_drafts_in() -> None:
    room = filled("a", capacity=1)
    room.cache.set_capacity(3)
    room.cache.update(ranking("abc"), "a")
    assert room.loader.under_way == ["b", "c"]


def test_states_and_scores_are_shown() -> None:
    room = Room()
    room.cache.update(ranking("ab"), None)
    room.loader.land("a")
    room.cache.best_resident(ranking("ab"))
    assert room.cache.state("a") is DraftState.ACTIVE
    assert room.cache.state("b") is DraftState.LOADING
    assert room.cache.state("c") is DraftState.STORED
    assert (room.cache.score("a"), room.cache.score("f")) == (1.0, 0.0)
    room.cache.rest()
    assert room.cache.state("a") is DraftState.RESIDENT
    assert room.cache.counters().load_seconds_p50 == 0.5


def test_what_a_load_takes_is_told_by_the_last_few() -> None:
    room = Room(capacity=1)
    assert room.cache.load_seconds == 0.0

    def load(times: int) -> float:
        for turn in range(times):
            name = "ab"[turn % 2]
            room.cache.update(ranking(name), None)
            room.loader.land()
            room.cache.collect()
        return room.cache.load_seconds

    assert load(100) == 0.5
    room.loader.seconds = 50.0  # the storage turns slower
    assert load(2) == 0.5
    assert load(4) == 50.0
    assert room.cache.counters().load_seconds_p50 == 0.5  # that is over all that are kept


class CacheMachine(RuleBasedStateMachine):
    """Any order of updates, loads, failures, pins, limits and changes of K."""

    @initialize(capacity=st.integers(1, 4), budget=st.sampled_from([20, 40, 60, 1000]))
    def begin(self, capacity: int, budget: int) -> None:
        self.room = Room(capacity=capacity, budget=budget)
        self.active: str | None = None
        self.occupied = 0
        self.limited: int | None = None

    @rule(
        order=st.permutations(NAMES),
        length=st.integers(0, 6),
        most=st.sampled_from([None, 1, 2]),
    )
    def update(self, order: list[str], length: int, most: int | None) -> None:
        before = len(self.room.loader.started)
        self.room.cache.update(ranking("".join(order[:length])), self.active, most)
        started = self.room.loader.started[before:]
        assert {*started} <= {*order[:length]} | self.pinned
        assert len({*started} - self.pinned) <= (most or 6)

    @property
    def pinned(self) -> set[str]:
        return {name for name in NAMES if self.room.cache.pinned(name)}

    @rule(most=st.sampled_from([None, None, 0, 1, 2]), pins_stay=st.booleans())
    def limit(self, most: int | None, pins_stay: bool) -> None:
        stays = {self.active} | (self.pinned if pins_stay or most is None else set())
        before = set(self.room.resident)
        self.limited = most
        self.room.cache.limit(most, pins_stay=pins_stay or most is None)
        assert before & stays <= set(self.room.resident)

    @rule(order=st.permutations(NAMES), length=st.integers(0, 6))
    def choose(self, order: list[str], length: int) -> None:
        chosen = ranking("".join(order[:length]))
        best = self.room.cache.best_resident(chosen)
        self.active = best.name if best else None
        usable = "" if self.limited == 0 else self.room.resident
        assert self.active == next((n for n in chosen.order if n in usable), None)

    @rule(name=st.sampled_from(NAMES))
    def require(self, name: str) -> None:
        try:
            assert self.room.cache.require(name).name == name
        except CheckpointError:
            assert name in self.room.loader.broken
        except MemoryBudgetError:
            assert self.limited == 0 or name not in self.room.resident
            assert self.limited == 0 or not self.room.loading

    @rule(name=st.sampled_from(NAMES), pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        try:
            self.room.cache.pin(name, pinned=pinned)
            assert self.room.cache.pinned(name) == pinned
        except MemoryBudgetError:
            assert pinned
            assert not self.room.cache.pinned(name)

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        if self.room.loader.under_way:
            self.room.loader.land(data.draw(st.sampled_from(self.room.loader.under_way)))

    @rule(name=st.sampled_from(NAMES))
    def change_health(self, name: str) -> None:
        self.room.loader.broken ^= {name}

    @rule(seconds=st.sampled_from([1.0, 31.0, 5000.0]))
    def wait(self, seconds: float) -> None:
        self.room.clock.seconds += seconds

    @rule(capacity=st.integers(1, 4))
    def change_capacity(self, capacity: int) -> None:
        self.room.cache.set_capacity(capacity)

    @rule()
    def rest(self) -> None:
        self.active = None
        self.room.cache.rest()

    @invariant()
    def within_capacity(self) -> None:
        """After K was lowered what is there may stay for a while, but nothing is added."""
        occupied = len(self.room.resident + self.room.loading)
        assert occupied <= max(self.room.cache.capacity, self.occupied)
        self.occupied = occupied

    @invariant()
    def the_books_agree(self) -> None:
        books = self.room.ledger.snapshot()
        assert books.draft_bytes == 10 * len(self.room.resident)
        assert books.in_flight_bytes == 10 * len(self.room.loading)
        assert books.kv_bytes == 5 * len(self.room.resident + self.room.loading)
        assert books.used_bytes <= books.budget_bytes

    @invariant()
    def the_active_draft_is_resident(self) -> None:
        if self.active is not None:
            assert self.room.cache.state(self.active) is DraftState.ACTIVE

    @invariant()
    def no_load_is_lost(self) -> None:
        assert set(self.room.loader.under_way) <= set(self.room.loading)

    def teardown(self) -> None:
        """When nothing changes any more the working set is reached."""
        if not hasattr(self, "room"):
            return
        room = self.room
        room.loader.broken.clear()
        room.clock.seconds += 10_000.0
        for name in NAMES:
            room.cache.pin(name, pinned=False)
        room.cache.limit(None)
        wanted = ranking("fedcba")
        for _ in range(4):
            room.cache.update(wanted, None)
            room.loader.land()
            room.cache.collect()
        working_set = set("fedcba"[: room.cache.capacity])
        fitting = room.ledger.budget_bytes // 15
        assert room.loading == ""
        if fitting >= len(working_set):
            assert set(room.resident) == working_set
        else:
            assert len(room.resident) == fitting
            assert set(room.resident) <= working_set


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=40)
