"""The node's process: however a signal comes, it ends with code 0 and loses nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from action_msgs.msg import GoalStatus
from faulty_node import HANGING_DISC
from lifecycle_msgs.msg import Transition
from ros_harness import environment, new_domain, until

from memspec_msgs.action import Generate


def assert_ended_well(graph, seconds=30.0):
    assert graph.node.wait(seconds) == 0, graph.node.output
    assert "Traceback" not in graph.node.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_mid_goal_delivers_the_partial_result(start, number):
    graph = start(autostart=True)
    graph.wait_status("active", 180.0)
    assert graph.action.wait_for_server(30.0)
    # Without a lookup, which would be through with a text that repeats itself before the signal.
    running, waiting = graph.send_long(draft="none"), graph.send_long()
    running.wait_feedback(2)
    running.ask_result()
    waiting.ask_result()
    graph.node.send_signal(number)

    status, result = running.outcome(10.0)
    assert status == GoalStatus.STATUS_ABORTED
    assert result.finish_reason == Generate.Result.ABORTED
    assert "shutting down" in result.error
    assert result.text.startswith(running.feedback[0].text)
    assert waiting.outcome(10.0)[0] == GoalStatus.STATUS_ABORTED
    assert_ended_well(graph)


def test_a_signal_while_models_load_ends_the_process(start):
    graph = start()
    graph.transit_async(Transition.TRANSITION_CONFIGURE)
    until(lambda: graph.state() == "configuring")
    graph.node.send_signal()
    # Again, as an impatient user does.
    graph.node.send_signal()

    assert_ended_well(graph)


def test_a_signal_before_anything_else_ends_the_process(start):
    graph = start()
    until(lambda: is_importing_ros(graph.node.process.pid))
    graph.node.send_signal()

    assert_ended_well(graph)


def test_a_signal_while_torch_is_imported_ends_the_process(start):
    graph = start()
    graph.transit_async(Transition.TRANSITION_CONFIGURE)
    until(lambda: b"libtorch" in maps(graph.node.process.pid))
    graph.node.send_signal()

    assert_ended_well(graph, 10.0)


def test_a_signal_during_a_load_from_a_disc_that_hangs_ends_the_process(start, tmp_path):
    (tmp_path / HANGING_DISC).touch()
    graph = start([str(Path(__file__).with_name("faulty_node.py"))])
    graph.transit_async(Transition.TRANSITION_CONFIGURE)
    until(lambda: "A read hangs" in graph.node.output)
    graph.node.send_signal()

    assert_ended_well(graph, 10.0)


def test_a_signal_beside_a_deactivation_ends_the_process(start):
    graph = start(autostart=True)
    graph.wait_status("active", 180.0)
    assert graph.action.wait_for_server(30.0)
    goal = graph.send_long(draft="none")
    goal.wait_feedback()
    goal.ask_result()
    graph.transit_async(Transition.TRANSITION_DEACTIVATE)
    graph.node.send_signal(signal.SIGTERM)

    assert goal.outcome(10.0)[0] == GoalStatus.STATUS_ABORTED
    assert_ended_well(graph)


def test_the_start_after_a_kill_is_a_clean_one(start, tmp_path, monkeypatch):
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    drafts = tmp_path / "memspec/drafts"
    if (home / "memspec").is_dir():
        leave_out = shutil.ignore_patterns("drafts")
        shutil.copytree(home / "memspec", tmp_path / "memspec", ignore=leave_out)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    killed = start()
    loading = killed.transit_async(Transition.TRANSITION_CONFIGURE)
    # In the midst of keeping a draft, where the machine has the native step.
    until(lambda: loading.done() or any(drafts.glob("*")))
    killed.node.send_signal(signal.SIGKILL)
    assert killed.node.wait() == -signal.SIGKILL

    graph = start()
    graph.bring_up()
    assert graph.send(prompt="Hi", max_new_tokens=4).outcome()[0] == GoalStatus.STATUS_SUCCEEDED
    assert [draft.error for draft in graph.list_drafts()] == [""] * len(graph.list_drafts())
    assert not list(drafts.glob("*.partial"))


def test_a_signal_to_an_idle_node_ends_the_process_soon(start):
    graph = start()
    assert graph.state() == "unconfigured"
    began = time.monotonic()
    graph.node.send_signal(signal.SIGTERM)

    assert_ended_well(graph)
    assert time.monotonic() - began < 5.0


def test_wrong_arguments_are_told_in_a_line(tmp_path):
    absent = str(tmp_path / "absent.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "memspec_ros.node", "--ros-args", "--params-file", absent],
        env=environment(new_domain()),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert absent in done.stderr
    assert "Traceback" not in done.stderr


def is_importing_ros(pid):
    """Tell whether the node's process has come so far that its handlers must be set."""
    files = Path(f"/proc/{pid}")
    if b"memspec_ros.node" not in (files / "cmdline").read_bytes():
        return False
    return b"_rclpy_pybind11" in maps(pid)


def maps(pid):
    """Return what says which libraries a process has loaded."""
    return Path(f"/proc/{pid}/maps").read_bytes()
