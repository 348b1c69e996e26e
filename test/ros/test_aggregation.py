"""What a robot's dashboard makes of the node's statuses, by the rules of the aggregator and rqt."""

import pytest
import yaml
from aggregator import ERROR, OK, STALE, Aggregator
from diagnostic_msgs.msg import DiagnosticStatus
from ros_harness import ROOT, Graph, NodeProcess, new_domain, values

from memspec_ros.diagnostics import NodeState, statuses

TEXT = (ROOT / "config" / "diagnostics.yaml").read_text(encoding="utf-8")
PARTS = ("Drafts", "Generation", "Memory", "Platform")


def aggregator(name):
    """Return an aggregator set up for a node of that name, as the file's comment says how."""
    text = "".join(
        line if line.startswith("#") else line.replace("memspec: ", f"{name}: ")
        for line in TEXT.splitlines(keepends=True)
    )
    return Aggregator(yaml.safe_load(text))


def said_by(name, **fields):
    return statuses(name, NodeState("unconfigured", **fields))


@pytest.mark.parametrize("name", ["memspec", "robot1/memspec"])
def test_every_status_is_matched_and_expected(name):
    dashboard = aggregator(name)
    dashboard.hear(said_by(name), seconds=0.0)

    assert dashboard.others == []
    leaf = name.replace("/", " ")
    tree = {"/Robot/Language": OK, **{f"/Robot/Language/{leaf}: {p}": OK for p in PARTS}}
    assert dashboard.report(now=4.0) == tree


def test_a_silent_node_is_stale_and_a_missing_status_an_error():
    dashboard = aggregator("memspec")
    assert dashboard.report(now=0.0)["/Robot/Language"] == STALE
    dashboard.hear(said_by("memspec")[:3], seconds=0.0)
    assert dashboard.report(now=1.0)["/Robot/Language"] == ERROR
    dashboard.hear(said_by("memspec"), seconds=1.0)
    assert dashboard.report(now=2.0)["/Robot/Language"] == OK
    assert set(dashboard.report(now=7.0).values()) == {STALE}


def test_the_worst_status_shows_on_top():
    dashboard = aggregator("memspec")
    dashboard.hear(said_by("memspec", failure=MemoryError("None left.")), seconds=0.0)

    assert dashboard.report(now=0.0)["/Robot/Language"] == ERROR


def test_another_robots_node_is_not_taken_for_this_one():
    dashboard = aggregator("robot1/memspec")
    dashboard.hear(said_by("robot2/memspec"), seconds=0.0)
    dashboard.hear(said_by("memspec"), seconds=0.0)

    assert len(dashboard.others) == 8
    assert set(dashboard.report(now=0.0).values()) == {STALE}


@pytest.fixture
def namespaced(tmp_path):
    domain = new_domain()
    command = ("-m", "memspec_ros.node")
    remap = ("--ros-args", "-r", "__ns:=/robot1")
    with (
        NodeProcess(domain, tmp_path, {"diagnostics_period": 0.1}, (*command, *remap)) as node,
        Graph(domain, node, name="robot1/memspec") as graph,
    ):
        yield graph


def test_a_real_node_is_alive_on_the_dashboard_while_it_loads_and_is_inactive(namespaced):
    graph = namespaced
    dashboard = aggregator("robot1/memspec")
    assert graph.configure(), graph.node.output
    graph.next_diagnostics()
    states = {values(message.status[1])["lifecycle_state"] for message in graph.diagnostics}
    assert {"configuring", "inactive"} <= states

    assert graph.state() == "inactive"
    for message in graph.diagnostics:
        # The aggregator warns of messages without a time.
        assert message.header.stamp.sec > 0
        dashboard.hear(message.status, seconds=0.0)
        assert set(dashboard.report(now=0.0).values()) == {OK}
        for status in message.status:
            assert isinstance(status.level, bytes)
            keys = [pair.key for pair in status.values]
            assert len(keys) == len(set(keys))
    assert dashboard.others == []


def test_thresholds_change_while_the_node_is_active(active):
    def level(part):
        return active.next_diagnostics()[part].level

    assert level("Memory") == DiagnosticStatus.OK
    assert active.set_parameter("memory.warn_ratio", 100.0) == (True, "")
    assert active.set_parameter("temperature_warn", 10.0) == (True, "")
    memory = active.next_diagnostics()["Memory"]
    available = float(values(memory)["available_mib"])
    floor = active.get_parameter("memory.floor_mib")
    assert (memory.level == DiagnosticStatus.WARN) == (available < 100 * floor)
    assert active.set_parameter("memory.warn_ratio", 1.25) == (True, "")
    assert active.set_parameter("temperature_warn", 90.0) == (True, "")
    assert level("Memory") == DiagnosticStatus.OK
