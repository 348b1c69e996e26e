"""The command `watch`: shows in a terminal what the node says of itself."""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memspec_ros.arguments import parsed, start_ros

EXIT_OK = 0
EXIT_FAILED = 1

EPILOG = """\
What each value means, and what to do about a warning: docs/operating.md.
Exit code: 0; 1 where nothing was heard of the node; 2 wrong input. After --ros-args, arguments of
ROS.
"""

TICK_SECONDS = 0.25
SVG_COLUMNS = 118


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options, given = parsed(_parser(), arguments)
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())

    # ROS is slow to import; --help and wrong input are told without it.
    import rclpy

    start_ros("watch", given)
    try:
        return _watch(options, interrupted)
    finally:
        rclpy.try_shutdown()


def _watch(options: argparse.Namespace, interrupted: threading.Event) -> int:
    from rich.console import Console
    from rich.live import Live

    from memspec_ros.watch_view import view

    name = options.node.strip("/")
    watcher = _Watcher(name)
    try:
        heard = watcher.spin(interrupted, lambda: watcher.is_complete, options.wait)
        if interrupted.is_set():
            return EXIT_OK
        if not heard and not watcher.seen.statuses:
            print(
                f"watch: nothing was heard of the node {options.node} for {options.wait:g} s. "
                "Is it started, and in the same ROS_DOMAIN_ID?",
                file=sys.stderr,
            )
            return EXIT_FAILED
        if options.svg is not None:
            _write_svg(options.svg, view(name, watcher.seen, time.monotonic()))
        elif options.once:
            Console().print(view(name, watcher.seen, time.monotonic()))
        else:
            with Live(console=Console(), auto_refresh=False, screen=sys.stdout.isatty()) as live:
                while not interrupted.is_set():
                    live.update(view(name, watcher.seen, time.monotonic()), refresh=True)
                    watcher.spin(interrupted, lambda: False, TICK_SECONDS)
    finally:
        watcher.close()
    return EXIT_OK


class _Watcher:
    """Hears what the node called `name` says; the name has no leading slash."""

    def __init__(self, name: str) -> None:
        import rclpy
        from diagnostic_msgs.msg import DiagnosticArray
        from rclpy.qos import DurabilityPolicy, QoSProfile

        from memspec_msgs.msg import RuntimeStatus
        from memspec_ros.watch_view import Seen

        self.seen = Seen()
        self._prefix = f"{name}: "
        self._node = rclpy.create_node("memspec_watch", start_parameter_services=False)
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        subscribe = self._node.create_subscription
        subscribe(DiagnosticArray, "/diagnostics", self._hear_diagnostics, 10)
        subscribe(RuntimeStatus, f"/{name}/status", self._hear_status, latched)

    @property
    def is_complete(self) -> bool:
        """Whether both were heard: the diagnostics, and the latched status."""
        return bool(self.seen.statuses) and self.seen.runtime is not None

    def spin(
        self, interrupted: threading.Event, done: Callable[[], bool], timeout_seconds: float
    ) -> bool:
        """Hear messages until `done`; return whether that came to be within the time."""
        import rclpy

        deadline = time.monotonic() + timeout_seconds
        while not done() and not interrupted.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            rclpy.spin_once(self._node, timeout_sec=min(left, TICK_SECONDS))
        return done()

    def close(self) -> None:
        self._node.destroy_node()

    def _hear_diagnostics(self, message: Any) -> None:
        ours = [status for status in message.status if status.name.startswith(self._prefix)]
        if ours:
            self.seen.statuses = ours
            self.seen.heard_at = time.monotonic()

    def _hear_status(self, message: Any) -> None:
        self.seen.runtime = message


def _write_svg(path: Path, shown: Any) -> None:
    import io
    import re

    from rich.console import Console

    console = Console(record=True, width=SVG_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    picture = console.export_svg(title="ros2 run memspec_ros watch")
    # Else whoever looks at it fetches fonts from a server.
    alone = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    path.write_text(alone, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="watch",
        description="Show the diagnostics and the state of the node memspec.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--node", default="/memspec", help="name of the node, with its namespace (%(default)s)")
    add("--once", action="store_true", help="print once and end")
    add("--svg", type=Path, metavar="FILE", help="write a picture of it to FILE and end")
    add("--wait", type=float, default=10.0, metavar="S", help="wait so long for the node (10)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
