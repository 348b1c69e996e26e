"""The examples, each a process beside one real node."""

import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from runpy import run_path
from signal import SIGINT

import pytest
import rclpy
from rclpy.signals import SignalHandlerOptions
from ros_harness import PATIENCE, ROOT, environment, until
from std_msgs.msg import String

from memspec_msgs.msg import FinishReason
from memspec_ros.client import ClientError, NodeClient
from memspec_ros.sentences import SentenceCutter

EXAMPLES = ROOT / "examples"


@contextmanager
def example(domain, name, folder, *parameters):
    """Run an example; at the end it must leave without a traceback."""
    log = folder / f"{name}.log"
    arguments = [argument for parameter in parameters for argument in ("-p", parameter)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / name), "--ros-args", *arguments],
            env=environment(domain),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.send_signal(SIGINT)
        code = process.wait(PATIENCE)
    assert code == 0, log.read_text()
    assert "Traceback" not in log.read_text()


def heard(graph, topic):
    """Return the list to which the texts of a topic are appended, once it has a publisher."""
    texts = []
    graph.ros.create_subscription(String, topic, lambda message: texts.append(message.data), 100)
    until(lambda: graph.ros.count_publishers(topic) > 0)
    return texts


def test_the_newest_task_is_planned_and_an_older_one_cancelled(active, tmp_path):
    with example(active.domain, "plan_node.py", tmp_path, "max_new_tokens:=2000", "request:=''"):
        plans = heard(active, "/planner/plan")
        tasks = active.ros.create_publisher(String, "/planner/task", 10)
        until(lambda: tasks.get_subscription_count() > 0)
        before = len(active.chunks)
        # The planner may not have found the node yet: it asks again until it has.
        tasks.publish(String(data="Write a very long story about the sea, in twenty chapters."))
        until(lambda: len(active.chunks) > before, 120.0)
        first = active.chunks[-1].goal_id
        tasks.publish(String(data="Say hello in one word."))
        until(lambda: plans, 120.0)

        ends = [c for c in active.chunks if c.goal_id == first and c.last]
        assert [c.finish_reason for c in ends] == [FinishReason.CANCELLED]
        others = "".join(c.text for c in active.chunks[before:] if c.goal_id != first)
        assert plans == [others]


def test_the_speaker_says_whole_sentences_of_each_goal(active, tmp_path):
    with example(active.domain, "speak.py", tmp_path):
        said = heard(active, "/speaker/sentence")
        # All three must have found each other; only a sentence that arrives shows that.
        deadline = time.monotonic() + PATIENCE
        while not said:
            assert time.monotonic() < deadline, "no sentence was ever heard"
            active.send(prompt="Say hello.", max_new_tokens=8).outcome()
            time.sleep(0.5)

        prompt = "The robot went to the door. It stopped. It turned left. It"
        _, result = active.send(prompt=prompt, raw=True, max_new_tokens=60).outcome()
        cutter = SentenceCutter()
        sentences = [s.strip() for s in (*cutter.add(result.text), *cutter.flush())]
        assert len(sentences) >= 2, result.text
        until(lambda: said[-len(sentences) :] == sentences)


def converse(graph, lines, *options):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "chat.py"), *options],
        input=lines,
        env=environment(graph.domain),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


class RecordingClient(NodeClient):
    """A client that remembers which messages it sent."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sent = []

    def generate(self, goal, write):
        self.sent.append([(message.role, message.content) for message in goal.messages])
        return super().generate(goal, write)


@pytest.fixture
def client(active):
    rclpy.init(args=[], domain_id=active.domain, signal_handler_options=SignalHandlerOptions.NO)
    client = RecordingClient("/memspec", threading.Event())
    client.wait_for_action(PATIENCE)
    yield client
    client.close()
    rclpy.try_shutdown()


def test_a_conversation_is_a_list_of_messages(client):
    chat = run_path(str(EXAMPLES / "chat.py"))["Chat"](client, "You are a robot.")
    written = []
    first = chat.ask("Hello.", written.append)
    second = chat.ask("Where are you?", lambda _: None)

    assert "".join(written) == first != ""
    told = [("system", "You are a robot."), ("user", "Hello.")]
    assert client.sent[0] == told
    told += [("assistant", first), ("user", "Where are you?")]
    assert client.sent[1] == told
    assert [message["role"] for message in chat.messages] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    assert chat.messages[-1]["content"] == second


def test_a_turn_that_fails_is_taken_back(client):
    chat = run_path(str(EXAMPLES / "chat.py"))["Chat"](client)
    with pytest.raises(ClientError):
        chat.ask("word " * 4000, lambda _: None)

    assert chat.messages == []
    assert chat.ask("Hello.", lambda _: None) != ""


def test_a_conversation_in_a_terminal(active):
    done = converse(active, "Hello.\n\nWhere are you?\n", "--wait", "60")

    assert done.returncode == 0, done.stderr
    answers = [answer.strip() for answer in done.stdout.split("\n> ")]
    assert len(answers) == 4
    assert [bool(answer.strip("> ")) for answer in answers] == [True, False, True, False]


@pytest.mark.parametrize("name", ["plan_node.py", "speak.py", "chat.py"])
def test_an_example_can_be_run_as_it_is(name):
    assert (EXAMPLES / name).stat().st_mode & 0o111
    assert (EXAMPLES / name).read_text().startswith("#!/usr/bin/env python3\n")


def test_a_conversation_without_a_node_ends_with_a_sentence(active):
    done = converse(active, "Hello\n", "--node", "/nobody", "--wait", "1")

    assert done.returncode == 1
    assert "There is no action /nobody/generate" in done.stderr
