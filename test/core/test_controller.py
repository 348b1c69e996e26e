"""The loop of Algorithm 3 on real models, with rankings and loads that the test decides."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from core.test_cache import HandLoader
from core.tiny import EVEN_COSTS, ManualClock, decode, ids_of, load_draft, make_settings, never
from memspec_core.controller import Controller
from memspec_core.errors import CheckpointError, PromptTooLongError
from memspec_core.iteration import Iteration
from memspec_core.models.target import Target
from memspec_core.request import FinishReason, GenerationRequest
from memspec_core.residency.cache import DraftBytes, DraftCache
from memspec_core.residency.ledger import Ledger
from memspec_core.residency.loader import FinishedLoad
from memspec_core.snapshot import DraftState
from memspec_core.speculation.decodings import Decodings
from memspec_core.speculation.planner import Planner
from memspec_core.speculation.proposal import Draft
from memspec_core.strategies import Context, GeneralStatic, Ranking, StaticStrategy
from memspec_core.strategies.base import Outlook
from memspec_core.strategies.utility import DEAR_SHARE

PROMPT = [30, 40, 50, 60]
NAMES = ("itself", "first_layer", "other")


class RealLoader(HandLoader):
    """Driven by hand as well, but what lands are real drafts."""

    def __init__(self, drafts: dict[str, Draft]) -> None:
        super().__init__()
        self._drafts = drafts

    def finished(self) -> list[FinishedLoad]:
        return [self._with_draft(load) for load in super().finished()]

    def wait(self, give_up: Callable[[], bool] = lambda: False) -> FinishedLoad:
        return self._with_draft(super().wait(give_up))

    def _with_draft(self, load: FinishedLoad) -> FinishedLoad:
        return load if load.draft is None else replace(load, draft=self._drafts[load.name])


class Turning:
    """A strategy that wants each of its rankings in turn, and remembers what it saw."""

    name = "turning"
    insists = False
    waits = False
    prepares = None
    reads_states = 16

    def __init__(self, *orders: Sequence[str]) -> None:
        self._orders = orders
        self.contexts: list[Context] = []
        self.observed: list[Iteration] = []

    def rank(self, context: Context) -> Ranking:
        order = self._orders[len(self.contexts) % len(self._orders)]
        self.contexts.append(context)
        return Ranking({name: -float(place) for place, name in enumerate(order)})

    def observe(self, iteration: Iteration) -> None:
        self.observed.append(iteration)


class Desk:
    """A controller with what it works on."""

    def __init__(
        self, target: Target, drafts: dict[str, Draft], capacity: int = 2, **parameters: int
    ) -> None:
        self.target = target
        self.clock = ManualClock()
        self.loader = RealLoader(drafts)
        self.settings = make_settings(
            Path("unused"),
            dict.fromkeys(drafts, Path("unused")),
            resident_capacity=capacity,
            **parameters,
        )
        self.cache = DraftCache(
            dict.fromkeys(drafts, DraftBytes(10, 5)),
            self.loader,
            Ledger(1000),
            capacity,
            self.clock,
        )
        planner = Planner(EVEN_COSTS)
        decodings = Decodings(target, planner, lambda: self.settings, self.clock)
        self.controller = Controller(
            decodings.begin, self.cache, planner, lambda: self.settings, self.clock
        )

    def run(
        self, strategy: Turning | StaticStrategy, limit: int = 24, **how: object
    ) -> Iterator[Iteration]:
        request = GenerationRequest(prompt="-", max_new_tokens=limit)
        interruption = how.get("interruption", never)
        prompt = how.get("prompt", PROMPT)
        return self.controller.generate(request, prompt, strategy, interruption)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def drafts(target: Target, draft_folders: dict[str, Path]) -> dict[str, Draft]:
    return {name: load_draft(name, draft_folders[name], target) for name in NAMES}


@pytest.fixture
def desk(target: Target, drafts: dict[str, Draft]) -> Desk:
    return Desk(target, drafts)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[int]:
    return ids_of(decode(target, PROMPT, max_new_tokens=60))


def test_only_an_answer_that_finds_no_draft_waits_for_one(desk: Desk) -> None:
    list(desk.run(Turning(("other",)), 8))
    assert list(desk.cache.residents) == ["other"]

    first = next(desk.run(Turning(("itself", "other"))))
    assert (first.draft, first.wanted, first.fallback) == ("other", "itself", True)
    assert desk.cache.loading == ("itself",)


def test_an_answer_that_names_its_draft_waits_for_it(desk: Desk) -> None:
    list(desk.run(Turning(("other",)), 8))
    first = next(desk.run(StaticStrategy("itself")))
    assert (first.draft, first.fallback) == ("itself", False)


@pytest.mark.parametrize("interval", [1, 2, 4])
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_answer_is_the_targets_own_whatever_is_resident(
    interval: int,
    capacity: int,
    target: Target,
    drafts: dict[str, Draft],
    plain: list[int],
) -> None:
    desk = Desk(target, drafts, capacity, scheduling_interval=interval)
    strategy = Turning(NAMES, NAMES[::-1], ("other", "itself", "first_layer"), ())
    events = []
    for event in desk.run(strategy, 60):
        events.append(event)
        if len(events) % 3 == 0:
            desk.loader.land()
    assert ids_of(events) == plain[:60]
    assert strategy.observed == events
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_only_the_first_draft_is_waited_for(desk: Desk) -> None:
    desk.settings = desk.settings.with_changes({"scheduling_interval": 2})
    events = []
    for event in desk.run(Turning(("itself",), ("other", "itself")), 60):
        events.append(event)
        if len(events) == 5:
            desk.loader.land("other")
    assert desk.loader.started == ["itself", "other"]
    ran = [(event.draft, event.fallback) for event in events]
    # Wanted from the second interval on, there from the fourth on: fallback in between.
    assert ran[:2] == [("itself", False)] * 2
    assert ("itself", True) in ran
    assert ("other", False) in ran[5:]
    assert {draft for draft, _ in ran[2:4]} == {"itself"}


def test_drafts_change_at_scheduling_points_only(desk: Desk) -> None:
    desk.settings = desk.settings.with_changes({"scheduling_interval": 3})
    strategy = Turning(("other", "first_layer"), ("first_layer", "other"))
    events = []
    for event in desk.run(strategy, 40):
        events.append(event)
        if desk.loader.under_way:
            desk.loader.land()
    runs = [event.draft for event in events if event.proposed]
    assert {"other", "first_layer"} == set(runs)
    changes = [i for i in range(1, len(runs)) if runs[i] != runs[i - 1]]
    assert changes
    assert all(change % 3 == 0 for change in changes)


class Weighable(Turning):
    """The same with rankings in tokens an iteration, each of which takes so many seconds.

    It also notes after how many iterations it ranked.
    """

    def __init__(self, clock: ManualClock, seconds: float, *orders: Sequence[str]) -> None:
        super().__init__(*orders)
        self._clock, self._seconds = clock, seconds
        self.points: list[int] = []

    def rank(self, context: Context) -> Ranking:
        self.points.append(len(self.observed))
        self._clock.seconds += self._seconds
        order = super().rank(context).order
        tokens = {name: 3.0 - place for place, name in enumerate(order)}
        return Ranking(tokens, Outlook((1.0,), lambda draft: [tokens[draft]]))


@pytest.mark.parametrize(
    ("cost_aware", "share", "points"),
    [
        (True, 2 * DEAR_SHARE, [0, 1, 3, 7, 8, 10, 14, 18]),
        (True, DEAR_SHARE / 2, [*range(9)]),
        (False, 2 * DEAR_SHARE, [*range(9)]),
    ],
)
def test_scheduling_points_become_rarer_while_a_weighed_choice_stays_and_rankings_are_dear(
    target: Target,
    drafts: dict[str, Draft],
    cost_aware: bool,
    share: float,
    points: list[int],
) -> None:
    desk = Desk(target, drafts, scheduling_interval=1, cost_aware=cost_aware, draft_length=1)
    pair = ("first_layer", "other")
    for name in pair:
        desk.cache.require(name)
    seconds = share * Planner(EVEN_COSTS).iteration_seconds(pair[0], 1)
    strategy = Weighable(desk.clock, seconds, *[pair] * 3, *[pair[::-1]] * 9)
    ids_of(desk.run(strategy, limit=40))
    assert strategy.points[: len(points)] == points


def test_settings_that_change_take_effect_in_the_next_interval(desk: Desk) -> None:
    desk.settings = desk.settings.with_changes({"draft_length": 2, "scheduling_interval": 2})
    strategy = Turning(("other",))
    events = []
    for event in desk.run(strategy, 60):
        events.append(event)
        if len(events) == 3:
            desk.settings = desk.settings.with_changes(
                {"draft_length": 5, "scheduling_interval": 1, "recent_tokens": 3}
            )
    proposed = [event.proposed for event in events]
    assert proposed[:4] == [2] * 4
    assert proposed[4:8] == [5] * 4
    assert len(strategy.contexts[1].recent_ids) > 0
    assert len(strategy.contexts[-1].recent_ids) == 3
    # Ranked once before each interval: of 2, 2, and then of 1 iteration.
    assert len(strategy.contexts) == 2 + len(events[4:])


def test_settings_that_change_end_a_longer_interval_at_the_next_multiple_of_n(
    target: Target, drafts: dict[str, Draft]
) -> None:
    desk = Desk(target, drafts, scheduling_interval=2, cost_aware=True, draft_length=1)
    desk.cache.require("other")
    seconds = 4 * DEAR_SHARE * Planner(EVEN_COSTS).iteration_seconds("other", 1)
    strategy = Weighable(desk.clock, seconds, ("other",))
    events = []
    for event in desk.run(strategy, 60):
        events.append(event)
        if len(events) == 7:
            desk.settings = desk.settings.with_changes({"draft_length": 2})
    assert strategy.points[:4] == [0, 2, 6, 8]  # it would be 14 without the change
    assert [event.proposed for event in events[6:10]] == [1, 1, 2, 2]


def test_what_the_strategy_sees(desk: Desk, plain: list[int]) -> None:
    desk.settings = desk.settings.with_changes({"recent_tokens": 5, "scheduling_interval": 1})
    strategy = Turning(("other",))
    events = list(desk.run(strategy, 12))
    first, *later = strategy.contexts
    assert (list(first.prompt_ids), list(first.recent_ids)) == (PROMPT, [])
    total = 0
    for context, event in zip(later, events, strict=False):
        total += event.committed
        assert list(context.prompt_ids) == PROMPT
        assert list(context.recent_ids) == plain[max(0, total - 5) : total]


def test_the_default_length_holds_where_a_request_names_none(desk: Desk) -> None:
    assert len(ids_of(list(desk.run(Turning(("other",)), 0)))) == 16


def test_a_generator_that_is_closed_early_leaves_all_in_order(desk: Desk, plain: list[int]) -> None:
    for count in (1, 2, 4):
        running = desk.run(Turning(("first_layer",)))
        seen = [next(running) for _ in range(count)]
        running.close()
        assert ids_of(seen) == plain[: len(ids_of(seen))]
        assert desk.target.cache.length < len(PROMPT) + len(ids_of(seen))
        assert desk.cache.state("first_layer") is DraftState.RESIDENT
        assert ids_of(list(desk.run(Turning(("first_layer",))))) == plain[:24]


def test_an_interruption_ends_with_what_there_is(desk: Desk, plain: list[int]) -> None:
    asked = iter([None] * 4 + [FinishReason.CANCELLED] * 9)
    events = list(desk.run(Turning(("other",)), interruption=lambda: next(asked)))
    assert events[-1].finish_reason is FinishReason.CANCELLED
    assert ids_of(events) == plain[: len(ids_of(events))]
    assert len(ids_of(events)) >= 3


def test_times_go_to_their_kinds(desk: Desk) -> None:
    desk.clock.step = 1.0
    events = list(desk.run(Turning(("other",)), 12))
    first = events[0].seconds
    # Ranking, then choosing and preparing; the target's reading, then the draft's.
    assert (first.prediction, first.load_wait, first.prompt) == (2.0, 1.0, 2.0)
    # From the end of one iteration to that of the next, without what else it is made of.
    interval = desk.settings.scheduling_interval
    later = [event.seconds.decode for event in events[1:]]
    between = [3.0 + 1.0 * (place % interval == 0) for place in range(1, len(events))]
    assert (first.decode, later) == (2.0, between)
    assert all(event.seconds.load_wait == event.seconds.prompt == 0.0 for event in events[1:])
    predictions = [event.seconds.prediction for event in events]
    assert predictions == [2.0 * (place % interval == 0) for place in range(len(events))]


def test_a_static_strategy_and_none(desk: Desk, plain: list[int]) -> None:
    events = list(desk.run(StaticStrategy("first_layer")))
    assert ids_of(events) == plain[:24]
    assert {event.draft for event in events} <= {"first_layer", "none"}
    events = list(desk.run(StaticStrategy("none")))
    assert ids_of(events) == plain[:24]
    assert {(event.draft, event.wanted) for event in events} == {("none", "none")}


def test_the_general_draft_or_else_the_first() -> None:
    context = Context(())
    assert GeneralStatic(("code", "general")).rank(context).best == "general"
    assert GeneralStatic(("code", "math")).rank(context).best == "code"
    assert GeneralStatic(()).rank(context).best is None
    assert Ranking({"a": 1.0, "b": 2.0, "c": 1.0}).order == ("b", "a", "c")


def test_a_broken_draft_ends_only_what_insists_on_it(desk: Desk, plain: list[int]) -> None:
    desk.loader.broken = {"other"}
    with pytest.raises(CheckpointError, match="other is broken"):
        list(desk.run(StaticStrategy("other")))
    events = list(desk.run(Turning(("other", "first_layer"))))
    assert ids_of(events) == plain[:24]
    events = list(desk.run(Turning(("other",))))
    assert ids_of(events) == plain[:24]
    assert {event.draft for event in events} == {"none"}


def test_a_prompt_without_room_is_refused_before_any_load(desk: Desk) -> None:
    with pytest.raises(PromptTooLongError):
        list(desk.run(Turning(("other",)), prompt=[5] * 256))
    assert desk.loader.started == []
    assert len(list(desk.run(Turning(("other",)), 3))) > 0
