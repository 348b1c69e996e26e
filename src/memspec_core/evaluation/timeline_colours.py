"""The colours of a timeline's rows, in the picture and on the page."""

from collections.abc import Sequence
from itertools import cycle

from memspec_core.request import LOOKUP, PLAIN

COLOURS = {
    "general": "#0072b2",
    "code": "#d55e00",
    "math": "#e69f00",
    "medical": "#cc79a7",
    "law": "#009e73",
    "robot": "#56b4e9",
    LOOKUP: "#555555",
    PLAIN: "#8a8a8a",
}
"""Okabe and Ito's, which are told apart with any kind of colour vision, and greys."""

_ANOTHER = "#8c6d31"


def colours_of(rows: Sequence[str]) -> dict[str, str]:
    """Return a colour for each row, the same one in each picture for the project's own drafts.

    Others take what is left, and begin anew where there are more of them than colours.
    """
    left = [colour for name, colour in COLOURS.items() if name not in (*rows, LOOKUP, PLAIN)]
    others = (row for row in rows if row not in COLOURS)
    return COLOURS | dict(zip(others, cycle([*left, _ANOTHER]), strict=False))


def paler(colour: str, share: float = 0.68) -> str:
    """Return a colour with a share of white in it."""
    return _mixed(colour, 255, share)


def darker(colour: str, share: float = 0.3) -> str:
    """Return a colour with a share of black in it."""
    return _mixed(colour, 0, share)


def _mixed(colour: str, other: int, share: float) -> str:
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (other - part) * share):02x}" for part in parts)
