"""What the rest of the robot leaves us: giving drafts up, step by step, when memory runs short."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from memspec_core.clock import Clock
from memspec_core.residency.available import available_bytes
from memspec_core.residency.cache import DraftCache
from memspec_core.settings import MIB
from memspec_core.snapshot import MemorySnapshot

CHECK_SECONDS = 1.0
"""Memory is looked at once in so many seconds at the most; each look moves by one level."""

STALLED_PERCENT = 20.0
"""Memory is short where tasks waited for it so much of the last ten seconds (PSI "some")."""

EASED_PERCENT = 5.0
EASED_SHARE = 1.25
"""It is enough again where tasks wait less than that, and so many floors are available."""

RECOVERY_SECONDS = 10.0
"""So long it has to be enough before one level is taken back."""

RELAPSE_SECONDS = 60.0
"""Where it runs short again within that time of a step back, the next one waits twice as long."""

MOST_RECOVERY_SECONDS = 320.0

_PSI = Path("/proc/pressure/memory")


class PressureLevel(IntEnum):
    """What has been given up; each level includes those before it."""

    NONE = 0
    SHED = 1
    """Drafts that are neither active nor pinned, and loads ahead."""

    ONE = 2
    """Pinned drafts: one draft at the most stays (K is 1)."""

    STORE = 3
    """What is kept for later goals."""

    PLAIN = 4
    """All drafts: the target decodes alone."""


_GIVEN_UP = {
    PressureLevel.SHED: "only the active draft and pinned ones stay",
    PressureLevel.ONE: "one draft stays at the most",
    PressureLevel.STORE: "one draft stays at the most, and nothing is kept for later goals",
    PressureLevel.PLAIN: "decoding is plain, without any draft",
}


@dataclass(frozen=True)
class MemoryReading:
    """What the system has: bytes available, and the percent of time that tasks waited for some."""

    available_bytes: int
    stalled_percent: float = 0.0


def read_memory() -> MemoryReading:
    """Read what is available, and PSI where the system has it."""
    return MemoryReading(available_bytes(), _stalled_percent())


def _stalled_percent() -> float:
    try:
        some = _PSI.read_text(encoding="ascii").split(maxsplit=2)
        return float(some[1].removeprefix("avg10="))
    except (OSError, ValueError, IndexError):  # old kernels, and those that have it switched off
        return 0.0


class PressurePolicy:
    """Chooses the level from readings; knows neither drafts nor the system.

    It rises by one level at each reading below the floor, so that what a level gives back shows
    before the next, and falls by one after `RECOVERY_SECONDS` of enough. What is given back may be
    taken again at once, so that a fall that does not last doubles that time, up to
    `MOST_RECOVERY_SECONDS`. Without a floor there is no pressure.
    """

    def __init__(self, floor_bytes: int) -> None:
        self._floor_bytes = floor_bytes
        self._enough_since: float | None = None
        self._fell_at = float("-inf")
        self._recovery_seconds = RECOVERY_SECONDS
        self.level = PressureLevel.NONE

    def observe(self, reading: MemoryReading, now: float) -> PressureLevel:
        """Take one reading at a time in seconds; return the level from now on."""
        if self._is_short(reading):
            self._enough_since = None
            self._rise(now)
        elif not self._is_enough(reading):
            self._enough_since = None
        elif self.level:
            self._enough_since = now if self._enough_since is None else self._enough_since
            if now - self._enough_since >= self._recovery_seconds:
                self._fall(now)
        return self.level

    def _is_short(self, reading: MemoryReading) -> bool:
        is_stalled = reading.stalled_percent >= STALLED_PERCENT
        return self._floor_bytes > 0 and (reading.available_bytes < self._floor_bytes or is_stalled)

    def _is_enough(self, reading: MemoryReading) -> bool:
        return (
            reading.available_bytes >= EASED_SHARE * self._floor_bytes
            and reading.stalled_percent < EASED_PERCENT
        )

    def _rise(self, now: float) -> None:
        if now - self._fell_at < RELAPSE_SECONDS:
            self._recovery_seconds = min(2 * self._recovery_seconds, MOST_RECOVERY_SECONDS)
            self._fell_at = float("-inf")  # counted once
        elif self.level is PressureLevel.NONE:
            self._recovery_seconds = RECOVERY_SECONDS
        self.level = PressureLevel(min(self.level + 1, PressureLevel.PLAIN))

    def _fall(self, now: float) -> None:
        self.level = PressureLevel(self.level - 1)
        self._fell_at = now
        self._enough_since = now


class MemoryPressure:
    """Watches the system's memory and has the cache give drafts up.

    `check` is for the thread that owns the cache; any thread may ask for a description.
    `release_store` frees what is kept for later goals, `return_memory` gives freed memory back to
    the system.
    """

    def __init__(
        self,
        cache: DraftCache,
        floor_bytes: int,
        clock: Clock,
        *,
        read: Callable[[], MemoryReading] = read_memory,
        release_store: Callable[[], None] = lambda: None,
        return_memory: Callable[[], None] = lambda: None,
    ) -> None:
        self._cache = cache
        self._floor_bytes = floor_bytes
        self._clock = clock
        self._read = read
        self._release_store = release_store
        self._return_memory = return_memory
        self._policy = PressurePolicy(floor_bytes)
        self._checked_at = float("-inf")
        self._shown = (PressureLevel.NONE, "")

    @property
    def level(self) -> PressureLevel:
        """What has been given up."""
        return self._shown[0]

    def check(self) -> None:
        """Look at the memory, unless that was done within the last second, and act."""
        now = self._clock.now()
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        before, reading = self._policy.level, self._read()
        level = self._policy.observe(reading, now)
        if level is not before:
            self._apply(level, rises=level > before)
        self._shown = (level, self._sentence(level, reading))

    def describe(self, memory: MemorySnapshot) -> MemorySnapshot:
        """Return a picture of the memory with the level and its sentence in it."""
        level, sentence = self._shown
        return replace(memory, pressure_level=int(level), pressure=sentence)

    def _apply(self, level: PressureLevel, *, rises: bool) -> None:
        most = {PressureLevel.NONE: None, PressureLevel.PLAIN: 0}.get(level, 1)
        self._cache.limit(most, pins_stay=level <= PressureLevel.SHED)
        if rises:
            if level is PressureLevel.STORE:
                self._release_store()
            self._return_memory()

    def _sentence(self, level: PressureLevel, reading: MemoryReading) -> str:
        if level is PressureLevel.NONE:
            return ""
        waits = f", and tasks wait for it {reading.stalled_percent:.0f} % of the time"
        return (
            f"Memory is short: {reading.available_bytes / MIB:.0f} MiB are available, the floor "
            f"(memory.floor_mib) is {self._floor_bytes / MIB:.0f} MiB"
            f"{waits if reading.stalled_percent >= EASED_PERCENT else ''}; {_GIVEN_UP[level]}."
        )
