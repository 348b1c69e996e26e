"""Whether curves have the paper's shapes, by a rule of one threshold each.

The paper's figures 10 to 12 are told in words; a curve has the shape if it does what they say.
"""

from collections.abc import Sequence
from itertools import pairwise

STEP = 0.01
"""A change of throughput that is smaller is none."""

NEARLY_FLAT = 0.03
"""The most that is nearly flat: what the paper's MemSpec changes by from K = 2 to 4."""

RISES, FLAT, FALLS = "rises", "flat", "falls"

INTERVAL_SHAPE = (RISES, FLAT, FALLS)
"""Figure 10, from N = 2 to 4, 8 and 16."""


def step(before: float, after: float, threshold: float = STEP) -> str:
    """Say what a curve does from one point to the next."""
    change = after / before - 1.0
    if abs(change) <= threshold:
        return FLAT
    return RISES if change > 0 else FALLS


def steps(values: Sequence[float]) -> tuple[str, ...]:
    """Say what a curve does from each point to the next."""
    return tuple(step(before, after) for before, after in pairwise(values))


def grows(values: Sequence[float]) -> bool:
    """Tell whether a curve never falls and ends higher (Figure 11)."""
    return FALLS not in steps(values) and step(values[0], values[-1]) == RISES


def over_all(values: Sequence[float]) -> str:
    """Say what a curve does from its first to its last point (Figure 12)."""
    return step(values[0], values[-1], NEARLY_FLAT)
