"""What memory is available within the limits of control groups."""

from pathlib import Path

import psutil
import pytest

from memspec_core.residency.available import available_bytes, rooms_in_groups


def group(folder: Path, **files: object) -> None:
    """Make a group's files; double underscores stand for dots."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own"


def test_each_limited_group_around_the_process_counts(own: Path, tmp_path: Path) -> None:
    own.write_text("0::/robot/brain\n")
    stat = "anon 5\ninactive_file 30"
    group(tmp_path / "robot", memory__max=1000, memory__current=400, memory__stat=stat)
    group(tmp_path / "robot/brain", memory__max=500, memory__current=450, memory__stat=stat)
    group(tmp_path / "other", memory__max=1, memory__current=1, memory__stat=stat)
    assert list(rooms_in_groups(own, tmp_path)) == [80, 630]


def test_groups_without_a_limit_do_not_count(own: Path, tmp_path: Path) -> None:
    own.write_text("0::/robot\n")
    group(tmp_path / "robot", memory__max="max", memory__current=400, memory__stat="")
    assert list(rooms_in_groups(own, tmp_path)) == []


def test_a_container_sees_its_own_group_as_the_root(own: Path, tmp_path: Path) -> None:
    own.write_text("4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n")
    group(
        tmp_path / "memory",
        memory__limit_in_bytes=100,
        memory__usage_in_bytes=90,
        memory__stat="inactive_file 1\ntotal_inactive_file 20",
    )
    assert list(rooms_in_groups(own, tmp_path)) == [30]


def test_what_is_used_beyond_the_limit_leaves_nothing(own: Path, tmp_path: Path) -> None:
    own.write_text("0::/\n")
    group(tmp_path, memory__max=100, memory__current=120, memory__stat="inactive_file 0")
    assert list(rooms_in_groups(own, tmp_path)) == [0]


def test_a_system_without_groups(own: Path, tmp_path: Path) -> None:
    assert list(rooms_in_groups(own, tmp_path)) == []


def test_no_more_is_available_than_the_system_has() -> None:
    assert 0 <= available_bytes() <= psutil.virtual_memory().total
