"""The colours of a timeline's rows, in the picture and on the page."""

from collections.abc import Sequence
from itertools import cycle

from memspec_core.request import LOOKUP, PLAIN

DRAFT_COLOURS = ("#0072b2", "#d55e00", "#e69f00", "#cc79a7", "#009e73", "#56b4e9", "#8c6d31")
"""Okabe and Ito's, which are told apart with any kind of colour vision, and a brown."""

OTHER_COLOURS = {LOOKUP: "#555555", PLAIN: "#8a8a8a"}


def colours_of(rows: Sequence[str]) -> dict[str, str]:
    """Return a colour for each row; they begin anew where there are more drafts than colours."""
    drafts = (row for row in rows if row not in OTHER_COLOURS)
    return dict(zip(drafts, cycle(DRAFT_COLOURS), strict=False)) | OTHER_COLOURS


def paler(colour: str, share: float = 0.68) -> str:
    """Return a colour with a share of white in it."""
    return _mixed(colour, 255, share)


def darker(colour: str, share: float = 0.3) -> str:
    """Return a colour with a share of black in it."""
    return _mixed(colour, 0, share)


def _mixed(colour: str, other: int, share: float) -> str:
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (other - part) * share):02x}" for part in parts)
