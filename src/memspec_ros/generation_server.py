"""The action `~/generate`: goals in, generations out.

Each accepted goal has one thread of the executor, which waits for the end of its generation; torch
never runs there. What iterations brought is published by the runtime's worker between two of
them: handing it to a thread that competes with the decoder for the cores costs more.
"""

import inspect
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.impl.rcutils_logger import RcutilsLogger
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from unique_identifier_msgs.msg import UUID

from memspec_core.clock import SystemClock
from memspec_core.errors import MemSpecError, NotAcceptingError
from memspec_core.iteration import Iteration
from memspec_core.request import FinishReason, GenerationResult
from memspec_msgs.action import Generate
from memspec_ros.coalescing import Coalescer, Piece
from memspec_ros.conversions import (
    feedback_from_piece,
    request_from_goal,
    result_from_generation,
)
from memspec_ros.publishing import published
from memspec_ros.token_stream import TokenStream

if TYPE_CHECKING:
    from memspec_core.generation import Generation
    from memspec_core.runtime import Runtime

REQUEST_DEPTH = 256
"""Requests kept while the server is busy: a hundred goals at once must all be answered."""

STATUS_DEPTH = 64
"""Statuses kept on their way: with one, Fast DDS may refuse the next while it sends the last."""

CANCELING_WAIT_SECONDS = 1.0


class GenerationServer:
    """The action server of one node; `runtime` gives the runtime while the node is configured.

    `stream_period` gives the seconds between two messages of a goal; a goal that has begun keeps
    its own.
    """

    def __init__(
        self,
        node: Node,
        runtime: Callable[[], "Runtime | None"],
        tokens: TokenStream,
        stream_period: Callable[[], float],
    ) -> None:
        self._logger = node.get_logger()
        self._runtime = runtime
        self._tokens = tokens
        self._stream_period = stream_period
        self._generations: dict[bytes, Generation | None] = {}
        self._ended = threading.Condition()
        requests = QoSProfile(depth=REQUEST_DEPTH)
        self._server = ActionServer(
            node,
            Generate,
            "~/generate",
            self._execute_unsubmitted,
            # One callback at a time: nothing comes between the check of a goal and its submission.
            callback_group=MutuallyExclusiveCallbackGroup(),
            goal_callback=self._on_goal,
            handle_accepted_callback=self._on_accepted,
            cancel_callback=self._on_cancel,
            goal_service_qos_profile=requests,
            result_service_qos_profile=requests,
            cancel_service_qos_profile=requests,
            feedback_pub_qos_profile=QoSProfile(depth=REQUEST_DEPTH),
            status_pub_qos_profile=QoSProfile(
                depth=STATUS_DEPTH, durability=DurabilityPolicy.TRANSIENT_LOCAL
            ),
            result_timeout=_result_timeout_seconds(),
        )

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no goal is being executed; return whether that came to be."""
        with self._ended:
            return self._ended.wait_for(lambda: not self._generations, timeout_seconds)

    def running_goal(self) -> UUID:
        """Return the id of the goal that the worker is at, or zeros when it is at none."""
        runtime = self._runtime()
        running = None if runtime is None else runtime.running
        with self._ended:
            for key, generation in self._generations.items():
                if running is not None and generation is running:
                    return UUID(uuid=list(key))
        return UUID()

    def _on_goal(self, goal: Generate.Goal) -> GoalResponse:
        runtime = self._runtime()
        try:
            if runtime is None:
                raise NotAcceptingError("The node is not configured.")
            runtime.check(request_from_goal(goal))
        except MemSpecError as error:
            self._logger.warning(f"Rejected a goal: {error}")
            if runtime is not None:
                runtime.count_rejected()
            return GoalResponse.REJECT
        except Exception:
            self._logger.error(f"Rejected a goal for a fault here:\n{traceback.format_exc()}")
            return GoalResponse.REJECT
        return GoalResponse.ACCEPT

    def _on_accepted(self, goal_handle: ServerGoalHandle) -> None:
        generation: Generation | None = None
        error = "The node is not configured."
        runtime = self._runtime()
        stream = self._stream(goal_handle)
        with self._ended:  # as one step: the worker may ask at once which goal it is at
            try:
                if runtime is not None:
                    request = request_from_goal(goal_handle.request)
                    generation = runtime.submit(request, stream.publish)
            except MemSpecError as refusal:
                # The gate closed, or the worker ended, after the goal was accepted.
                error = str(refusal)
            self._generations[_key(goal_handle)] = generation
        if generation is None:
            self._start(goal_handle, partial(self._execute_unsubmitted, error=error))
        else:
            self._start(goal_handle, partial(self._execute, generation, stream))

    def _stream(self, goal_handle: ServerGoalHandle) -> "_Stream":
        pieces = Coalescer(self._stream_period(), SystemClock())
        return _Stream(goal_handle, pieces, self._tokens, self._logger)

    def _start(self, goal_handle: ServerGoalHandle, callback: Callable[..., Any]) -> None:
        if not published(lambda: goal_handle.execute(callback), self._logger, "a goal's start"):
            # rclpy changed the state, failed to publish it, and so never came to this.
            self._server.notify_execute(goal_handle, callback)

    def _on_cancel(self, goal_handle: ServerGoalHandle) -> CancelResponse:
        with self._ended:
            generation = self._generations.get(_key(goal_handle))
        if generation is not None:
            generation.cancel()
        return CancelResponse.ACCEPT

    def _execute(
        self, generation: "Generation", stream: "_Stream", goal_handle: ServerGoalHandle
    ) -> Any:
        return self._finish(goal_handle, stream, generation.result())

    def _execute_unsubmitted(self, goal_handle: ServerGoalHandle, error: str = "") -> Any:
        stream = self._stream(goal_handle)
        result = GenerationResult("", (), FinishReason.ABORTED, error)
        return self._finish(goal_handle, stream, result)

    def _finish(
        self, goal_handle: ServerGoalHandle, stream: "_Stream", result: GenerationResult
    ) -> Any:
        try:
            if result.finish_reason is FinishReason.ABORTED:
                self._logger.error(f"A goal was aborted: {result.error}")
            stream.publish_end(result.finish_reason)
            message = result_from_generation(result)
            end = partial(_end, goal_handle, result.finish_reason)
            if not published(end, self._logger, "a goal's end"):
                self._server.notify_goal_done()
            return message
        finally:
            with self._ended:
                self._generations.pop(_key(goal_handle), None)
                self._ended.notify_all()


class _Stream:
    """Publishes one goal's iterations, joined to pieces, as feedback and as chunks."""

    def __init__(
        self,
        goal_handle: ServerGoalHandle,
        pieces: Coalescer,
        tokens: TokenStream,
        logger: RcutilsLogger,
    ) -> None:
        self._goal_handle = goal_handle
        self._pieces = pieces
        self._tokens = tokens
        self._logger = logger
        self._seconds = 0.0
        self._said_end = False

    def publish(self, iteration: Iteration) -> None:
        spent = iteration.seconds
        self._seconds += spent.decode + spent.prediction + spent.load_wait
        self._publish(self._pieces.add(iteration))

    def publish_end(self, reason: FinishReason) -> None:
        """Publish what is held back, and that the goal has ended, if no iteration said so."""
        self._publish(self._pieces.flush())
        if not self._said_end:
            self._tokens.publish_end(self._goal_handle.goal_id, self._pieces.sequence, reason)

    def _publish(self, piece: Piece | None) -> None:
        if piece is None:
            return
        rate = piece.newest.generated_tokens / self._seconds if self._seconds > 0 else 0.0
        feedback = feedback_from_piece(piece, rate)
        goal = self._goal_handle
        published(lambda: goal.publish_feedback(feedback), self._logger, "feedback")
        self._tokens.publish(goal.goal_id, piece)
        self._said_end = piece.newest.finish_reason is not None


def _result_timeout_seconds() -> int:
    """Return how long a finished goal is kept, about 2 KB each, for a client that asks late.

    ROS before Kilted counts from the acceptance of a goal: there it must exceed the longest wait
    in the queue and the longest goal together, or results are dropped. The default tells which.
    """
    default = inspect.signature(ActionServer.__init__).parameters["result_timeout"].default
    return 60 if default <= 60 else 3600


def _end(goal_handle: ServerGoalHandle, reason: FinishReason) -> None:
    """Bring a goal to its terminal state; nothing may follow but the callback's return."""
    if reason is FinishReason.CANCELLED and _await_canceling(goal_handle):
        goal_handle.canceled()
    elif reason in (FinishReason.CANCELLED, FinishReason.ABORTED):
        goal_handle.abort()
    else:
        goal_handle.succeed()


def _await_canceling(goal_handle: ServerGoalHandle) -> bool:
    """Wait for the state that rclpy sets after the cancel callback, and that `canceled` needs.

    A queued generation ends inside the cancel callback, and so before that.
    """
    deadline = time.monotonic() + CANCELING_WAIT_SECONDS
    while not goal_handle.is_cancel_requested and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(goal_handle.is_cancel_requested)


def _key(goal_handle: ServerGoalHandle) -> bytes:
    return bytes(goal_handle.goal_id.uuid)
