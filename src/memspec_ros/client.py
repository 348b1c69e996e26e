"""A client of the node: lifecycle transitions, and goals whose text streams to a callback.

Both `generate.py` and `demo.py` are made of it.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rclpy
from action_msgs.msg import GoalStatus
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.action import ActionClient

from memspec_msgs.action import Generate

TICK_SECONDS = 0.1

SETTLE_SECONDS = 0.3
"""After a service is found here, until its server has found us: an answer before that is lost."""

RETRY_SECONDS = 5.0
VANISHED_SECONDS = 3.0


class ClientError(Exception):
    """What keeps a client from its answer, in a sentence for its user."""


@dataclass(frozen=True)
class Outcome:
    """How a goal ended: its result, and whether it was cancelled or aborted."""

    result: Generate.Result
    cancelled: bool
    aborted: bool


class Streamer:
    """Turns feedback, of which some may be lost, into the whole text, written in order."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._written = ""
        self._next = 0

    def feedback(self, feedback: Generate.Feedback) -> None:
        """Write what is new; after a loss, wait for the result."""
        if feedback.sequence == self._next:
            self._next += 1
            self._put(feedback.text)

    def finish(self, text: str) -> None:
        """Write what the feedback did not bring of the result's text."""
        if not text.startswith(self._written):
            self._put("\n")
            self._written = ""
        self._put(text[len(self._written) :])

    def _put(self, text: str) -> None:
        self._written += text
        if text:
            self._write(text)


class NodeClient:
    """Talks to the node called `node_name` (with its namespace). Wait for nothing in callbacks.

    Every wait ends early, with `ClientError`, once `interrupted` is set or `gone` says that the
    node's process has ended.
    """

    def __init__(
        self,
        node_name: str,
        interrupted: threading.Event,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self.node_name = node_name
        self._interrupted = interrupted
        self._gone = gone
        # Each service of its own is one thing more to look at whenever a message wakes the client.
        self._node = rclpy.create_node(
            f"memspec_client_{os.getpid()}",
            start_parameter_services=False,
        )
        self._action = ActionClient(self._node, Generate, f"{node_name}/generate")
        self._get_state = self._node.create_client(GetState, f"{node_name}/get_state")
        self._change_state = self._node.create_client(ChangeState, f"{node_name}/change_state")

    def close(self) -> None:
        """Free the client's side of the communication."""
        self._action.destroy()
        self._node.destroy_node()

    def wait_for_node(self, timeout_seconds: float) -> None:
        """Wait until the node's lifecycle services are there."""
        self._wait_until(
            self._change_state.service_is_ready,
            timeout_seconds,
            f"There is no node {self.node_name} after {timeout_seconds:g} s. Is it started, and in "
            "the same ROS_DOMAIN_ID?",
        )

    def wait_for_action(self, timeout_seconds: float) -> None:
        """Wait until the node's action is there, which is once it has been configured."""
        self._wait_until(
            self._action.server_is_ready,
            timeout_seconds,
            f"There is no action {self.node_name}/generate after {timeout_seconds:g} s. "
            "Is the node started and configured, and in the same ROS_DOMAIN_ID?",
        )

    def state(self) -> str:
        """Return the label of the node's lifecycle state; empty if it does not say."""
        if not self._get_state.service_is_ready():
            return ""
        response = self._await(self._get_state.call_async(GetState.Request()), RETRY_SECONDS)
        return "" if response is None else str(response.current_state.label)

    def configure(self, timeout_seconds: float) -> bool:
        """Have the node load its models; return whether it did."""
        return self._transit(Transition.TRANSITION_CONFIGURE, "inactive", timeout_seconds)

    def activate(self, timeout_seconds: float) -> bool:
        """Have the node accept goals; return whether it does."""
        return self._transit(Transition.TRANSITION_ACTIVATE, "active", timeout_seconds)

    def generate(self, goal: Generate.Goal, write: Callable[[str], None]) -> Outcome:
        """Send a goal, write its text as it comes, and return how it ended.

        Once interrupted, cancels the goal and returns its partial result.
        """
        stream = Streamer(write)
        accepted = self._action.send_goal_async(
            goal, feedback_callback=lambda message: stream.feedback(message.feedback)
        )
        handle = self._await(accepted, 30.0)
        if handle is None:
            raise ClientError(f"The node {self.node_name} does not answer.")
        if not handle.accepted:
            raise ClientError(self._rejection())
        response = self._await_result(handle)
        stream.finish(response.result.text)
        return Outcome(
            response.result,
            cancelled=response.status == GoalStatus.STATUS_CANCELED,
            aborted=response.status == GoalStatus.STATUS_ABORTED,
        )

    def _rejection(self) -> str:
        state = self.state()
        if state and state != "active":
            return f"The node {self.node_name} rejected the goal: it is {state}, not active."
        return f"The node {self.node_name} rejected the goal; its log says why."

    def _await_result(self, handle: Any) -> Any:
        future = handle.get_result_async()
        cancelling = False
        last_seen = time.monotonic()
        while not future.done():
            rclpy.spin_until_future_complete(self._node, future, timeout_sec=TICK_SECONDS)
            if self._interrupted.is_set() and not cancelling:
                cancelling = True
                handle.cancel_goal_async()
            if self._action.server_is_ready():
                last_seen = time.monotonic()
            elif self._gone() or time.monotonic() - last_seen > VANISHED_SECONDS:
                raise ClientError(f"The node {self.node_name} has gone.")
        return future.result()

    def _transit(self, transition: int, reached: str, timeout_seconds: float) -> bool:
        request = ChangeState.Request(transition=Transition(id=transition))
        future = self._change_state.call_async(request)
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            response = self._await(future, RETRY_SECONDS)
            if response is not None:
                return bool(response.success)
            if self.state() == reached:
                # The node is there; its answer was lost.
                return True
        return False

    def _await(self, future: Any, timeout_seconds: float) -> Any:
        """Return a future's result, or None after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not future.done() and time.monotonic() < deadline:
            self._check_interrupted()
            rclpy.spin_until_future_complete(self._node, future, timeout_sec=TICK_SECONDS)
        return future.result() if future.done() else None

    def _wait_until(self, ready: Callable[[], bool], timeout_seconds: float, failure: str) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not ready():
            self._check_interrupted()
            if time.monotonic() > deadline:
                raise ClientError(failure)
            rclpy.spin_once(self._node, timeout_sec=TICK_SECONDS)
        time.sleep(SETTLE_SECONDS)

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise ClientError("Interrupted.")
        if self._gone():
            raise ClientError(f"The node {self.node_name} has ended.")
