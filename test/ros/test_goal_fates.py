"""Each line of the tables of docs/goals.md, on a real node."""

import time
from pathlib import Path

import pytest
from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Duration
from faulty_node import DEAD_WORKER, FAIL, FAIL_LOAD, SLOW, SLOW_LOAD
from lifecycle_msgs.msg import Transition
from ros_harness import (
    COUNTING,
    LOAD_SECONDS,
    PATIENCE,
    ROOT,
    Graph,
    NodeProcess,
    new_domain,
    until,
    wait,
)

from memspec_msgs.action import Generate

STATES = {
    GoalStatus.STATUS_SUCCEEDED: "succeeded",
    GoalStatus.STATUS_CANCELED: "canceled",
    GoalStatus.STATUS_ABORTED: "aborted",
}
REASONS = {
    value: name
    for name in ("END_OF_SEQUENCE", "LENGTH", "TIME_LIMIT", "CANCELLED", "ABORTED")
    for value in [getattr(Generate.Result, name)]
}
SHORT = {"max_new_tokens": 3}
HALF_A_SECOND = Duration(nanosec=500_000_000)


def table(heading):
    """Return the lines of the table under a heading of docs/goals.md: first cell to the others."""
    text = (ROOT / "docs/goals.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in rows}


SENT = table("When it is sent")
ENDS = table("How it ends")
ORDER = (
    "was never configured",
    "loads its models",
    "is inactive",
    "`reject`: another goal is sent",
    "was cleaned up",
    "`preempt`: a less urgent goal is sent",
    "`preempt`: a goal as urgent is sent",
    "the worker dies",
    "is active",
    "is active, and the queue is full",
    "it comes to its end",
    "its client cancels it",
    "its `time_limit` is over",
    "an iteration fails",
    "`queue`: another goal is sent",
    "`queue`, full: a more urgent goal is sent",
    "the node is deactivated",
    "the node is shut down",
    "was shut down",
    "the process gets SIGINT or SIGTERM",
)
"""The lines of both tables, such that models are loaded as seldom as can be."""

POLICIES = {"loads its models": "reject", "is inactive": "reject", "the worker dies": "preempt"}
"""For lines that name none: where "queue" would need another configure."""


class Stage:
    """One node for all tests, and what turns its faults on."""

    def __init__(self, folder):
        self.folder = folder
        self.graph = None
        self._node = None

    def start(self):
        """Start a node that was never configured."""
        self.close()
        domain = new_domain()
        command = [str(Path(__file__).with_name("faulty_node.py"))]
        parameters = {"queue_size": 1, "drafts.names": [""], "lookup": False}
        self._node = NodeProcess(domain, self.folder, parameters, command)
        self.graph = Graph(domain, self._node)

    def active(self, policy="queue"):
        """Have the node active with a policy, whatever the last test left."""
        if self.graph is None or not self._node.alive:
            self.start()
        graph = self.graph
        if graph.state() == "active":
            if graph.get_parameter("queue_policy") == policy:
                return graph
            assert graph.deactivate()
        if graph.state() == "inactive" and graph.get_parameter("queue_policy") != policy:
            assert graph.cleanup()
        if graph.state() == "finalized":
            self.start()
            graph = self.graph
        if graph.state() == "unconfigured":
            assert graph.set_parameter("queue_policy", policy) == (True, "")
            assert graph.configure(), graph.node.output
        if graph.state() == "inactive":
            assert graph.activate()
        assert graph.action.wait_for_server(PATIENCE)
        time.sleep(0.5)  # until the server has found the client as well
        return graph

    def put(self, fault, content=""):
        # Whole or not at all: the node looks at any time.
        new = self.folder / f"{fault}.new"
        new.write_text(content)
        new.rename(self.folder / fault)

    def take_away(self, *faults):
        for fault in faults:
            (self.folder / fault).unlink(missing_ok=True)

    def close(self):
        if self.graph is not None:
            self.graph.close()
            self._node.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    stage = Stage(tmp_path_factory.mktemp("fates"))
    yield stage
    stage.close()


@pytest.fixture
def stage(node):
    """Give the node with iterations of 20 ms and more."""
    node.put(SLOW, "0.02")
    yield node
    node.take_away(SLOW, FAIL, DEAD_WORKER, FAIL_LOAD, SLOW_LOAD)


def ended(goal):
    """Return how a goal ended, in the words of the table."""
    status, result = goal.outcome()
    assert bool(result.error) == (result.finish_reason == Generate.Result.ABORTED), result.error
    text = "no text"
    if result.text:
        text = "whole text" if STATES[status] == "succeeded" else "text so far"
    if result.finish_reason == Generate.Result.TIME_LIMIT and result.text:
        text = "text so far"
    return f"{STATES[status]}, {REASONS[result.finish_reason]}, {text}"


# When it is sent


def state_of(stage, state):
    """Bring the node into a state of the first table, and return what becomes of a goal."""
    if state == "was never configured":
        stage.start()
        assert stage.graph.state() == "unconfigured"
        there_is_one = stage.graph.action.server_is_ready()
        return "rejected" if there_is_one else "there is no action server yet"
    if state == "was shut down" and stage.graph.state() == "finalized":
        return fate_of_a_goal(stage.graph)
    if state == "loads its models":
        return fate_while_loading(stage)
    graph = stage.active(policy_of(state))
    if state == "is inactive":
        assert graph.deactivate()
    elif state == "is active, and the queue is full":
        long_goal(graph).wait_feedback()
        assert long_goal(graph).accepted
    elif state == "was cleaned up":
        assert graph.deactivate()
        assert graph.cleanup()
    elif state == "was shut down":
        assert graph.transit(Transition.TRANSITION_ACTIVE_SHUTDOWN)
    else:
        assert state == "is active"
    fate = fate_of_a_goal(graph)
    if state.startswith("is active"):
        assert graph.deactivate()
    return fate


def fate_while_loading(stage):
    """Configure a node that has its action server already, which it keeps from the first one on."""
    graph = stage.graph
    stage.put(FAIL_LOAD, "MemoryError")
    assert not graph.configure()
    assert graph.set_parameter("queue_policy", policy_of("loads its models")) == (True, "")
    assert graph.action.wait_for_server(PATIENCE)
    time.sleep(0.5)
    stage.put(SLOW_LOAD)
    loading = graph.transit_async(Transition.TRANSITION_CONFIGURE)
    until(lambda: graph.state() == "configuring")
    fate = fate_of_a_goal(graph)
    assert not loading.done()
    stage.take_away(SLOW_LOAD)
    assert wait(loading, LOAD_SECONDS).success
    return fate


def fate_of_a_goal(graph):
    return "accepted" if graph.send(prompt="Hi", **SHORT).accepted else "rejected"


# How it ends

HAPPENINGS = {
    "its client cancels it": lambda stage, goal: goal.handle.cancel_goal_async(),
    "an iteration fails": lambda stage, goal: stage.put(FAIL, "RuntimeError"),
    "the worker dies": lambda stage, goal: stage.put(DEAD_WORKER),
    "the node is deactivated": lambda stage, goal: stage.graph.deactivate(),
    "the node is shut down": lambda stage, goal: stage.graph.transit(
        Transition.TRANSITION_ACTIVE_SHUTDOWN
    ),
    "the process gets SIGINT or SIGTERM": lambda stage, goal: stage.graph.node.send_signal(),
    "`reject`: another goal is sent": lambda stage, goal: refused(stage.graph),
    "`queue`: another goal is sent": lambda stage, goal: refused(stage.graph),
    "`queue`, full: a more urgent goal is sent": lambda stage, goal: sent(stage.graph, 1),
    "`preempt`: a less urgent goal is sent": lambda stage, goal: refused(stage.graph, -2),
    "`preempt`: a goal as urgent is sent": lambda stage, goal: sent(stage.graph, 0),
}
OWN = {
    "it comes to its end": SHORT,
    "its `time_limit` is over": {"time_limit": HALF_A_SECOND},
}
"""What comes of the goal itself, and so for the two of them one after the other."""


def sent(graph, priority):
    assert graph.send(prompt="Hi", priority=priority, **SHORT).accepted


def refused(graph, priority=0):
    """Send a goal that finds the queue full, or that the policy rejects."""
    assert not graph.send(prompt="Hi", priority=priority, **SHORT).accepted


def policy_of(line):
    return line.split("`")[1] if line.startswith("`") else POLICIES.get(line, "queue")


def long_goal(graph, **fields):
    return graph.send_long(draft="none", prompt=COUNTING, **fields)


def test_every_line_is_tried():
    assert sorted(ORDER) == sorted([*SENT, *ENDS])
    assert set(ENDS) == {*HAPPENINGS, *OWN}


@pytest.mark.parametrize("line", ORDER)
def test_goals_where_or_when(stage, line):
    if line in SENT:
        assert state_of(stage, line) == SENT[line][0]
    else:
        check_ends(stage, line)


def check_ends(stage, happening):
    running_fate, waiting_fate = ENDS[happening]
    graph = stage.active(policy_of(happening))
    running = long_goal(graph, **OWN.get(happening, {}))
    if happening in OWN:
        assert ended(running) == running_fate
        running = long_goal(graph)
        running.wait_feedback()
    else:
        running.wait_feedback(2)
    running.ask_result()
    waiting = None
    if waiting_fate != "there is none":
        fields = SHORT if waiting_fate == "takes its turn" else OWN.get(happening, {})
        # One that is as urgent would preempt the other.
        urgency = -1 if policy_of(happening) == "preempt" else 0
        waiting = long_goal(graph, priority=urgency, **fields)
        assert waiting.accepted
        waiting.ask_result()

    if happening == "its client cancels it":
        waiting.handle.cancel_goal_async()
        assert ended(waiting) == waiting_fate
    if happening == "its `time_limit` is over":
        assert ended(waiting) == waiting_fate  # while the other still runs
    if happening in HAPPENINGS:
        HAPPENINGS[happening](stage, running)
    if running_fate == "goes on" or happening in OWN:
        assert not running.ask_result().done()
        running.handle.cancel_goal_async()
        assert ended(running) == "canceled, CANCELLED, text so far"
    else:
        assert ended(running) == running_fate
    if waiting is not None:
        turn = "succeeded, LENGTH, whole text"
        assert ended(waiting) == (turn if waiting_fate == "takes its turn" else waiting_fate)
    recover(stage, happening)


def recover(stage, happening):
    """After a dead worker, cleanup and configure help; after a signal the process has ended."""
    stage.take_away(DEAD_WORKER)
    if happening == "the worker dies":
        graph = stage.graph
        assert graph.next_diagnostics()["Generation"].level == b"\x02"
        assert graph.deactivate()
        assert graph.cleanup()
    if happening == "the process gets SIGINT or SIGTERM":
        assert stage.graph.node.wait() == 0
