"""How fast a draft may be read while decoding goes on."""

import time
from collections.abc import Callable

from memspec_core.clock import Clock
from memspec_core.errors import MemSpecError

MOST_SLOWDOWN = 0.15
"""By this share a load may slow decoding."""

CROSSINGS = 3.0
"""How often a loaded byte crosses memory: it is read, copied and checked."""


class LoadAbandonedError(MemSpecError):
    """Nobody waits for a load any more."""


def load_rate(read_bytes_per_second: float, slowdown: float = MOST_SLOWDOWN) -> float:
    """Return the bytes a second at which a load slows decoding by a share, at the most.

    Decoding is bound by the memory's rate B: a load of r bytes a second, each crossing memory m
    times, slows it to 1 - m · r / B. Returns infinity where B is not known (0).
    """
    if read_bytes_per_second <= 0.0:
        return float("inf")
    return slowdown * read_bytes_per_second / CROSSINGS


class LoadPace:
    """Holds one load back to a rate in bytes a second, and ends it when it is given up.

    `is_abandoned` is asked after each piece. Time that the load takes by itself counts.
    """

    def __init__(
        self,
        bytes_per_second: float,
        is_abandoned: Callable[[], bool],
        clock: Clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._is_abandoned = is_abandoned
        self._clock = clock
        self._sleep = sleep
        self._started = clock.now()
        self._bytes = 0

    def __call__(self, count: int) -> None:
        """Wait until `count` more bytes are due; raises `LoadAbandonedError`."""
        self._bytes += count
        ahead = self._bytes / self._bytes_per_second - (self._clock.now() - self._started)
        if ahead > 0.0:
            self._sleep(ahead)
        if self._is_abandoned():
            raise LoadAbandonedError("The load was given up.")
