"""The terminal view of a node: what it shows, and the command over a real node."""

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys

from diagnostic_msgs.msg import DiagnosticStatus, KeyValue
from rich.console import Console
from ros_harness import environment, new_domain

from memspec_msgs.msg import RuntimeStatus
from memspec_ros.watch_view import Seen, view


def shown(seen, now=0.0):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view("memspec", seen, now))
    return console.export_text()


def status(part, level, message):
    values = [KeyValue(key="resident", value="code, math"), KeyValue(key="wanted", value="")]
    return DiagnosticStatus(level=level, name=f"memspec: {part}", message=message, values=values)


def test_a_view_shows_levels_messages_and_values():
    runtime = RuntimeStatus(lifecycle_state="active", strategy="memspec", resident=["code"])
    text = shown(Seen([status("Drafts", b"\x01", "It has failed.")], runtime))

    for part in ("memspec  active", "Drafts WARN", "It has failed.", "resident code, math"):
        assert part in text
    assert "wanted -" in text
    assert "STALE" not in text


def test_a_node_that_fell_silent_is_stale():
    seen = Seen([status("Drafts", b"\x00", "OK")], heard_at=1.0)

    assert "STALE: nothing was heard for 9 s." in shown(seen, now=10.0)
    assert "STALE" not in shown(seen, now=5.0)


def watch(domain, *options):
    return subprocess.run(
        [sys.executable, "-m", "memspec_ros.watch", *options],
        env={**environment(domain), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_shows_a_real_node_once(active, tmp_path):
    done = watch(active.domain, "--once", "--wait", "60")

    assert done.returncode == 0, done.stderr
    for part in ("memspec  active", "Drafts", "Generation", "Memory", "Platform", "kernel"):
        assert part in done.stdout

    loud = watch(active.domain, "--once", "--wait", "60", "--ros-args", "--log-level", "debug")
    assert loud.returncode == 0, loud.stderr
    assert "[DEBUG]" in loud.stderr

    picture = tmp_path / "watch.svg"
    assert watch(active.domain, "--svg", str(picture), "--wait", "60").returncode == 0
    assert "Generation" in picture.read_text()
    assert "url(" not in picture.read_text().replace("url(#", ""), "it needs a network"


def test_the_command_goes_on_showing_until_it_is_interrupted(active):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "memspec_ros.watch", "--wait", "60"],
        env={**environment(active.domain), "COLUMNS": "120", "LINES": "60", "TERM": "xterm"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while shown.count(b"cpu_percent") < 3:
        shown += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # what a closed terminal answers
        while rest := os.read(ours, 65536):
            shown += rest
    os.close(ours)

    assert process.wait(60.0) == 0, shown.decode()
    assert b"Traceback" not in shown


def test_where_there_is_no_node_the_command_says_so():
    done = watch(new_domain(), "--once", "--wait", "1")

    assert done.returncode == 1
    assert "nothing was heard of the node /memspec" in done.stderr
