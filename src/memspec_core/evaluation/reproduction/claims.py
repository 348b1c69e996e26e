"""What the paper reports, in the terms of the figures here."""

import math
from dataclasses import dataclass

_ROUNDING = 0.001


@dataclass(frozen=True)
class Claim:
    """A figure of the paper: one number, or what it lies between."""

    low: float
    high: float

    def verdict(self, low: float, high: float) -> str:
        """Say how an interval lies to the claim, which is rounded."""
        if low > self.high * (1.0 + _ROUNDING):
            return "above"
        return "below" if high < self.low * (1.0 - _ROUNDING) else "agrees"

    @property
    def mark(self) -> float:
        """Where a figure marks it."""
        return self.low if math.isinf(self.high) else self.high


def exactly(value: float) -> Claim:
    """Claim one number."""
    return Claim(value, value)


def at_most(value: float) -> Claim:
    """Claim a bound."""
    return Claim(-math.inf, value)


STATIC_ACCEPTANCE = exactly(1.403)
DYNAMIC_OVER_STATIC_ACCEPTANCE = exactly(1.257)
DYNAMIC_ACCEPTANCE = exactly(1.403 * 1.257)
LOAD_IN_ITERATIONS = exactly(2.7)
MAB_SYNC_ACCEPTANCE = exactly(1.345)
MAB_ASYNC_FALLBACK_FIGURE_4 = exactly(0.464)
STATIC_THROUGHPUT = exactly(1.225)
DYNAMIC_OVER_STATIC_THROUGHPUT = exactly(1.249)
DYNAMIC_THROUGHPUT = exactly(1.225 * 1.249)
MEMSPEC_THROUGHPUT = exactly(1.588)
MAB_ASYNC_THROUGHPUT = exactly(1.588 / 1.407)
MEMSPEC_OVER_MAB_ASYNC = exactly(1.407)
MEMSPEC_OVER_ORACLE_DYNAMIC = Claim(0.95, 0.97)
MAB_ASYNC_FALLBACK = exactly(0.494)
MEMSPEC_FALLBACK = at_most(0.055)
PREDICTION = at_most(0.039)
PREDICTION_ONLY_THROUGHPUT = exactly(1.216)
PREDICTION_ONLY_FALLBACK = exactly(0.213)
MEMSPEC_FALLBACK_FIGURE_9 = at_most(0.053)
MEMSPEC_OVER_PREDICTION_ONLY = exactly(1.305)
CAPACITIES = {
    ("mab_async", 2): exactly(1.13),
    ("mab_async", 4): exactly(1.29),
    ("memspec", 2): exactly(1.47),
    ("memspec", 4): exactly(1.51),
}
"""Figure 12, by strategy and K."""

RECALL = {
    "prompt": (exactly(0.319), exactly(0.558)),
    "recent": (exactly(0.571), exactly(0.793)),
    "both": (exactly(0.716), exactly(0.957)),
}
"""Table 2: top-1 and top-2, by what the predictor reads."""

LATENCY_OVER_GENERAL_STATIC = exactly(1 - 0.323)
LATENCY_OVER_MAB_ASYNC = exactly(1 - 0.249)
