"""The node's process: however a signal comes, it ends with code 0 and loses nothing."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from action_msgs.msg import GoalStatus
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
    return "_rclpy_pybind11" in (files / "maps").read_text()
