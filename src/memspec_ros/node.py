"""The managed node: what each lifecycle transition does, and nothing else.

Configure loads the models, activate opens the gate for goals, deactivate closes it, cleanup frees
the models. The parts that it is made of have a module each.
"""

import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # Before the slow imports: from here on a signal ends the process as it should.
    from memspec_ros.process import main as run_process

    raise SystemExit(run_process())

from lifecycle_msgs.msg import State
from lifecycle_msgs.srv import ChangeState
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup, ReentrantCallbackGroup
from rclpy.lifecycle import (
    LifecycleNode,
    LifecycleNodeMixin,
    LifecycleState,
    TransitionCallbackReturn,
)
from rclpy.node import Node

from memspec_core.errors import MemSpecError, is_out_of_memory
from memspec_ros.conversions import status_message
from memspec_ros.core_log import CoreLog
from memspec_ros.decision_stream import DecisionStream
from memspec_ros.diagnostics import Diagnostics, Limits, NodeState
from memspec_ros.generation_server import GenerationServer
from memspec_ros.parameters import NodeParameters
from memspec_ros.process import LAST_RESULTS_SECONDS
from memspec_ros.services import DraftServices
from memspec_ros.status import StatusPublisher
from memspec_ros.token_stream import TokenStream

if TYPE_CHECKING:
    from memspec_core.runtime import Runtime

DEACTIVATED = "The node was deactivated."
SHUT_DOWN = "The node is shutting down."


class MemSpecNode(LifecycleNode):
    """The node `memspec`. Spin it in an executor with several threads."""

    def __init__(self, **node_arguments: Any) -> None:
        Node.__init__(self, "memspec", **node_arguments)
        self._core_log = CoreLog(self.get_logger())
        self._core_log.attach()
        # LifecycleNode itself takes no group. In the default one a long configure would block the
        # parameter services, and get_state with them.
        LifecycleNodeMixin.__init__(self, callback_group=ReentrantCallbackGroup())
        self._runtime: Runtime | None = None
        self._server: GenerationServer | None = None
        self._decisions: DecisionStream | None = None
        self._failure: Exception | None = None
        self._process_ends = False
        self._transition_lock = threading.Lock()
        self._guard_change_state()
        self._node_parameters = NodeParameters(self, lambda: self._runtime)
        DraftServices(self, lambda: self._runtime, self._node_parameters.drafts)
        observers = MutuallyExclusiveCallbackGroup()
        self._status = StatusPublisher(self, observers, self._status_now)
        period = self._number("diagnostics_period")
        self._diagnostics = Diagnostics(self, observers, period, self._state_now)
        self._status.tell_change()

    def destroy_node(self) -> None:
        """Destroy the node; what the core logs goes where it went before."""
        self._core_log.detach()
        super().destroy_node()

    # Transitions, in the order of a node's life.

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load the models; on failure nothing is kept, and diagnostics say why."""
        return self._attempt("configure", lambda: self._configure(state))

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Open the gate: goals are accepted from here."""
        return self._attempt("activate", lambda: self._activate(state))

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Close the gate: goals end with their partial text, models stay loaded."""
        return self._attempt("deactivate", lambda: self._deactivate(state), fatal=True)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free all models."""
        return self._attempt("cleanup", lambda: self._release("The node was cleaned up."), True)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Close the gate and free all models, from any state; with the process they end anyway."""
        end = self._shut if self._process_ends else self._release
        return self._attempt("shutdown", lambda: end(SHUT_DOWN), fatal=True)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free all models after a transition that went wrong, and start anew."""
        self._attempt("error processing", lambda: self._release("The node had an error."))
        return TransitionCallbackReturn.SUCCESS

    def _configure(self, state: LifecycleState) -> None:
        # torch takes seconds to import; the node answers before.
        from memspec_core.runtime import Runtime

        settings = self._node_parameters.settings()
        decisions = self._decision_stream()
        super().on_configure(state)
        self._failure = None
        runtime = Runtime(
            settings,
            on_change=self._status.tell_change,
            on_decision=decisions.publish,
            drafts_may_fail=True,
        )
        self._runtime = runtime
        try:
            runtime.load()
        except BaseException:
            self._runtime = None
            runtime.close()
            raise
        self._diagnostics.set_period(settings.diagnostics_period)
        self.get_logger().info("Configured: the models are loaded.")

    def _decision_stream(self) -> DecisionStream:
        """Return it; the first call creates all that a node has from its first configure on."""
        # Once, and kept until the end: destroying entities while the executor spins crashes it.
        if self._server is None or self._decisions is None:
            self._server = GenerationServer(
                self,
                lambda: self._runtime,
                TokenStream(self),
                lambda: self._number("stream_period"),
            )
            self._decisions = DecisionStream(self, self._server.running_goal)
        return self._decisions

    def _activate(self, state: LifecycleState) -> None:
        if self._runtime is None:
            raise MemSpecError("The node is not configured.")
        super().on_activate(state)
        self._runtime.open()
        self._failure = None
        self.get_logger().info("Active: goals are accepted.")

    def _deactivate(self, state: LifecycleState) -> None:
        self._shut(DEACTIVATED)
        super().on_deactivate(state)
        self.get_logger().info("Inactive: the models stay loaded.")

    def _shut(self, reason: str) -> None:
        if self._runtime is not None:
            self._runtime.shut(reason)
        if not self.has_told_all(LAST_RESULTS_SECONDS):
            self.get_logger().error("Goals that have ended could not tell their clients in time.")

    def _release(self, reason: str) -> None:
        try:
            self._shut(reason)
        finally:
            runtime, self._runtime = self._runtime, None
            if runtime is not None:
                runtime.close()

    def _attempt(
        self, what: str, step: Callable[[], None], fatal: bool = False
    ) -> TransitionCallbackReturn:
        """Run one transition. rclpy would swallow an exception here without a word."""
        try:
            step()
        except MemSpecError as error:
            self._failure = error
            self.get_logger().error(f"Could not {what}: {error}")
            self.get_logger().debug(traceback.format_exc())
        except Exception as error:
            self._failure = error
            why = f"\n{traceback.format_exc()}"
            if is_out_of_memory(error):
                why = f" out of memory ({error!r})"
            self.get_logger().error(f"Could not {what}:{why}")
        else:
            return TransitionCallbackReturn.SUCCESS
        return TransitionCallbackReturn.ERROR if fatal else TransitionCallbackReturn.FAILURE

    # Transitions that nobody asked for by service: autostart, and the end of the process.

    def autostart(self) -> None:
        """Configure and activate, if the parameter says so."""
        if not self._node_parameters.value("autostart"):
            return
        with self._transition_lock:
            done = self.trigger_configure() == TransitionCallbackReturn.SUCCESS
            if done:
                self.trigger_activate()
        self._status.tell_change()

    def shut_down(self) -> None:
        """Take the node to its final state from any other, before the process ends.

        Also in mid-load or mid-goal.
        """
        self._process_ends = True
        while not self._transition_lock.acquire(timeout=0.1):
            # Again and again: the transition under way may only be about to load.
            runtime = self._runtime
            if runtime is not None:
                runtime.interrupt_load()
        try:
            if self._state_machine.current_state[0] != State.PRIMARY_STATE_FINALIZED:
                self.trigger_shutdown()
        finally:
            self._transition_lock.release()

    def has_told_all(self, timeout_seconds: float) -> bool:
        """Wait until every goal has its terminal state; return whether that came to be."""
        return self._server is None or self._server.wait_idle(timeout_seconds)

    def _guard_change_state(self) -> None:
        """Refuse transitions during a transition, and those that do not exist.

        rclpy before Kilted raises for these, which would end the executor; and a request named
        after the success of a transition would be obeyed in the middle of it.
        """
        service = self._service_change_state
        change_state = service.callback

        def guarded(
            request: ChangeState.Request, response: ChangeState.Response
        ) -> ChangeState.Response:
            asked = request.transition.label or request.transition.id
            if not self._transition_lock.acquire(blocking=False):
                self.get_logger().warning(f"Refused transition {asked}: another is under way.")
                response.success = False
                return response
            try:
                return change_state(request, response)
            except Exception as error:
                self.get_logger().warning(f"Refused transition {asked}: {error}")
                response.success = False
                return response
            finally:
                self._transition_lock.release()
                self._status.tell_change()

        service.callback = guarded

    # What the observers see.

    def _lifecycle_state(self) -> str:
        return str(self._state_machine.current_state[1])

    def _status_now(self) -> Any:
        runtime = self._runtime
        snapshot = None if runtime is None else runtime.snapshot()
        return status_message(self._lifecycle_state(), snapshot, self.get_clock().now().to_msg())

    def _state_now(self) -> NodeState:
        runtime = self._runtime
        return NodeState(
            lifecycle_state=self._lifecycle_state(),
            snapshot=None if runtime is None else runtime.snapshot(),
            failure=self._failure,
            limits=Limits(
                fallback_warn_ratio=self._number("fallback_warn_ratio"),
                memory_warn_ratio=self._number("memory.warn_ratio"),
                temperature_warn=self._number("temperature_warn"),
            ),
        )

    def _number(self, parameter: str) -> float:
        return float(self._node_parameters.value(parameter))  # type: ignore[arg-type]


def main(arguments: list[str] | None = None) -> int:
    """Run the node as a process until SIGINT or SIGTERM; return its exit code."""
    from memspec_ros.process import main as run

    return run(arguments)
