"""Giving drafts up when the system runs short of memory: by readings made up, and for real."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.test_cache import Room, filled, ranking
from memspec_core.residency.available import GROUPS, rooms_in_groups
from memspec_core.residency.ledger import MIB
from memspec_core.residency.pressure import (
    EASED_SHARE,
    MOST_RECOVERY_SECONDS,
    RECOVERY_SECONDS,
    RELAPSE_SECONDS,
    MemoryPressure,
    MemoryReading,
    PressureLevel,
    PressurePolicy,
    read_memory,
)

FLOOR = 100 * MIB
SHORT = MemoryReading(FLOOR - 1)
BETWEEN = MemoryReading(FLOOR)
ENOUGH = MemoryReading(int(EASED_SHARE * FLOOR))


def levels(*readings: tuple[float, MemoryReading]) -> list[int]:
    policy = PressurePolicy(FLOOR)
    return [int(policy.observe(reading, seconds)) for seconds, reading in readings]


def test_each_reading_below_the_floor_is_one_level() -> None:
    assert levels(*((seconds, SHORT) for seconds in range(6))) == [1, 2, 3, 4, 4, 4]


def test_enough_for_some_time_takes_one_level_back() -> None:
    up = [(0, SHORT), (1, SHORT)]
    assert levels(*up, (2, ENOUGH), (11, ENOUGH), (12, ENOUGH), (21, ENOUGH), (22, ENOUGH)) == [
        *(1, 2),
        *(2, 2, 1, 1, 0),
    ]


def test_between_floor_and_enough_nothing_changes() -> None:
    assert levels((0, SHORT), (1, BETWEEN), (100, BETWEEN)) == [1, 1, 1]
    interrupted = [(2, ENOUGH), (11, BETWEEN), (12, ENOUGH), (21, ENOUGH), (22, ENOUGH)]
    assert levels((0, SHORT), *interrupted) == [1, 1, 1, 1, 1, 0]


def test_tasks_that_wait_for_memory_are_pressure_as_well() -> None:
    plenty = 100 * FLOOR
    stalled, uneasy, eased = (MemoryReading(plenty, percent) for percent in (20.0, 5.0, 4.9))
    assert levels((0, stalled), (1, uneasy), (100, uneasy)) == [1, 1, 1]
    assert levels((0, stalled), (1, eased), (11, eased)) == [1, 1, 0]


def test_without_a_floor_there_is_no_pressure() -> None:
    policy = PressurePolicy(0)
    assert policy.observe(MemoryReading(0, 100.0), 0.0) is PressureLevel.NONE


def seconds_to_recover(policy: PressurePolicy, now: float) -> float:
    """Say how long it must be enough until the level falls."""
    began, level = now, policy.level
    while policy.observe(ENOUGH, now) is level:
        now += 1.0
    return now - began


def test_a_recovery_that_does_not_last_makes_the_next_one_slower() -> None:
    policy, now, waits = PressurePolicy(FLOOR), 0.0, []
    for _ in range(8):
        policy.observe(SHORT, now)
        waits.append(seconds_to_recover(policy, now))
        now += waits[-1] + RELAPSE_SECONDS / 2
    assert waits[:4] == [RECOVERY_SECONDS * 2**times for times in range(4)]
    assert waits[-1] == MOST_RECOVERY_SECONDS
    now += RELAPSE_SECONDS
    policy.observe(SHORT, now)
    assert seconds_to_recover(policy, now) == RECOVERY_SECONDS  # it had lasted


@given(st.lists(st.tuples(st.floats(1, 30), st.sampled_from([SHORT, BETWEEN, ENOUGH]))))
def test_levels_move_one_at_a_time_and_come_back(steps: list[tuple[float, MemoryReading]]) -> None:
    policy, now, before = PressurePolicy(FLOOR), 0.0, PressureLevel.NONE
    for seconds, reading in steps:
        now += seconds
        level = policy.observe(reading, now)
        assert abs(level - before) <= 1
        assert level <= before or reading is SHORT
        assert level >= before or reading is ENOUGH
        assert level is not PressureLevel.NONE or reading is not SHORT
        before = level
    for _ in range(4 + 4):
        now += MOST_RECOVERY_SECONDS
        policy.observe(ENOUGH, now)
    assert policy.level is PressureLevel.NONE


class Pressed:
    """A cache of four drafts, "a" active and "d" pinned, on a system that the test fills."""

    def __init__(self) -> None:
        self.room: Room = filled("abcd", capacity=4)
        self.room.cache.pin("d", pinned=True)
        self.reading = ENOUGH
        self.looks = 0
        self.freed: list[str] = []
        self.pressure = MemoryPressure(
            self.room.cache,
            FLOOR,
            self.room.clock,
            read=self._read,
            release_store=lambda: self.freed.append("store"),
            return_memory=lambda: self.freed.append("memory"),
        )

    def _read(self) -> MemoryReading:
        self.looks += 1
        return self.reading

    def check(self, reading: MemoryReading, times: int = 1, seconds: float = 1.0) -> None:
        self.reading = reading
        for _ in range(times):
            self.room.clock.seconds += seconds
            self.pressure.check()


def test_drafts_go_before_the_store_and_all_of_them_last() -> None:
    pressed = Pressed()
    room = pressed.room
    pressed.check(SHORT)
    assert (room.resident, pressed.freed) == ("ad", ["memory"])
    pressed.check(SHORT)
    assert (room.resident, pressed.freed) == ("a", ["memory"] * 2)
    pressed.check(SHORT)
    assert (room.resident, pressed.freed) == ("a", ["memory"] * 2 + ["store", "memory"])
    pressed.check(SHORT)
    assert room.cache.best_resident(ranking("abcd")) is None
    room.cache.update(ranking("abcd"), None)
    assert room.resident + room.loading == ""
    pressed.check(SHORT, times=3)
    assert len(pressed.freed) == 5


def test_all_drafts_come_back() -> None:
    pressed = Pressed()
    pressed.check(SHORT, times=4)
    pressed.check(ENOUGH, times=5, seconds=RECOVERY_SECONDS)
    assert pressed.pressure.level is PressureLevel.NONE
    pressed.room.cache.update(ranking("abcd"), None)
    pressed.room.loader.land()
    pressed.room.cache.collect()
    assert pressed.room.resident == "abcd"
    assert pressed.freed.count("store") == 1


def test_the_system_is_asked_once_a_second_at_the_most() -> None:
    pressed = Pressed()
    pressed.check(ENOUGH, times=30, seconds=0.25)
    assert pressed.looks == 8
    assert pressed.room.resident == "abcd"


def test_the_snapshot_says_what_was_given_up() -> None:
    pressed = Pressed()
    memory = pressed.room.ledger.snapshot()
    assert pressed.pressure.describe(memory) == memory
    pressed.check(MemoryReading(50 * MIB, 30.0), times=4)
    shown = pressed.pressure.describe(memory)
    assert shown.pressure_level == PressureLevel.PLAIN
    for part in ("50 MiB", "100 MiB", "memory.floor_mib", "30 %", "plain"):
        assert part in shown.pressure
    assert shown.used_bytes == memory.used_bytes


HOG = f"input(); held = b'x' * {96 * MIB}; print('held', flush=True); input()"


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a control group with a limit of 128 MiB, where that is allowed."""
    for mount, limit in ((GROUPS / "memory", "memory.limit_in_bytes"), (GROUPS, "memory.max")):
        folder = mount / f"memspec_test_{os.getpid()}"
        if not (mount / "cgroup.procs").exists():
            continue
        try:
            folder.mkdir()
            (folder / limit).write_text(str(128 * MIB))
        except OSError:
            if folder.exists():
                folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_a_hungry_process_takes_drafts_and_its_end_gives_them_back(
    group: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.write_text(f"1:memory:/{group.name}\n0::/{group.name}\n")
    room = filled("abcd", capacity=4)
    room.cache.update(ranking("abcd"), "a")

    def read() -> MemoryReading:
        return MemoryReading(min(rooms_in_groups(own)))

    pressure = MemoryPressure(room.cache, 64 * MIB, room.clock, read=read)
    pressure.check()
    assert pressure.level is PressureLevel.NONE
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOG]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as hog:
        assert hog.stdin is not None
        assert hog.stdout is not None
        (group / "cgroup.procs").write_text(str(hog.pid))
        hog.stdin.write(b"\n")
        hog.stdin.flush()
        assert hog.stdout.readline() == b"held\n"
        room.clock.seconds += 1.0
        pressure.check()
        hog.kill()
    assert pressure.level is PressureLevel.SHED
    assert room.resident == "a"
    for _ in range(2):
        room.clock.seconds += RECOVERY_SECONDS
        pressure.check()
    assert pressure.level is PressureLevel.NONE
    room.cache.update(ranking("abcd"), "a")
    assert room.loading == "bcd"


def test_the_systems_own_reading() -> None:
    reading = read_memory()
    assert reading.available_bytes > 0
    assert 0.0 <= reading.stalled_percent <= 100.0


@pytest.mark.parametrize("content", ["", "full avg10=x", "some"])
def test_a_system_without_stall_figures(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory"
    file.write_text(content)
    monkeypatch.setattr("memspec_core.residency.pressure._PSI", file)
    assert read_memory().stalled_percent == 0.0
