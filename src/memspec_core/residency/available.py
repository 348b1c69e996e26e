"""What memory there is: the system's, and what the limits of a container leave of it."""

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")

_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
"""Where a control group has its limit and its use, and what `memory.stat` calls the part of that
which the system takes back when it needs it."""


def available_bytes() -> int:
    """Return the available memory, page cache counted as free.

    The system's MemAvailable, or what a limit of a control group around this process leaves, as
    those of containers: whichever is less.
    """
    return min(int(psutil.virtual_memory().available), *rooms_in_groups())


def rooms_in_groups(own: Path = OWN_GROUPS, groups: Path = GROUPS) -> Iterator[int]:
    """Return what each limited control group around this process has left, in bytes.

    `own`: the file that names this process's groups; `groups`: where they are mounted. A container
    that sees its own group as the root has it right there, whatever `own` calls it.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux, or none with control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names, mount = _VERSION_2, groups
        elif "memory" in controllers.split(","):
            names, mount = _VERSION_1, groups / "memory"
        else:
            continue
        place = mount / path.lstrip("/")
        for folder in (place, *place.parents):
            room = _room(folder, *names)
            if room is not None:
                yield room
            if folder == mount:
                break


def _room(folder: Path, limit: str, use: str, reclaimable: str) -> int | None:
    """Return what is left in one group, None where it has no limit."""
    try:
        most = int((folder / limit).read_text())
        used = int((folder / use).read_text())
        stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
        return max(0, most - used + int(stat.get(reclaimable, 0)))
    except (OSError, ValueError):  # "max", or a group that is not visible from here
        return None
