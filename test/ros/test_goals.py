"""Goals over a real node: what they return, stream, refuse, and leave behind."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Duration
from ros_harness import COUNTING, Graph, NodeProcess, environment, new_domain, until, values

from memspec_msgs.action import Generate
from memspec_msgs.msg import ChatMessage

SUCCEEDED = GoalStatus.STATUS_SUCCEEDED
CANCELED = GoalStatus.STATUS_CANCELED
ABORTED = GoalStatus.STATUS_ABORTED
RESULT = Generate.Result


def chunks_of(graph, goal):
    goal_id = goal.handle.goal_id
    until(lambda: any(c.last for c in graph.chunks if c.goal_id == goal_id))
    return [c for c in graph.chunks if c.goal_id == goal_id]


def idle(graph):
    until(lambda: values(graph.next_diagnostics()["Generation"])["running"] == "false")


def test_a_goal_returns_streams_and_publishes_the_same_text(active):
    goal = active.send(prompt="Name three parts of a robot.", max_new_tokens=24)
    status, result = goal.outcome()

    assert status == SUCCEEDED
    assert result.text
    assert result.error == ""
    assert result.finish_reason in (RESULT.LENGTH, RESULT.END_OF_SEQUENCE)
    stats = result.stats
    assert stats.generated_tokens == len(result.token_ids) <= 24
    assert stats.iterations > 0
    assert stats.prompt_tokens > 5
    assert stats.tokens_per_second > 0
    assert sum(usage.generated_tokens for usage in stats.drafts) >= stats.generated_tokens

    chunks = chunks_of(active, goal)
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [i for chunk in chunks for i in chunk.token_ids] == list(result.token_ids)
    assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish_reason == result.finish_reason

    # Feedback that is still queued when the result arrives is lost, so not all of it need be here.
    assert goal.feedback
    heard = [feedback.sequence for feedback in goal.feedback]
    assert heard == sorted(set(heard))
    texts = {chunk.sequence: chunk.text for chunk in chunks}
    assert all(feedback.text == texts[feedback.sequence] for feedback in goal.feedback)


def streamed(graph, period):
    """Return a long answer's stats, its chunks, and the seconds from the first to the last."""
    assert graph.set_parameter("stream_period", period) == (True, "")
    goal = graph.send(prompt=COUNTING, raw=True, max_new_tokens=60)
    status, result = goal.outcome()
    chunks = chunks_of(graph, goal)

    assert status == SUCCEEDED
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [i for chunk in chunks for i in chunk.token_ids] == list(result.token_ids)
    assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    stamps = [chunk.header.stamp for chunk in (chunks[0], chunks[-1])]
    first, last = (stamp.sec + stamp.nanosec * 1e-9 for stamp in stamps)
    return result.stats, chunks, last - first


def test_iterations_within_the_period_share_their_messages(active):
    default = active.get_parameter("stream_period")
    try:
        stats, chunks, _ = streamed(active, 0.0)
        assert len(chunks) == stats.iterations
        stats, chunks, seconds = streamed(active, default)
        assert len(chunks) <= min(stats.iterations, seconds / default + 3)
        stats, chunks, seconds = streamed(active, 1.0)
        assert len(chunks) <= seconds + 3
        assert len(chunks) < stats.iterations
    finally:
        assert active.set_parameter("stream_period", default) == (True, "")


@pytest.mark.parametrize("end", ["cancel", "deactivate", "time limit"])
def test_an_end_loses_nothing_that_was_held_back(active, end):
    assert active.set_parameter("stream_period", 1.0) == (True, "")
    try:
        limit = Duration(nanosec=300_000_000 if end == "time limit" else 0)
        goal = active.send_long(time_limit=limit)
        goal.wait_feedback()
        goal.ask_result()
        time.sleep(0.2)
        if end == "cancel":
            goal.handle.cancel_goal_async()
        if end == "deactivate":
            assert active.deactivate()
        _, result = goal.outcome()
        chunks = chunks_of(active, goal)

        assert "".join(chunk.text for chunk in chunks) == result.text
        assert [i for chunk in chunks for i in chunk.token_ids] == list(result.token_ids)
        assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
        assert chunks[-1].finish_reason == result.finish_reason
        assert len(chunks) < result.stats.iterations
    finally:
        if active.state() == "inactive":
            assert active.activate()
        assert active.set_parameter("stream_period", 0.05) == (True, "")


def test_messages_equal_the_same_prompt(active):
    _, one = active.send(prompt="Say hello.", max_new_tokens=8).outcome()
    messages = [ChatMessage(role="user", content="Say hello.")]
    _, other = active.send(messages=messages, max_new_tokens=8).outcome()

    assert one.token_ids == other.token_ids


def test_plain_decoding_takes_no_draft(active):
    # That its text is the same where arithmetic is exact is the core's to test.
    status, plain = active.send(prompt="Say hello.", max_new_tokens=8, draft="none").outcome()

    assert (status, plain.stats.drafted_tokens) == (SUCCEEDED, 0)
    assert [usage.draft for usage in plain.stats.drafts] == ["none"]
    assert plain.text


def test_sampling_with_a_seed_repeats_itself(active):
    fields = {"prompt": COUNTING, "raw": True, "max_new_tokens": 8, "temperature": 0.9}
    fields.update(top_p=0.95, top_k=50, seed=2**63)

    assert active.send(**fields).outcome()[1].text == active.send(**fields).outcome()[1].text


def test_cancel_returns_the_partial_text(active):
    goal = active.send_long()
    goal.wait_feedback(2)
    goal.ask_result()
    goal.handle.cancel_goal_async()
    status, result = goal.outcome()

    assert status == CANCELED
    assert result.finish_reason == RESULT.CANCELLED
    assert result.text.startswith(goal.feedback[0].text)
    assert 0 < result.stats.generated_tokens < 2000
    assert chunks_of(active, goal)[-1].finish_reason == RESULT.CANCELLED


def test_cancel_of_a_waiting_goal_is_answered_at_once(active):
    running = active.send_long()
    waiting = active.send_long()
    assert waiting.accepted
    running.wait_feedback()
    waiting.handle.cancel_goal_async()
    status, result = waiting.outcome(5.0)

    assert status == CANCELED
    assert (result.text, result.finish_reason) == ("", RESULT.CANCELLED)
    running.handle.cancel_goal_async()
    assert running.outcome()[0] == CANCELED


def test_a_time_limit_ends_a_goal_with_what_there_is(active):
    goal = active.send_long(time_limit=Duration(sec=1, nanosec=500_000_000))
    began = time.monotonic()
    status, result = goal.outcome()

    assert status == SUCCEEDED
    assert result.finish_reason == RESULT.TIME_LIMIT
    assert time.monotonic() - began < 5.0


def test_a_stop_string_is_left_out(active):
    status, result = active.send_long(stop=[" 20,", " 15,"]).outcome()

    assert status == SUCCEEDED
    assert result.finish_reason == RESULT.STOP_STRING
    assert result.text.rstrip().endswith("14,")


def test_a_hundred_goals_at_once_are_all_answered(active):
    rejected_before = int(values(active.next_diagnostics()["Generation"])["goals_rejected"])
    goals = [active.send(prompt=COUNTING, raw=True, max_new_tokens=2) for _ in range(100)]
    accepted = [goal for goal in goals if goal.accepted]

    assert 1 <= len(accepted) < 100
    assert {goal.outcome()[0] for goal in accepted} == {SUCCEEDED}
    counts = values(active.next_diagnostics()["Generation"])
    assert int(counts["goals_rejected"]) - rejected_before == 100 - len(accepted)
    assert counts["queue"] == "0"
    assert "queue_size" in active.node.output


REFUSED = {
    "empty prompt": ({"prompt": ""}, "The prompt is empty"),
    "blank prompt": ({"prompt": " \n"}, "The prompt is empty"),
    "prompt and messages": (
        {"prompt": "a", "messages": [ChatMessage(role="user", content="b")]},
        "not both",
    ),
    "no role": ({"messages": [ChatMessage(role="", content="b")]}, "no role"),
    "NaN temperature": ({"prompt": "a", "temperature": math.nan}, "temperature is nan"),
    "infinite temperature": ({"prompt": "a", "temperature": math.inf}, "temperature is inf"),
    "negative temperature": ({"prompt": "a", "temperature": -1.0}, "temperature is -1.0"),
    "top_p above 1": ({"prompt": "a", "top_p": 1.5}, "top_p is 1.5"),
    "negative time": ({"prompt": "a", "time_limit": Duration(sec=-1)}, "time_limit is -1.0"),
    "absurd length": ({"prompt": "a", "max_new_tokens": 2**32 - 1}, "max_new_tokens is 4294967295"),
    "unknown draft": ({"prompt": "a", "draft": "no_such"}, "Unknown draft 'no_such'"),
    "empty stop": ({"prompt": "a", "stop": [""]}, "stop string"),
    "many stops": ({"prompt": "a", "stop": ["x"] * 100}, "stop strings"),
    "huge prompt": ({"prompt": "a" * 32_000_000}, "longer than"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_goal_out_of_range_is_rejected_with_the_reason_in_the_log(active, case):
    fields, reason = REFUSED[case]
    seen = len(active.node.output)

    assert not active.send(**fields).accepted
    until(lambda: reason in active.node.output[seen:], 5.0)


def test_the_node_lives_on_after_what_it_refused(active):
    assert active.send(prompt="Say hello.", max_new_tokens=2).outcome()[0] == SUCCEEDED
    assert "Traceback" not in active.node.output


def test_a_prompt_that_is_too_long_aborts_with_the_reason(active):
    status, result = active.send(prompt="word " * 20_000, max_new_tokens=2).outcome()

    assert status == ABORTED
    assert result.finish_reason == RESULT.ABORTED
    assert "tokens" in result.error


def test_odd_text_is_taken(active):
    prompt = "Grüße, 世界 🤖 \x01 \u202e"
    assert active.send(prompt=prompt, max_new_tokens=2).outcome()[0] == SUCCEEDED


def test_services_parameters_and_diagnostics_answer_during_a_goal(active):
    goal = active.send_long()
    goal.wait_feedback()
    began = time.monotonic()

    assert active.state() == "active"
    assert isinstance(active.list_drafts(), list)
    assert active.get_parameter("queue_size") == 8
    assert active.set_parameter("scheduling_interval", 5) == (True, "")
    assert not active.pin_draft("no_such", True).success
    assert time.monotonic() - began < 5.0
    until(lambda: active.statuses[-1].active != "")
    assert values(active.next_diagnostics()["Generation"])["running"] == "true"
    goal.handle.cancel_goal_async()
    assert goal.outcome()[0] == CANCELED
    until(lambda: active.statuses[-1].active == "")


CLIENT_THAT_VANISHES = """
import os, rclpy
from rclpy.action import ActionClient
from memspec_msgs.action import Generate
rclpy.init()
node = rclpy.create_node("vanishing")
client = ActionClient(node, Generate, "/memspec/generate")
assert client.wait_for_server(30.0)
feedback = []
goal = Generate.Goal(prompt="1, 2, 3, 4,", raw=True, max_new_tokens=40)
sent = client.send_goal_async(goal, feedback_callback=feedback.append)
rclpy.spin_until_future_complete(node, sent)
result = sent.result().get_result_async()
while not feedback:
    rclpy.spin_once(node, timeout_sec=0.1)
os._exit(7)
"""


def test_a_client_that_vanishes_in_mid_goal_hurts_nobody(active):
    vanished = subprocess.run(
        [sys.executable, "-c", CLIENT_THAT_VANISHES],
        env=environment(active.domain),
        timeout=60,
        check=False,
    )

    assert vanished.returncode == 7
    idle(active)
    assert active.send(prompt="Say hello.", max_new_tokens=2).outcome()[0] == SUCCEEDED
    assert active.node.alive
    assert "Traceback" not in active.node.output


def test_many_short_goals_do_not_grow_the_process(active):
    def run(count):
        for _ in range(count):
            goal = active.send(prompt="Hi", raw=True, max_new_tokens=1)
            assert goal.outcome()[0] == SUCCEEDED

    run(20)
    before = active.node.resident_bytes()
    run(60)
    growth = active.node.resident_bytes() - before

    # A finished goal is kept for a while, for a client that asks for its result late.
    assert growth < 60 * 50_000, f"{growth / 60:.0f} bytes a goal"


def test_the_generate_command_streams_the_answer(active):
    done = generate(active, "Say hello.", "--max-new-tokens", "6")

    assert done.returncode == 0
    assert done.stdout.strip()
    assert "tokens/s" in done.stderr


def test_the_generate_command_says_what_is_wrong(active):
    assert "The prompt is empty" in generate(active, " ", code=2).stderr
    assert "temperature is nan" in generate(active, "a", "--temperature", "nan", code=2).stderr
    assert "rejected" in generate(active, "a", "--draft", "no_such", code=1).stderr
    absent = generate(active, "a", "--node", "/absent", "--wait", "1", code=1)
    assert "/absent/generate" in absent.stderr


def test_ctrl_c_cancels_the_goal_of_the_generate_command(active):
    command = [sys.executable, "-m", "memspec_ros.generate", COUNTING, "--raw"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(active.domain),
    )
    os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == 130
    assert b"cancelled" in errors
    assert b"Traceback" not in errors
    idle(active)


def test_the_generate_command_takes_arguments_of_ros(active):
    command = [sys.executable, "-m", "memspec_ros.generate", COUNTING, "--raw"]
    ros = ["--ros-args", "-r", "__ns:=/robot1", "--enclave", "/memspec_client"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "2000", *ros],
        stdout=subprocess.PIPE,
        env=environment(active.domain),
    )
    expected = (f"memspec_client_{process.pid}", "/robot1", "/memspec_client")
    try:
        until(lambda: expected in active.ros.get_node_names_and_namespaces_with_enclaves())
        assert os.read(process.stdout.fileno(), 1)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    idle(active)

    ros = ["--ros-args", "--log-level", "debug"]
    assert "[DEBUG]" in generate(active, "a", "--max-new-tokens", "1", *ros).stderr
    for wrong in (["--log-level", "loudly"], ["--no-such"]):
        assert wrong[-1] in generate(active, "a", "--ros-args", *wrong, code=2).stderr


def generate(graph, *arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "memspec_ros.generate", *arguments],
        env=environment(graph.domain),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_middleware_that_refuses_to_publish_costs_no_result(tmp_path):
    command = [str(Path(__file__).with_name("refusing_node.py"))]
    domain = new_domain()
    with NodeProcess(domain, tmp_path, command=command) as node, Graph(domain, node) as graph:
        graph.bring_up()
        status, result = graph.send(prompt=COUNTING, raw=True, max_new_tokens=4).outcome()

        assert (status, result.error, len(result.token_ids)) == (SUCCEEDED, "", 4)
        running = graph.send_long()
        running.wait_feedback()
        running.handle.cancel_goal_async()
        assert running.outcome()[0] == CANCELED
        assert "cannot publish data" in node.output
