"""The life of the node's process: signals, executor, and an end that loses nothing.

The signal handlers are set before ROS and torch are imported, so that a signal at any moment ends
the process with code 0. rclpy's own handlers would cut the communication in the middle of a goal.
"""

import ctypes
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rclpy.executors import MultiThreadedExecutor

    from memspec_ros.node import MemSpecNode

EXECUTOR_THREADS = 96
"""A goal that runs or waits holds a thread, and there are at most 65; threads start as needed."""

M_ARENA_MAX = -8
"""From glibc's malloc.h."""

FLUSH_SECONDS = 0.3
"""For the executor and the middleware to hand the last results over before their end."""


def main(arguments: list[str] | None = None) -> int:
    """Run the node until SIGINT or SIGTERM; return the exit code."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    _return_freed_memory()
    import rclpy
    from rclpy.signals import SignalHandlerOptions

    try:
        rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    except Exception as error:
        print(f"memspec_node: {error}", file=sys.stderr)
        return 2
    try:
        if not stop.is_set():
            _serve(stop)
    finally:
        rclpy.try_shutdown()
    return 0


def _return_freed_memory() -> None:
    """Have glibc serve all threads from one arena.

    Loading in another thread each time leaves a hole in another arena, and after a few rounds of
    cleanup and configure the process holds hundreds of megabytes that nobody uses.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


def _serve(stop: threading.Event) -> None:
    from rclpy.executors import MultiThreadedExecutor

    from memspec_ros.node import MemSpecNode

    node = MemSpecNode()
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
