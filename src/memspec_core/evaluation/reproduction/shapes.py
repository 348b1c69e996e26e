"""Whether curves have the paper's shapes, by a small rule.

The paper tells its figures 10 to 12 in words; a curve has the shape if it does what they say. From
one point to another it rises or falls if its change is larger than a threshold and the interval of
the change, over the same prompts, leaves out none; else it is flat.
"""

from collections.abc import Sequence

from memspec_core.evaluation.reproduction.estimates import Estimate

STEP = 0.01
"""A change of throughput that is smaller is none."""

NEARLY_FLAT = 0.03
"""The most that is nearly flat: what the paper's MemSpec changes by from K = 2 to 4."""

RISES, FLAT, FALLS = "rises", "flat", "falls"

INTERVAL_SHAPE = (RISES, FLAT, FALLS)
"""Figure 10, from N = 2 to 4, 8 and 16."""


def step(change: Estimate, threshold: float = STEP) -> str:
    """Say what a curve does, given its later value over its earlier one."""
    if abs(change.mean - 1.0) <= threshold or change.low <= 1.0 <= change.high:
        return FLAT
    return RISES if change.mean > 1.0 else FALLS


def steps(changes: Sequence[Estimate]) -> tuple[str, ...]:
    """Say what a curve does from each point to the next."""
    return tuple(step(change) for change in changes)


def grows(changes: Sequence[Estimate], over_all: Estimate) -> bool:
    """Tell whether a curve never falls and ends higher (Figure 11)."""
    return FALLS not in steps(changes) and step(over_all) == RISES
