"""Scheduling points of traced answers: what each draft would gain next, and following a ranking.

As in `acceptance`, everything is exact for greedy decoding with chains of a fixed length. All
drafts count as resident: this judges rankings, not what memory allows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from memspec_core.errors import TraceError
from memspec_core.evaluation.acceptance import after_interval, all_gains
from memspec_core.measurement.trace import TracedPrompt

Scores = npt.NDArray[np.float64]
"""One number a draft [d], the higher the better."""

Mask = npt.NDArray[np.bool_]
"""Which drafts are meant [d]."""


@dataclass(frozen=True)
class Schedule:
    """Which drafts are ranked (columns of a trace), and how often.

    `length`: proposals an iteration; `interval`: iterations between scheduling points.
    """

    drafts: tuple[str, ...]
    columns: tuple[int, ...]
    length: int
    interval: int

    def gains(self, prompt: TracedPrompt) -> npt.NDArray[np.int64]:
        """Return the tokens that an iteration gains at each place with each draft [n, d]."""
        return all_gains(prompt, self.columns, self.length)


class Ranker(Protocol):
    """Scores drafts within one answer."""

    def scores(self, place: int) -> Scores:
        """Score every draft at a scheduling point."""
        ...

    def observe(self, draft: int, proposed: int, accepted: int) -> None:
        """See an iteration of a draft."""
        ...


@dataclass(frozen=True)
class Point:
    """A scheduling point: a place, where the next one is, and each draft's utility between.

    `utility` [d]: tokens an iteration over the coming interval; at the answer's end, over what is
    left of both.
    """

    place: int
    next_place: int
    utility: Scores

    @property
    def best(self) -> Mask:
        """The drafts of highest utility; several where they are tied."""
        return _best(self.utility)


@dataclass(frozen=True)
class Hits:
    """Whether, at a scheduling point, the first or one of the first two drafts was right.

    `first` and `among_two`: among those of highest utility, of which there are several if `tied`;
    `domain_first` and `domain_among_two`: of the prompt's domain.
    """

    tied: bool
    first: bool
    among_two: bool
    domain_first: bool
    domain_among_two: bool


@dataclass(frozen=True)
class Followed:
    """One answer generated with the first draft of a ranking at each scheduling point."""

    tokens: int
    iterations: int
    points: tuple[Hits, ...]


def utility(gained: npt.NDArray[np.int64], place: int, interval: int) -> Scores:
    """Return the tokens an iteration of each draft over the interval that begins at a place."""
    found = (after_interval(gained[:, draft], place, interval) for draft in range(gained.shape[1]))
    return np.array([(end - place) / spent for end, spent in found])


def points(prompt: TracedPrompt, schedule: Schedule) -> Iterator[Point]:
    """Yield the scheduling points of an answer that follows the best draft of each interval.

    Where several are best, the first of them.
    """
    gained = schedule.gains(prompt)
    place = 0
    while place < len(gained):
        found = utility(gained, place, schedule.interval)
        end, _ = after_interval(gained[:, int(found.argmax())], place, schedule.interval)
        yield Point(place, end, found)
        place = end


def follow(prompt: TracedPrompt, schedule: Schedule, ranker: Ranker) -> Followed:
    """Generate an answer with what a ranker puts first, judging it at each scheduling point."""
    gained = schedule.gains(prompt)
    domain = domain_mask(prompt.domain, schedule.drafts)
    place, iterations = 0, 0
    judged: list[Hits] = []
    while place < len(gained):
        order = np.argsort(-ranker.scores(place), kind="stable")
        judged.append(_hits(order, _best(utility(gained, place, schedule.interval)), domain))
        chosen = int(order[0])
        for _ in range(schedule.interval):
            if place < len(gained):
                gain = int(gained[place, chosen])
                ranker.observe(chosen, schedule.length, gain - 1)
                place += gain
                iterations += 1
    return Followed(len(gained), iterations, tuple(judged))


def tied_points(prompts: Sequence[TracedPrompt], schedule: Schedule) -> tuple[int, int, float]:
    """Return the points of the best walk, how many have several best, and best drafts a point."""
    counts = [int(point.best.sum()) for prompt in prompts for point in points(prompt, schedule)]
    return len(counts), sum(count > 1 for count in counts), float(np.mean(counts))


def domain_mask(domain: str, drafts: Sequence[str]) -> Mask:
    """Return the drafts that a domain names, parts of it separated by "/" or "+".

    So "code/train" means the draft code, and "code+math" both. Raises `TraceError` if there is
    no such draft.
    """
    parts = domain.replace("+", "/").split("/")
    mask = np.array([draft in parts for draft in drafts])
    if not mask.any():
        raise TraceError(
            f"No draft bears the name of the domain '{domain}' (drafts: {', '.join(drafts)}); name "
            "the prompt files, or the folders that tell them apart, after drafts."
        )
    return mask


class FixedRanker:
    """Scores that do not change."""

    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def scores(self, place: int) -> Scores:
        """Return them."""
        return self._scores

    def observe(self, draft: int, proposed: int, accepted: int) -> None:
        """Learn nothing."""


class ChanceRanker:
    """Any draft at any scheduling point."""

    def __init__(self, drafts: int, random: np.random.Generator) -> None:
        self._drafts = drafts
        self._random = random

    def scores(self, place: int) -> Scores:
        """Return random numbers."""
        return self._random.random(self._drafts)

    def observe(self, draft: int, proposed: int, accepted: int) -> None:
        """Learn nothing."""


RankerFor = Callable[[TracedPrompt], Ranker]
"""Makes the ranker of an answer."""


def _hits(order: npt.NDArray[np.int64], best: Mask, domain: Mask) -> Hits:
    return Hits(
        tied=bool(best.sum() > 1),
        first=bool(best[order[0]]),
        among_two=bool(best[order[:2]].any()),
        domain_first=bool(domain[order[0]]),
        domain_among_two=bool(domain[order[:2]].any()),
    )


def _best(utilities: Scores) -> Mask:
    best: Mask = utilities == utilities.max()
    return best
