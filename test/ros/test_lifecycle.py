"""Transitions of a real node: what each does, and what answers meanwhile."""

import time

from action_msgs.msg import GoalStatus
from lifecycle_msgs.msg import Transition
from ros_harness import default_drafts, until, values

from memspec_msgs.action import Generate
from memspec_msgs.msg import DraftInfo

CONFIGURE = Transition.TRANSITION_CONFIGURE
MIB = 1024 * 1024


def test_a_life_from_unconfigured_to_finalized(start):
    graph = start()
    assert graph.state() == "unconfigured"
    assert graph.wait_status("unconfigured").resident_capacity == 0
    assert graph.next_diagnostics()["Generation"].level == b"\x00"

    # What does not exist in this state is refused, and the node lives.
    assert not graph.activate()
    assert not graph.transit(Transition.TRANSITION_ON_CONFIGURE_SUCCESS)
    assert not graph.transit(99)
    assert graph.state() == "unconfigured"

    assert graph.configure(), graph.node.output
    status = graph.wait_status("inactive")
    assert (status.resident_capacity, status.queue_capacity) == (2, 8)
    assert status.budget_bytes > status.used_bytes > 0
    assert not graph.send(prompt="Hi").accepted, "a goal was accepted while inactive"
    until(lambda: "Rejected a goal" in graph.node.output)

    began = time.monotonic()
    assert graph.activate()
    assert time.monotonic() - began < 1.0
    graph.wait_status("active")
    assert graph.send(prompt="Hi", max_new_tokens=1).outcome()[0] == GoalStatus.STATUS_SUCCEEDED

    assert graph.transit(Transition.TRANSITION_ACTIVE_SHUTDOWN)
    graph.wait_status("finalized")
    assert not graph.send(prompt="Hi").accepted
    graph.node.send_signal()
    assert graph.node.wait() == 0
    assert "Traceback" not in graph.node.output


def test_everything_answers_while_models_load(start):
    graph = start()
    assert graph.state() == "unconfigured"
    loading = graph.transit_async(CONFIGURE)
    until(lambda: graph.state() == "configuring")

    answers = []
    while not loading.done():
        began = time.monotonic()
        assert graph.state() in ("configuring", "inactive")
        assert graph.get_parameter("queue_size") == 8
        # A second transition is refused, not queued and not fatal.
        if not loading.done():
            assert not graph.transit(CONFIGURE)
        answers.append(time.monotonic() - began)
        time.sleep(0.05)

    assert loading.result().success, graph.node.output
    assert len(answers) > 2
    assert max(answers) < 3.0
    assert len(graph.diagnostics) >= 2, "no diagnostics while loading"
    assert graph.state() == "inactive"


def test_deactivate_in_mid_goal_returns_the_partial_text(start):
    graph = start(queue_size=2)
    graph.bring_up()
    running = graph.send_long()
    running.wait_feedback(2)
    waiting = [graph.send_long(), graph.send_long()]
    for goal in (running, *waiting):
        assert goal.accepted
        goal.ask_result()
    assert graph.next_diagnostics()["Generation"].level == b"\x01", "the queue is full"

    assert graph.deactivate()

    status, result = running.outcome(5.0)
    assert status == GoalStatus.STATUS_ABORTED
    assert result.finish_reason == Generate.Result.ABORTED
    assert "deactivated" in result.error
    assert result.text.startswith(running.feedback[0].text)
    assert result.stats.generated_tokens > 0
    for goal in waiting:
        status, result = goal.outcome(5.0)
        assert (status, result.text) == (GoalStatus.STATUS_ABORTED, "")
    goal_id = running.handle.goal_id
    until(lambda: any(c.last for c in graph.chunks if c.goal_id == goal_id))

    # The models have stayed loaded.
    assert graph.activate()
    assert graph.send(prompt="Hi", max_new_tokens=1).outcome()[0] == GoalStatus.STATUS_SUCCEEDED


def test_cleanup_frees_the_memory_and_configure_works_again(start):
    graph = start()
    named = [(draft.name, draft.path, draft.state) for draft in graph.list_drafts()]
    graph.bring_up()
    assert [(draft.name, draft.path) for draft in graph.list_drafts()] == [d[:2] for d in named]
    graph.send(prompt="Hi", max_new_tokens=4).outcome()
    assert graph.deactivate()
    loaded = graph.node.resident_bytes()
    assert graph.cleanup()
    freed = graph.node.resident_bytes()
    listed = [(draft.name, draft.path, draft.state) for draft in graph.list_drafts()]
    assert listed == named
    assert [draft[0] for draft in named] == [name for name in default_drafts() if name]
    assert {draft[2] for draft in named} <= {DraftInfo.STORED}
    assert graph.wait_status("unconfigured").used_bytes == 0

    assert graph.set_parameter("queue_size", 3) == (True, "")
    assert graph.configure(), graph.node.output
    assert graph.wait_status("inactive").queue_capacity == 3
    assert graph.cleanup()
    again = graph.node.resident_bytes()

    model = values(graph.next_diagnostics()["Memory"])
    assert model["target_mib"] == "0"
    assert loaded - freed > 50 * MIB, f"{loaded / MIB:.0f} MiB, then {freed / MIB:.0f} MiB"
    # What the allocator keeps varies; a second set of models would be several times this.
    assert again - freed < 150 * MIB, f"{freed / MIB:.0f} MiB, then {again / MIB:.0f} MiB"
