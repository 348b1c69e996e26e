"""The best schedule of drafts for an answer that is known, under the memory constraint.

This is Oracle-Dynamic's plan. A schedule says at each scheduling point which resident draft runs
the coming N iterations, which drafts begin to load, and which make room for them; the best one
finishes the answer soonest. The rules are those of Algorithms 2 and 3: at most K drafts, loads
under way included, the active one never evicted, loads one after another, and a draft that has
landed may run from the next scheduling point on. Only the first draft is waited for.

The search goes through the places of the answer in their order and keeps, for each situation that
can be reached, the fewest seconds. Situations that cannot beat a schedule already found are left
out: their seconds so far, with the least that the rest can take, are too many. Where more than
`width` situations at a place are left, the most promising go on, and the plan's `bound_seconds`
says how much better the best schedule could be.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations
from typing import NamedTuple, TypeAlias

from memspec_core.strategies.known_answer import (
    SAME_TIME,
    KnownAnswer,
    Rest,
    Situation,
    fresh,
    slowed,
)

WIDTH = 2000
"""Situations kept at a place for K = 2; with six drafts there are seldom as many."""

WIDTH_BEYOND = 8
"""The same for a larger K."""


@dataclass(frozen=True)
class Step:
    """What a plan does at a scheduling point: `order` has the active draft, those kept, the loads.

    Ranking the drafts in this order, and no others, makes Algorithms 2 and 3 do it.
    """

    place: int
    active: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A schedule for the rest of an answer: its steps by place, and the seconds that it takes.

    No schedule takes less than `bound_seconds`.
    """

    steps: Mapping[int, Step]
    seconds: float
    bound_seconds: float

    @property
    def exact(self) -> bool:
        """Whether the plan is known to be the best."""
        return self.seconds <= self.bound_seconds + SAME_TIME


def plan(
    known: KnownAnswer,
    place: int = 0,
    situation: Situation | None = None,
    width: int | None = None,
) -> Plan:
    """Plan the rest of an answer from a situation at a place, or the whole of it.

    Exact for K = 1 and 2 with up to six drafts; for a larger K never worse than for 2.
    """
    rest = Rest(known)
    search = _Search(known, rest)
    if known.capacity <= 2 or situation is not None:
        starts = search.first_situations() if situation is None else {situation: _Reached(0.0)}
        return search.run(place, starts, width or _usual_width(known))
    two = _Search(replace(known, capacity=2), rest)
    simpler = two.run(place, two.first_situations(), WIDTH)
    found = search.run(
        place, search.first_situations(), width or _usual_width(known), simpler.seconds
    )
    return (
        found
        if found.seconds < simpler.seconds
        else replace(simpler, bound_seconds=min(simpler.seconds, found.bound_seconds))
    )


def _usual_width(known: KnownAnswer) -> int:
    return WIDTH if known.capacity <= 2 else WIDTH_BEYOND


class _Reached(NamedTuple):
    """How a situation was reached: in how many seconds, by what step, and after what."""

    seconds: float
    step: Step | None = None
    before: "_Reached | None" = None


_Child: TypeAlias = tuple[int, Situation, _Reached]
"""A place, the situation there, and how it was reached."""


@dataclass
class _Frontier:
    """Situations by place, each with the quickest way to it, and that to the answer's end.

    `lost_seconds`: the least that a schedule can take that was not followed to its end.
    """

    places: list[dict[Situation, _Reached]]
    end: _Reached = field(default_factory=lambda: _Reached(float("inf")))
    lost_seconds: float = float("inf")

    @property
    def seconds(self) -> float:
        """Those of the quickest schedule."""
        return self.end.seconds

    def add(self, place: int, situation: Situation, reached: _Reached) -> None:
        if place == len(self.places):
            if reached.seconds < self.end.seconds:
                self.end = reached
            return
        known = self.places[place].get(situation)
        if known is None or reached.seconds < known.seconds:
            self.places[place][situation] = reached


class _Search:
    """Finds the quickest schedule."""

    def __init__(self, known: KnownAnswer, rest: Rest) -> None:
        self._known = known
        self._count, self._drafts = known.gains.shape
        self._rest = rest
        self._least = rest.of_two if known.capacity == 2 else rest.at_least

    def first_situations(self) -> dict[Situation, _Reached]:
        """Return the situations after the first load, the only one that is waited for."""
        known = self._known
        return {
            Situation(draft, ((draft, 0),)): _Reached(
                known.load_seconds[draft] if known.first_load_counts else 0.0
            )
            for draft in range(self._drafts)
        }

    def run(
        self,
        place: int,
        starts: Mapping[Situation, _Reached],
        width: int,
        beaten: float = float("inf"),
    ) -> Plan:
        """Search from situations at a place for a plan that takes less than `beaten` seconds."""
        if place >= self._count:
            return Plan({}, 0.0, 0.0)
        best = self._straight_on(place, starts)
        frontier = self._frontier(place, starts)
        for here in range(place, self._count):
            # What loads while the first draft reads the prompt lands sooner than `Rest` knows.
            limit = min(best.seconds, beaten) - SAME_TIME if here > 0 else float("inf")
            for situation, reached in self._promising(frontier, here, limit, width):
                for child in self._children(here, situation, reached):
                    frontier.add(*child)
            frontier.places[here].clear()
        if frontier.seconds < best.seconds:
            best = frontier
        bound = min(best.seconds, beaten, frontier.lost_seconds)
        return Plan(_steps(best.end), best.seconds, bound)

    def _frontier(self, place: int, starts: Mapping[Situation, _Reached]) -> _Frontier:
        frontier = _Frontier([{} for _ in range(self._count)])
        frontier.places[place].update(starts)
        return frontier

    def _straight_on(self, place: int, starts: Mapping[Situation, _Reached]) -> _Frontier:
        """Follow what looks quickest at each point, for a schedule to beat."""
        frontier = self._frontier(place, starts)
        coming: Iterable[_Child] = ((place, *start) for start in starts.items())
        here, situation, reached = min(coming, key=self._promise)
        while here < self._count:
            coming = self._children(here, situation, reached)
            here, situation, reached = min(coming, key=self._promise)
            frontier.add(here, situation, reached)
        return frontier

    def _promise(self, reached: _Child) -> float:
        place, situation, how = reached
        return how.seconds + self._rest.of_two(place, situation)

    def _promising(
        self, frontier: _Frontier, place: int, limit: float, width: int
    ) -> list[tuple[Situation, _Reached]]:
        """Return the situations at a place that may lead to the best schedule."""
        kept = [
            (situation, reached)
            for situation, reached in frontier.places[place].items()
            if reached.seconds + self._least(place, situation) < limit
        ]
        if len(kept) > width:
            kept.sort(key=lambda entry: self._promise((place, *entry)))
            lost = (reached.seconds + self._least(place, s) for s, reached in kept[width:])
            frontier.lost_seconds = min(frontier.lost_seconds, *lost)
        return kept[:width]

    def _children(self, place: int, situation: Situation, reached: _Reached) -> Iterator[_Child]:
        """Yield what one interval can lead to."""
        known = self._known
        at_start = reached.step is None and place == 0
        for active, seen in situation.seen:
            others = tuple(entry for entry in situation.seen if entry[0] != active)
            work = self._rest.work[place][active] + known.catch_up_seconds[active] * (place - seen)
            end = self._rest.ends[place][active]
            before = known.catch_up_seconds[active] * known.prompt_tokens if at_start else 0.0
            for kept, loads in self._room(situation, others):
                queue = situation.loading + loads
                remaining = situation.remaining
                if loads and not situation.loading:
                    remaining = known.load_seconds[loads[0]]
                landed, loading, remaining, seconds = self._elapsed(queue, remaining, work, before)
                new = ((draft, fresh(known)) for draft in landed)
                resident = tuple(sorted((*kept, (active, end), *new)))
                order = (active, *(draft for draft, _ in kept), *queue)
                yield (
                    end,
                    Situation(active, resident, loading, remaining),
                    _Reached(reached.seconds + seconds, Step(place, active, order), reached),
                )

    def _room(
        self, situation: Situation, others: tuple[tuple[int, int], ...]
    ) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]]:
        """Yield which resident drafts beside the active one are kept, and which loads begin."""
        yield others, ()
        present = {draft for draft, _ in situation.seen} | set(situation.loading)
        absent = [draft for draft in range(self._drafts) if draft not in present]
        free = self._known.capacity - len(present)
        for count in range(1, min(len(absent), free + len(others)) + 1):
            for loads in permutations(absent, count):
                for kept in combinations(others, min(len(others), len(others) + free - count)):
                    yield kept, loads

    def _elapsed(
        self, queue: tuple[int, ...], remaining: float, work: float, before: float
    ) -> tuple[tuple[int, ...], tuple[int, ...], float, float]:
        """Return what has landed, what is loading still, for how long, and the seconds of work.

        Loads go on for some seconds `before` the work, and then slow it down.
        """
        if not queue:
            return (), (), 0.0, work
        loads = self._known.load_seconds
        busy = max(0.0, remaining + sum(loads[draft] for draft in queue[1:]) - before)
        seconds = slowed(work, busy, self._known.load_slowdown)
        passed, landed = before + seconds, 0
        while remaining <= passed + SAME_TIME:
            passed -= remaining
            landed += 1
            if landed == len(queue):
                return queue, (), 0.0, seconds
            remaining = loads[queue[landed]]
        return queue[:landed], queue[landed:], round(remaining - passed, 12), seconds


def _steps(reached: _Reached | None) -> dict[int, Step]:
    """Walk back from the answer's end."""
    steps: dict[int, Step] = {}
    while reached is not None and reached.step is not None:
        steps[reached.step.place] = reached.step
        reached = reached.before
    return steps
