"""The node with faults that a test turns on: each by a file of its name in the working folder."""

import builtins
import errno
import time
from pathlib import Path

from memspec_ros.process import main, return_freed_memory

SLOW = Path("slow")
"""Holds the seconds that each iteration takes longer."""

FAIL = Path("fail")
"""Holds the name of the exception that the next iteration raises, once."""

FAIL_LOAD = Path("fail_load")
"""Holds the name of the exception that the next load of a target raises, once."""

SLOW_LOAD = Path("slow_load")
"""No target is loaded while it is there."""

DEAD_WORKER = Path("dead_worker")
"""What the worker does between goals raises."""

HANGING_DISC = Path("hanging_disc")
"""No read of a draft comes back."""

READ_ERRORS = Path("read_errors")
"""Each read of a draft fails."""


def fail_once(fault):
    if fault.exists():
        name = fault.read_text()
        fault.unlink()
        raise getattr(builtins, name)("an injected fault")


def before(method, *faults):
    def call(*arguments, **more):
        for fault in faults:
            fault()
        return method(*arguments, **more)

    return call


def slow():
    if SLOW.exists():
        time.sleep(float(SLOW.read_text() or 0))


def held_by(fault, told):
    if fault.exists():
        print(told, flush=True)
    while fault.exists():
        time.sleep(0.01)


def read_errors():
    if READ_ERRORS.exists():
        raise OSError(errno.EIO, "Input/output error")


def dead_worker():
    if DEAD_WORKER.exists():
        raise RuntimeError("an injected fault")


def bring_in_faults():
    from memspec_core.models import pieces
    from memspec_core.models.target import TargetPlan
    from memspec_core.residency.pressure import MemoryPressure
    from memspec_core.speculation.decoding import Decoding

    Decoding.iterate = before(Decoding.iterate, slow, lambda: fail_once(FAIL))
    TargetPlan.load = before(
        TargetPlan.load, lambda: fail_once(FAIL_LOAD), lambda: held_by(SLOW_LOAD, "A load waits")
    )
    MemoryPressure.check = before(MemoryPressure.check, dead_worker)
    pieces._read = before(pieces._read, lambda: held_by(HANGING_DISC, "A read hangs"), read_errors)


if __name__ == "__main__":
    return_freed_memory()  # before torch is imported, as without faults
    bring_in_faults()
    raise SystemExit(main())
