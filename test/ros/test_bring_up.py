"""The node as launch files and lifecycle managers bring it up; test/launch does it by a launch."""

import signal
from contextlib import ExitStack

import pytest
from action_msgs.msg import GoalStatus
from lifecycle_manager import LifecycleManager
from ros_harness import Graph, NodeProcess, new_domain, until

COMMAND = ("-m", "memspec_ros.node", "--ros-args")


@pytest.fixture
def robots(tmp_path):
    """Give a function that starts a node in a namespace of the one domain, and a graph for it."""
    domain = new_domain()
    with ExitStack() as running:

        def start(namespace, **parameters):
            folder = tmp_path / namespace
            folder.mkdir(exist_ok=True)
            command = (*COMMAND, "-r", f"__ns:=/{namespace}")
            node = running.enter_context(NodeProcess(domain, folder, parameters, command))
            return running.enter_context(Graph(domain, node, f"{namespace}/memspec"))

        yield start


def answers(graph):
    assert graph.action.wait_for_server(60.0)
    return graph.send(prompt="Hi", max_new_tokens=1).outcome()[0] == GoalStatus.STATUS_SUCCEEDED


def test_two_robots_one_started_by_itself_and_one_by_a_manager(robots):
    first, second = robots("robot1", autostart=True), robots("robot2")
    manager = LifecycleManager(second)
    assert manager.startup(), second.node.output
    first.wait_status("active", 180.0)
    assert answers(first)
    assert answers(second)

    def names():
        return {status.name for message in first.diagnostics for status in message.status}

    parts = ("Drafts", "Generation", "Memory", "Platform")
    expected = {f"robot{n}/memspec: {part}" for n in (1, 2) for part in parts}
    until(lambda: names() == expected)

    assert manager.pause()
    assert not second.send(prompt="Hi").accepted
    assert answers(first), "the other robot was paused as well"
    assert manager.resume()
    assert answers(second)
    assert manager.reset()
    assert manager.startup()
    assert manager.shutdown()
    assert second.state() == "finalized"


def test_a_process_that_is_started_again_brings_itself_up_again(robots):
    killed = robots("robot1", autostart=True)
    killed.wait_status("active", 180.0)
    killed.node.send_signal(signal.SIGKILL)
    assert killed.node.wait() == -signal.SIGKILL

    again = robots("robot1", autostart=True)
    again.wait_status("active", 180.0)
    assert again.node.alive
    assert answers(again)
