"""What is known of an answer beforehand, and how long the rest of it takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Gains = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]

LONGEST = 32
"""Intervals that a load may last; what takes longer counts as that in `Rest`."""

SAME_TIME = 1e-9
"""Seconds within which a load counts as landed: sums in different order differ a little."""


@dataclass(frozen=True)
class KnownAnswer:
    """What an oracle knows of a generation.

    `gains` [n, d]: tokens that an iteration gains at each place of the answer with each draft,
    `capacity` K and `interval` N. Per draft [d]: `iteration_seconds` of drafting and verifying,
    `load_seconds`, and `catch_up_seconds` for each token that a draft has not seen when it runs:
    those generated since it last ran, and for one that never ran the `prompt_tokens` as well.

    While a load is under way, iterations take `load_slowdown` times as long. The first draft is
    waited for, which is part of a plan's seconds if `first_load_counts`; then it reads the prompt,
    which is not, while other loads begin.
    """

    gains: Gains
    capacity: int
    interval: int
    iteration_seconds: Sequence[float]
    load_seconds: Sequence[float]
    catch_up_seconds: Sequence[float]
    prompt_tokens: int = 0
    load_slowdown: float = 1.0
    first_load_counts: bool = False

    def static_seconds(self, draft: int) -> float:
        """Return the seconds of the whole answer with one draft, its load left out."""
        place, iterations = 0, 0
        while place < len(self.gains):
            place += int(self.gains[place, draft])
            iterations += 1
        return iterations * self.iteration_seconds[draft]


class Situation(NamedTuple):
    """What the coming choices depend on at a scheduling point, beside its place.

    `last`: the draft that ran last. `seen`: resident drafts in their order, each with the place up
    to which it has read the answer, less the prompt's tokens where it never ran. `loading`: loads
    in their order, of which the first is done in `remaining` seconds.
    """

    last: int
    seen: tuple[tuple[int, int], ...]
    loading: tuple[int, ...] = ()
    remaining: float = 0.0


def fresh(known: KnownAnswer) -> int:
    """Return the place up to which a draft that never ran has read the answer: before its start."""
    return -known.prompt_tokens


class _Intervals:
    """Where intervals of each draft end, and the seconds of their iterations.

    `ends` and `seconds` [m + 1, n + 1, d]: after 0 to m intervals of a draft from a place.
    """

    def __init__(self, known: KnownAnswer, most: int) -> None:
        gains = known.gains
        count, drafts = gains.shape
        columns = np.arange(drafts)
        jump = np.minimum(np.arange(count)[:, None] + gains, count)
        jump = np.vstack([jump, np.full((1, drafts), count)])
        ends = np.repeat(np.arange(count + 1)[:, None], drafts, axis=1)
        iterations = np.zeros_like(ends)
        all_ends, spent = [ends], [iterations]
        for _ in range(most):
            for _ in range(known.interval):
                iterations = iterations + (ends < count)
                ends = jump[ends, columns]
            all_ends.append(ends)
            spent.append(iterations)
        self.ends = np.stack(all_ends)
        self.seconds: Seconds = np.stack(spent) * np.asarray(known.iteration_seconds)


class Rest:
    """How many seconds the rest of an answer takes: at the least, and about.

    With two drafts the situations are (place, draft that ran last, other resident draft, whether
    that one never ran): while a draft loads there is but one that can run, so it runs until the
    other has landed. A draft that did run has missed N tokens at least. With that, `of_two` is the
    least that K = 2 can do, and about what a larger K does with two of its drafts. The least for
    any K, `at_least`, is what all drafts could do from the next point on if they were resident
    then.
    """

    def __init__(self, known: KnownAnswer) -> None:
        self._known = known
        self._slow = known.load_slowdown
        self.intervals = _Intervals(known, self._most_points())
        self.ends: list[list[int]] = self.intervals.ends[1].tolist()
        self.work: list[list[float]] = self.intervals.seconds[1].tolist()
        pairs, alone = self._of_pairs()
        self._pairs, self._alone = pairs.tolist(), alone.tolist()
        self._all: list[float] = self._of_all().tolist()

    def at_least(self, place: int, situation: Situation) -> float:
        """Return the least seconds from a situation on, whatever K is."""
        if place == len(self.ends) - 1:
            return 0.0
        return min(
            self.work[place][draft]
            + self._known.catch_up_seconds[draft] * (place - seen)
            + self._all[self.ends[place][draft]]
            for draft, seen in situation.seen
        )

    def of_two(self, place: int, situation: Situation) -> float:
        """Return the least seconds from a situation on with K = 2, about those with a larger K."""
        last = situation.last
        found = [
            self._pairs[place][last][draft][int(seen > 0)]
            for draft, seen in situation.seen
            if draft != last
        ]
        if situation.loading:
            found.append(
                self._while_loading(place, last, situation.loading[0], situation.remaining)
            )
        return float(min(found, default=self._alone[place][last]))

    def _while_loading(self, place: int, last: int, loading: int, remaining: float) -> float:
        """Return the least seconds where the one resident draft runs until another has landed."""
        seconds = 0.0
        while remaining > SAME_TIME and place < len(self.ends) - 1:
            spent = slowed(self.work[place][last], remaining, self._slow)
            seconds += spent
            remaining -= spent
            place = self.ends[place][last]
        return seconds + float(self._pairs[place][last][loading][0])

    def _of_pairs(self) -> tuple[Seconds, Seconds]:
        """Return the least seconds [n + 1, d, d, 2] with another resident, and [n + 1, d] alone."""
        known = self._known
        count, drafts = known.gains.shape
        each = np.arange(drafts)
        ends, work = self.intervals.ends[1], self.intervals.seconds[1]
        catch_up: Seconds = np.asarray(known.catch_up_seconds, np.float64)
        all_unseen = catch_up * (known.prompt_tokens + np.arange(count)[:, None])
        missed = np.broadcast_to(catch_up * known.interval, all_unseen.shape)
        caught_up = np.stack([all_unseen, missed], axis=2)
        landed_ends, landed_work = self._until_landed(np.zeros_like(all_unseen))
        later_ends, later_work = self._until_landed(all_unseen)
        pairs = np.zeros((count + 1, drafts, drafts, 2))
        alone = np.zeros((count + 1, drafts))
        one, other = each[:, None], each[None]
        for place in range(count - 1, -1, -1):
            loaded = landed_work[place] + pairs[landed_ends[place], one, other, 0]
            least = loaded.min(axis=1)
            after = pairs[ends[place], each]
            alone[place] = np.minimum(work[place] + alone[ends[place], each], least)
            stay = np.minimum(work[place][:, None, None] + after, least[:, None, None])
            loaded = later_work[place] + pairs[later_ends[place], one, other, 0]
            switched = np.minimum(
                work[place][:, None] + after[:, :, 1], loaded.min(axis=1)[:, None]
            )
            pairs[place] = np.minimum(stay, caught_up[place] + switched.T[:, :, None])
            pairs[place, each, each] = np.inf
        return pairs, alone

    def _until_landed(self, caught_up: Seconds) -> tuple[Counts, Seconds]:
        """Return where each draft [n, d, d] is when another has landed that it began to load.

        With the seconds [n, d, d] that this takes, once it has caught up for so many [n, d].
        """
        places, each = np.arange(len(caught_up))[:, None, None], np.arange(caught_up.shape[1])
        points = self._points_to_land(caught_up)
        ends: Counts = self.intervals.ends[points, places, each[:, None]]
        work: Seconds = self.intervals.seconds[points, places, each[:, None]]
        slowed = np.asarray(self._known.load_seconds) * (1.0 - 1.0 / self._slow)
        work = work + np.where(ends < len(caught_up), slowed, 0.0)
        work[:, each, each] = np.inf
        return ends, work

    def _points_to_land(self, caught_up: Seconds) -> Counts:
        """Return after how many intervals of each draft each load has landed [n, d, d].

        At the least; the first of the intervals has the draft catch up for so many seconds [n, d].
        """
        known = self._known
        loads = np.asarray(known.load_seconds) - 2 * SAME_TIME
        interval = self._slow * known.interval * np.asarray(known.iteration_seconds)
        left = loads - self._slow * caught_up[..., None]
        points: Counts = np.ceil(left / interval[:, None]).astype(np.int64).clip(1, LONGEST)
        return points

    def _most_points(self) -> int:
        return int(self._points_to_land(np.zeros((1, self._known.gains.shape[1]))).max())

    def _of_all(self) -> Seconds:
        """Return the least seconds [n + 1] where all drafts are resident and caught up."""
        ends, work = self.intervals.ends[1], self.intervals.seconds[1]
        rest = np.zeros(len(ends))
        for place in range(len(ends) - 2, -1, -1):
            rest[place] = (work[place] + rest[ends[place]]).min()
        return rest


def slowed(work: float, busy: float, slowdown: float) -> float:
    """Return the seconds of work beside loads that take `busy` seconds more."""
    return work * slowdown if work * slowdown <= busy else work + busy * (1.0 - 1.0 / slowdown)
