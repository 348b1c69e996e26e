"""Parameters of a real node: declared in full, refused with a reason, changed where they may be."""

import math

import pytest
from rclpy.qos import ReliabilityPolicy
from ros_harness import default_drafts, values

from memspec_core.settings import PARAMETERS

BAD = {
    "resident_capacity": (0, "resident_capacity"),
    "scheduling_interval": (0, "scheduling_interval"),
    "recent_tokens": (-1, "recent_tokens"),
    "draft_length": (1000, "draft_length"),
    "queue_size": (0, "queue_size"),
    "fallback_warn_ratio": (math.nan, "nan"),
    "memory.warn_ratio": (0.9, "memory.warn_ratio"),
    "temperature_warn": (math.nan, "temperature_warn"),
    "stream_period": (-0.01, "stream_period"),
    "stream_period ": (math.nan, "stream_period"),
    "stream_period  ": (1.01, "stream_period"),
    "diagnostics_period": (0.0, "diagnostics_period"),
    "strategy": ("no_such", "strategy is 'no_such'; it must be"),
    "dtype": ("int3", "dtype is 'int3'; it must be"),
    "draft_shape": ("ring", "draft_shape is 'ring'; it must be"),
    "threads": ("two", "threads is 'two'; a value of type int is needed"),
    "autostart": ("perhaps", "autostart is 'perhaps'; a value of type bool is needed"),
    "fallback_warn_ratio ": (1, "a value of type float is needed"),
    "queue_size ": (None, "queue_size cannot be deleted"),
    "drafts.names": (["one", "one"], "drafts.names holds 'one' twice"),
    "drafts.names ": (["a b"], "drafts.names holds 'a b'"),
    "drafts.names  ": (["none"], "drafts.names holds 'none'"),
    "drafts.names   ": (7, "a list of names is needed"),
}


@pytest.fixture(scope="module")
def unconfigured(tmp_path_factory):
    from ros_harness import Graph, NodeProcess, new_domain

    domain = new_domain()
    with NodeProcess(domain, tmp_path_factory.mktemp("node")) as node, Graph(domain, node) as graph:
        yield graph


def test_every_parameter_is_declared_with_its_range(unconfigured):
    for parameter in PARAMETERS:
        descriptor = unconfigured.describe_parameter(parameter.name)
        assert descriptor.description.startswith(parameter.description)
        assert not descriptor.read_only, "it must be settable before configure"
        when = "Fixed at configure." if parameter.read_only else "May change at run time."
        assert descriptor.description.endswith(when)
        ranges = [*descriptor.integer_range, *descriptor.floating_point_range]
        assert [(r.from_value, r.to_value) for r in ranges] == (
            [(parameter.minimum, parameter.maximum)] if parameter.minimum is not None else []
        )
        if parameter.name != "drafts.names":
            assert unconfigured.get_parameter(parameter.name) == parameter.default


@pytest.mark.parametrize("case", BAD)
def test_a_bad_value_is_refused_with_a_reason(unconfigured, case):
    value, reason = BAD[case]
    taken, said = unconfigured.set_parameter(case.strip(), value)

    assert not taken
    assert reason in said


def test_paths_of_drafts_follow_their_names(unconfigured):
    before = unconfigured.get_parameter("drafts.names")
    assert unconfigured.set_parameter("drafts.names", ["one", "two"]) == (True, "")
    assert unconfigured.get_parameter("drafts.two.path") == "default"
    assert unconfigured.set_parameter("drafts.two.path", "/somewhere") == (True, "")
    assert unconfigured.set_parameter("drafts.names", list(before)) == (True, "")
    assert unconfigured.set_parameter("drafts.two.path", "/elsewhere") == (True, "")


def test_run_time_parameters_change_and_others_are_fixed_once_configured(start):
    graph = start()
    graph.bring_up()

    assert graph.set_parameter("resident_capacity", 3) == (True, "")
    status = graph.next_diagnostics()["Drafts"]
    assert values(status)["capacity"] == "3"
    assert graph.statuses[-1].resident_capacity == 3
    taken, reason = graph.set_parameter("queue_size", 4)
    assert not taken
    assert "queue_size is fixed at configure" in reason
    assert graph.get_parameter("queue_size") == 8
    taken, reason = graph.set_parameter("resident_capacity", 0)
    assert not taken
    assert graph.get_parameter("resident_capacity") == 3
    assert not graph.set_parameter("drafts.names", [""])[0]


CONFIGURE_FAILS = {
    "a value out of range": ({"resident_capacity": 0}, "resident_capacity is 0; it must lie"),
    "a value of the wrong type": ({"queue_size": "many"}, "queue_size is 'many'"),
    "an unknown strategy": ({"strategy": "no_such"}, "strategy is 'no_such'"),
    "names that are equal": ({"drafts.names": ["a", "a"]}, "drafts.names holds 'a' twice"),
    "a missing target": ({"target.path": "/absent"}, "/absent"),
    "a missing draft": (
        {"drafts.names": ["mine"], "drafts.mine.path": "/absent/draft"},
        "/absent/draft",
    ),
    "no room in memory": ({"memory.budget_mib": 16}, "MiB"),
    "a record that cannot be written": (
        {"decisions.path": "/absent/decisions.jsonl"},
        "Decisions cannot be recorded in /absent/decisions.jsonl",
    ),
    "a device that is not there": ({"device": "cuda:77"}, "cuda"),
}


@pytest.mark.parametrize("case", CONFIGURE_FAILS)
def test_a_failed_configure_is_shown_and_can_be_repeated(start, case):
    parameters, reason = CONFIGURE_FAILS[case]
    graph = start(**parameters)

    assert not graph.configure()
    assert graph.state() == "unconfigured"
    assert reason in graph.node.output
    assert "Traceback" not in graph.node.output
    statuses = graph.next_diagnostics()
    assert statuses["Generation"].level == b"\x02"
    assert reason in statuses["Generation"].message
    if case == "no room in memory":
        assert statuses["Memory"].level == b"\x02"

    # The node lives on: put right, the same parameter lets it configure.
    if case == "a value out of range":
        assert graph.set_parameter("resident_capacity", 1) == (True, "")
        assert graph.configure(), graph.node.output
        assert graph.next_diagnostics()["Generation"].level == b"\x00"
    else:
        assert graph.node.alive


def test_no_drafts_are_written_as_one_empty_name_or_an_empty_list(start):
    graph = start(**{"drafts.names": []})

    assert graph.set_parameter("drafts.names", [""]) == (True, "")
    assert graph.set_parameter("drafts.names", default_drafts()) == (True, "")
    assert graph.set_parameter("drafts.names", []) == (True, "")
    assert "needed" not in graph.node.output


def test_the_quality_of_service_of_the_tokens_can_be_overridden(start):
    prefix = "qos_overrides./memspec/tokens.publisher"
    graph = start(**{f"{prefix}.reliability": "best_effort", f"{prefix}.depth": 7})
    graph.bring_up()

    (publisher,) = graph.ros.get_publishers_info_by_topic("/memspec/tokens")
    assert publisher.qos_profile.reliability == ReliabilityPolicy.BEST_EFFORT
    assert graph.get_parameter(f"{prefix}.depth") == 7
