"""The life of the node's process: signals, executor, and an end that loses nothing.

The signal handlers are set before ROS and torch are imported, so that a signal at any moment ends
the process with code 0. rclpy's own handlers would cut the communication in the middle of a goal.
Nothing that cannot be interrupted holds the end up: an import, a load from a disc that hangs.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rclpy.executors import MultiThreadedExecutor

    from memspec_ros.node import MemSpecNode

EXECUTOR_THREADS = 96
"""A goal that runs or waits holds a thread, and there are at most 65; threads start as needed."""

M_ARENA_MAX = -8
"""From glibc's malloc.h."""

FLUSH_SECONDS = 0.3
"""For the executor and the middleware to hand the last results over before their end."""

ORDERLY_SECONDS = 1.0
"""For an orderly end. After that only goals that still end are waited for."""

LAST_RESULTS_SECONDS = 10.0
"""How long goals that were ended may take to tell their clients: a large target may be in the midst
of a pass."""


def main(arguments: list[str] | None = None) -> int:
    """Run the node until SIGINT or SIGTERM, and end the process with code 0.

    Returns only where it cannot start: the exit code.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    return_freed_memory()
    owed: list[MemSpecNode] = []
    threading.Thread(target=_end_in_time, args=(stop, owed), name="end", daemon=True).start()
    import rclpy
    from rclpy.signals import SignalHandlerOptions

    try:
        rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    except Exception as error:
        print(f"memspec_node: {error}", file=sys.stderr)
        return 2
    try:
        if not stop.is_set():
            _serve(stop, owed)
    finally:
        rclpy.try_shutdown()
    return _leave()


def _end_in_time(stop: threading.Event, owed: "list[MemSpecNode]") -> None:
    """End the process a moment after the signal, in case its orderly end takes longer.

    `owed`: the node whose clients are to have their results before, once there is one.
    """
    stop.wait()
    time.sleep(ORDERLY_SECONDS)
    for node in owed:
        node.has_told_all(LAST_RESULTS_SECONDS)
        time.sleep(FLUSH_SECONDS)
    _leave()


def _leave() -> NoReturn:
    """End the process as it is: to free models and libraries one by one takes Python a second."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def return_freed_memory() -> None:
    """Have glibc serve all threads from one arena.

    Loading in another thread each time leaves a hole in another arena, and after a few rounds of
    cleanup and configure the process holds hundreds of megabytes that nobody uses. To be called
    before the first thread begins, for which there would be another arena.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


def _serve(stop: threading.Event, owed: "list[MemSpecNode]") -> None:
    from rclpy.executors import MultiThreadedExecutor

    from memspec_ros.node import MemSpecNode

    node = MemSpecNode()
    owed.append(node)
    executor = MultiThreadedExecutor(num_threads=EXECUTOR_THREADS)
    executor.add_node(node)
    spinning = threading.Thread(target=_spin, args=(executor, node, stop), name="executor")
    spinning.start()
    executor.create_task(node.autostart)
    stop.wait()
    node.shut_down()
    time.sleep(FLUSH_SECONDS)
    executor.shutdown()
    spinning.join()
    node.destroy_node()


def _spin(executor: "MultiThreadedExecutor", node: "MemSpecNode", stop: threading.Event) -> None:
    """Spin to the end, whatever a callback raises: rclpy would stop spinning."""
    while not _spun_to_the_end(executor, node):
        if stop.is_set():
            return


def _spun_to_the_end(executor: "MultiThreadedExecutor", node: "MemSpecNode") -> bool:
    try:
        executor.spin()
    except Exception:
        node.get_logger().error(f"A callback failed:\n{traceback.format_exc()}")
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
