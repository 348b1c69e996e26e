"""Time, injected: policies and accounting are tested against a clock that a test moves."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Return seconds since some fixed moment."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return seconds since some fixed moment."""
        return time.perf_counter()
