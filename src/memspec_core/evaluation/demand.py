"""What a robot's record of decisions says: which drafts were wanted, and how often that changed.

It holds no draft's acceptance, and nothing of drafts that did not run: so it tells how many drafts
are wanted in turn, and which never, but not what any of them gains, nor which N and draft length
would be best. For that, trace the robot's prompts (`memspec trace`).
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from memspec_core.errors import RecordError

_LOG = logging.getLogger(__name__)

HELD_ENOUGH = 0.95
"""Of the scheduling points, those at which the wanted draft is to be among the K best before."""

SELDOM = 0.01
"""A draft that is wanted at a smaller share of the points is not worth its bytes."""

_FIELDS = {"place", "scores", "wanted", "active"}


@dataclass(frozen=True)
class Demand:
    """What drafts were wanted.

    `wanted`: the share of scheduling points at which a draft ranked first, by draft, the most
    wanted first. `changes`: the share at which another one did than at the point before, in the
    same answer; `held`: by K, at which the first one was among the K best of the point before, and
    so could be resident. `tokens_between`: from one point to the next. `fallback`: the share of
    points at which another draft ran than was wanted.
    """

    answers: int
    points: int
    wanted: Mapping[str, float]
    changes: float
    held: Mapping[int, float]
    tokens_between: float
    fallback: float

    @property
    def capacity(self) -> int:
        """The smallest K that holds what is wanted next at nearly all points."""
        enough = (k for k, share in self.held.items() if share >= HELD_ENOUGH)
        return min(next(enough, len(self.held)), max(1, len(self.worthwhile)))

    @property
    def worthwhile(self) -> tuple[str, ...]:
        """The drafts that were wanted now and then."""
        return tuple(name for name, share in self.wanted.items() if share >= SELDOM)


@dataclass(frozen=True)
class _Point:
    place: int
    order: tuple[str, ...]
    fallback: bool


def read_demand(path: Path) -> Demand:
    """Read what `decisions.path` or `record.path` recorded.

    A last line that was cut off is left out, with a warning. Raises `RecordError` if there is no
    record, or for another line that is none.
    """
    points = list(_points(path))
    if not points:
        raise RecordError(f"The record {path} holds no decision that ranked a draft.")
    pairs = [pair for pair in pairwise(points) if _follows(*pair)]
    firsts = Counter(point.order[0] for point in points)
    most = max(len(point.order) for point in points)
    return Demand(
        answers=len(points) - len(pairs),
        points=len(points),
        wanted={name: count / len(points) for name, count in firsts.most_common()},
        changes=_share([one.order[0] != other.order[0] for one, other in pairs]),
        held={
            capacity: _share([other.order[0] in one.order[:capacity] for one, other in pairs])
            for capacity in range(1, most + 1)
        },
        tokens_between=sum(b.place - a.place for a, b in pairs) / max(1, len(pairs)),
        fallback=_share([point.fallback for point in points]),
    )


def _points(path: Path) -> Iterator[_Point]:
    """Yield the decisions that ranked drafts."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(f"Cannot read the record {path}: {error}.") from error
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
        except ValueError as error:
            if number == len(lines) > 1:
                _LOG.warning("The last line of %s was cut off and is left out.", path)
                return
            raise _no_decision(path, number, "it is no JSON") from error
        if not isinstance(fields, dict):
            raise _no_decision(path, number, "it is no object")
        if fields.get("line", "decision") != "decision":
            continue  # a record of generations has other lines as well
        point = _point(fields, path, number)
        if point.order:
            yield point


def _point(fields: Mapping[str, Any], path: Path, number: int) -> _Point:
    missing = _FIELDS - set(fields)
    if missing:
        raise _no_decision(path, number, f"{min(missing)} is missing")
    place, scores = fields["place"], fields["scores"]
    numeric = isinstance(scores, dict) and all(
        isinstance(score, int | float) for score in scores.values()
    )
    if not isinstance(place, int) or not numeric:
        raise _no_decision(path, number, "its place or its scores are no numbers")
    order = tuple(sorted(scores, key=lambda name: -scores[name]))
    return _Point(place, order, fields["wanted"] != fields["active"])


def _follows(one: _Point, other: _Point) -> bool:
    """Whether a point is of the same answer as the one before."""
    return other.place > one.place


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else 0.0


def _no_decision(path: Path, number: int, why: str) -> RecordError:
    return RecordError(f"Line {number} of {path} is no decision: {why}.")
