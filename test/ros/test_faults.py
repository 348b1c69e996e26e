"""What a robot's disc, memory and clock do to a node: it answers, ends goals well, and goes on."""

import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Duration, Time
from faulty_node import FAIL, FAIL_LOAD, HANGING_DISC, READ_ERRORS
from rcl_interfaces.msg import Log
from rclpy.logging import LoggingSeverity
from ros_harness import COUNTING, PATIENCE, ROOT, Graph, NodeProcess, new_domain, until, values
from rosgraph_msgs.msg import Clock

from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.draft import MANIFEST, WEIGHTS
from memspec_msgs.action import Generate
from memspec_msgs.msg import DraftInfo
from memspec_msgs.srv import PinDraft

SUCCEEDED = GoalStatus.STATUS_SUCCEEDED
ABORTED = GoalStatus.STATUS_ABORTED
WARN, ERROR = b"\x01", b"\x02"
NAMES = ["resident", "another", "absent", "hanging"]
HEADROOM_BYTES = 32 * 2**20
"""Less than the target's weights need."""

SHORT = {"prompt": "What is a robot?", "max_new_tokens": 4}

pytestmark = pytest.mark.skipif(
    not (ROOT / "models/mixed").is_dir(), reason="the project's drafts are not here"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give a folder with a target and drafts of the tests' own."""
    folder = tmp_path_factory.mktemp("faults")
    shutil.copytree(open_checkpoint("default").folder, folder / "target", ignore=only_gguf)
    for name in NAMES:
        shutil.copytree(ROOT / "models/mixed", folder / name)
    return folder


def only_gguf(_, names):
    return [name for name in names if not name.endswith(".gguf")]


@pytest.fixture(scope="module")
def graph(folder):
    """Give a node in simulated time, whose disc for records is full; not yet configured."""
    parameters = {
        "use_sim_time": True,
        "target.path": str(folder / "target"),
        "drafts.names": NAMES,
        "resident_capacity": 2,
        "lookup": False,
        "predictor.path": str(folder / "no_predictor"),
        "decisions.path": "/dev/full",
        "record.path": "/dev/full",
    } | {f"drafts.{name}.path": str(folder / name) for name in NAMES}
    domain = new_domain()
    command = [str(Path(__file__).with_name("faulty_node.py"))]
    process = NodeProcess(domain, folder, parameters, command)
    with process as node, Graph(domain, node) as graph, jumping_clock(graph):
        yield graph


class jumping_clock:  # noqa: N801 - reads as what it gives
    """Publishes a simulated time that stands still, and leaps to and fro."""

    def __init__(self, graph):
        self._publisher = graph.ros.create_publisher(Clock, "/clock", 10)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._publish)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _publish(self):
        seconds = [5, 5, 1_000_000, 5, 0]
        while not self._ended.wait(0.1):
            seconds.append(seconds.pop(0))
            self._publisher.publish(Clock(clock=Time(sec=seconds[0])))


def gguf(folder):
    return next((folder / "target").glob("*.gguf"))


def active(graph):
    """Have the node active, whatever the last test left."""
    if graph.state() == "unconfigured":
        assert graph.configure(), graph.node.output
    if graph.state() == "inactive":
        assert graph.activate()
    assert graph.action.wait_for_server(PATIENCE)
    until(lambda: graph.send(**SHORT).outcome()[0] == SUCCEEDED)
    return graph


@contextmanager
def heard_log(graph):
    """Give the list of what the node logs on /rosout from here on."""
    heard = []
    subscription = graph.ros.create_subscription(Log, "/rosout", heard.append, 100)
    until(lambda: graph.ros.count_publishers("/rosout") > 0)
    time.sleep(0.5)  # until the node has found the subscription as well
    yield heard
    graph.ros.destroy_subscription(subscription)


def draft(graph, name):
    return next(draft for draft in graph.list_drafts() if draft.name == name)


def test_targets_that_cannot_be_loaded_fail_configure_with_the_reason(graph, folder):
    file = gguf(folder)
    whole = file.read_bytes()
    for content, reason in ((whole[:5000], "truncated"), (b"", "empty"), (b"JUNK" * 99, "GGUF")):
        seen = len(graph.node.output)
        file.write_bytes(content)
        assert not graph.configure()
        assert graph.state() == "unconfigured"
        assert reason in graph.node.output[seen:]
        assert "Traceback" not in graph.node.output[seen:]
    file.unlink()
    assert not graph.configure()
    assert graph.next_diagnostics()["Generation"].level == ERROR
    file.write_bytes(whole)

    (folder / FAIL_LOAD).write_text("MemoryError")
    assert not graph.configure()
    assert graph.next_diagnostics()["Memory"].level == ERROR
    assert graph.configure(), graph.node.output
    assert graph.next_diagnostics()["Memory"].level != ERROR


def test_a_full_disc_ends_records_and_no_goal(graph):
    assert active(graph).send(**SHORT).outcome()[0] == SUCCEEDED
    for what in ("Decisions", "Generations"):
        assert f"{what} are no longer recorded in /dev/full" in graph.node.output


def test_out_of_memory_while_decoding_ends_the_goal_alone(graph, folder):
    goal = active(graph).send_long(draft="none")
    goal.wait_feedback(2)
    (folder / FAIL).write_text("MemoryError")
    status, result = goal.outcome()

    assert status == ABORTED
    assert "MemoryError" in result.error
    assert result.text.startswith(goal.feedback[0].text)
    assert graph.send(**SHORT).outcome()[0] == SUCCEEDED


def test_target_files_that_vanish_after_the_load_are_missed_by_the_next_one_only(graph, folder):
    file = gguf(active(graph) and folder)
    kept = file.rename(file.with_suffix(".kept"))
    assert graph.send(**SHORT).outcome()[0] == SUCCEEDED
    assert graph.send(prompt=COUNTING, raw=True, max_new_tokens=40).outcome()[0] == SUCCEEDED
    assert graph.deactivate()
    assert graph.cleanup()
    assert not graph.configure()
    kept.rename(file)
    assert active(graph).send(**SHORT).outcome()[0] == SUCCEEDED


def test_read_errors_cost_a_draft_and_no_other_goal(graph, folder):
    active(graph)
    (folder / READ_ERRORS).touch()
    status, result = graph.send(draft="absent", **SHORT).outcome()
    assert status == ABORTED
    assert "Input/output error" in result.error
    assert draft(graph, "absent").state == DraftInfo.FAILED
    assert graph.next_diagnostics()["Drafts"].level == WARN
    assert graph.send(**SHORT).outcome()[0] == SUCCEEDED

    (folder / READ_ERRORS).unlink()
    assert graph.send(draft="absent", **SHORT).outcome()[0] == SUCCEEDED


def test_a_draft_whose_weights_become_those_of_another_is_noticed(graph, folder):
    assert active(graph).send(draft="resident", **SHORT).outcome()[0] == SUCCEEDED
    assert graph.send(draft="another", **SHORT).outcome()[0] == SUCCEEDED
    weights = folder / "absent" / WEIGHTS
    kept = weights.rename(weights.with_suffix(".kept"))
    shutil.copy(ROOT / "models/law" / WEIGHTS, weights)
    status, result = graph.send(draft="absent", **SHORT).outcome()
    assert status == ABORTED
    assert str(weights) in result.error
    assert "another draft's" in result.error
    assert graph.send(**SHORT).outcome()[0] == SUCCEEDED

    kept.rename(weights)
    assert graph.send(draft="absent", **SHORT).outcome()[0] == SUCCEEDED


def test_drafts_that_are_damaged_at_configure_leave_their_places_to_others(graph, folder):
    assert active(graph).deactivate()
    assert graph.cleanup()
    manifest, weights = folder / "resident" / MANIFEST, folder / "another" / WEIGHTS
    whole = {file: file.read_bytes() for file in (manifest, weights)}
    manifest.write_text("junk")
    weights.write_bytes(whole[weights][:1000])
    seen = len(graph.node.output)
    with heard_log(graph) as heard:
        assert active(graph)
        until(lambda: sum("is left out" in log.msg for log in heard) == 2)

    for log in (log for log in heard if "is left out" in log.msg):
        assert (log.name, log.level) == ("memspec", LoggingSeverity.ERROR)
        assert log.stamp.sec > 0
    states = {found.name: found.state for found in graph.list_drafts()}
    assert states["resident"] == states["another"] == DraftInfo.FAILED
    assert states["absent"] == states["hanging"] == DraftInfo.RESIDENT
    for name, file in (("resident", manifest), ("another", weights)):
        assert str(file) in draft(graph, name).error
        assert graph.node.output[seen:].count(f"The draft '{name}' is left out") == 1
        assert str(file) in graph.node.output[seen:]
    warned = graph.next_diagnostics()["Drafts"]
    assert warned.level == WARN
    assert "'resident' has failed" in warned.message
    status, result = graph.send(draft="resident", **SHORT).outcome()
    assert (status, result.error) == (ABORTED, draft(graph, "resident").error)

    for file, content in whole.items():
        file.write_bytes(content)
    assert graph.deactivate()
    assert graph.cleanup()
    assert active(graph).send(draft="resident", **SHORT).outcome()[0] == SUCCEEDED
    assert graph.next_diagnostics()["Drafts"].message.count("has failed") == 0


def test_a_limit_on_the_process_memory_fails_configure_and_no_more(graph):
    assert active(graph).deactivate()
    assert graph.cleanup()
    process = psutil.Process(graph.node.process.pid)
    before = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + HEADROOM_BYTES, before[1]))
    try:
        seen = len(graph.node.output)
        assert not graph.configure()
        assert graph.state() == "unconfigured"
        assert "out of memory" in graph.node.output[seen:]
        assert graph.next_diagnostics()["Memory"].level == ERROR
    finally:
        process.rlimit(psutil.RLIMIT_AS, before)
    assert active(graph).send(**SHORT).outcome()[0] == SUCCEEDED
    assert graph.next_diagnostics()["Memory"].level != ERROR


def test_a_disc_that_hangs_holds_up_neither_services_nor_goals_nor_transitions(graph, folder):
    active(graph)
    # Make sure that another draft than the hanging one is the resident one.
    assert graph.send(draft="resident", **SHORT).outcome()[0] == SUCCEEDED
    (folder / HANGING_DISC).touch()
    late = Duration(nanosec=300_000_000)
    _, result = graph.send(draft="hanging", time_limit=late, **SHORT).outcome()
    assert result.finish_reason == Generate.Result.TIME_LIMIT
    assert draft(graph, "hanging").state == DraftInfo.LOADING
    assert graph.send(**SHORT).outcome()[0] == SUCCEEDED

    waiting = graph.send(draft="hanging", **SHORT)
    assert waiting.accepted
    pin = PinDraft.Request(draft="resident", pin=True)
    graph.client(PinDraft, "pin_draft").call_async(pin)  # waits for what the worker waits for
    assert draft(graph, "hanging").state == DraftInfo.LOADING
    assert graph.state() == "active"
    assert graph.deactivate()
    assert waiting.outcome()[0] == ABORTED
    assert graph.cleanup()
    (folder / HANGING_DISC).unlink()
    assert active(graph).send(draft="hanging", **SHORT).outcome()[0] == SUCCEEDED


def test_leaping_clocks_change_no_time_limit_and_no_diagnostics(graph):
    active(graph)
    half = Duration(nanosec=500_000_000)
    _, result = graph.send_long(draft="none", time_limit=half, max_new_tokens=3000).outcome()
    assert result.finish_reason == Generate.Result.TIME_LIMIT
    assert 0 < result.stats.generated_tokens < 3000
    assert values(graph.next_diagnostics()["Generation"])["lifecycle_state"] == "active"


def test_the_node_has_gone_through_all_of_it(graph):
    output = graph.node.output
    assert graph.node.alive
    assert output.count("Traceback") == output.count("MemoryError: an injected fault")
    graph.node.send_signal()
    assert graph.node.wait() == 0
