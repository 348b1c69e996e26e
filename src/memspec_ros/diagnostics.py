"""What `/diagnostics` says of the node, in every state: four statuses with keys and levels."""

import math
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

import psutil
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.callback_groups import CallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.node import Node

from memspec_core.errors import is_out_of_memory
from memspec_core.residency.available import available_bytes
from memspec_core.settings import MIB
from memspec_core.snapshot import DraftSnapshot, DraftState, RuntimeSnapshot
from memspec_ros.board import board_facts
from memspec_ros.publishing import published

OK = DiagnosticStatus.OK
WARN = DiagnosticStatus.WARN
ERROR = DiagnosticStatus.ERROR

Finding = tuple[bytes, str]


@dataclass(frozen=True)
class Limits:
    """Where the statuses begin to warn; the parameters of these names say what each one means."""

    fallback_warn_ratio: float = 1.0
    memory_warn_ratio: float = 1.0
    temperature_warn: float = math.inf


@dataclass(frozen=True)
class NodeState:
    """Everything that the statuses are made from. `failure` is why the last transition failed."""

    lifecycle_state: str
    snapshot: RuntimeSnapshot | None = None
    failure: Exception | None = None
    limits: Limits = Limits()

    @property
    def out_of_memory(self) -> bool:
        """Whether the last transition failed, or the worker ended, for want of memory."""
        if self.failure is not None and is_out_of_memory(self.failure):
            return True
        return self.snapshot is not None and "out of memory" in self.snapshot.worker_error.lower()


class Diagnostics:
    """Publishes the statuses of `state` every `period_seconds`."""

    def __init__(
        self,
        node: Node,
        group: CallbackGroup,
        period_seconds: float,
        state: Callable[[], NodeState],
    ) -> None:
        self._node = node
        self._state = state
        self._publisher = node.create_publisher(DiagnosticArray, "/diagnostics", 10)
        # Simulated time may stand still or jump.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._timer = node.create_timer(period_seconds, self._publish, group, steady)

    def set_period(self, seconds: float) -> None:
        """Publish this often from now on."""
        self._timer.timer_period_ns = int(seconds * 1e9)

    def _publish(self) -> None:
        name = self._node.get_fully_qualified_name().removeprefix("/")
        message = DiagnosticArray(status=statuses(name, self._state()))
        message.header.stamp = self._node.get_clock().now().to_msg()
        published(lambda: self._publisher.publish(message), self._node.get_logger(), "diagnostics")


def statuses(node_name: str, state: NodeState) -> list[DiagnosticStatus]:
    """Return the four statuses of a node; with its namespace, its name differs on each robot."""
    board = board_facts()
    return [
        _status(f"{node_name}: Drafts", _draft_findings(state), _draft_values(state)),
        _status(f"{node_name}: Generation", _generation_findings(state), _generation_values(state)),
        _status(f"{node_name}: Memory", _memory_findings(state), _memory_values(state)),
        _status(
            f"{node_name}: Platform",
            _platform_findings(state.limits, board),
            _platform_values(state, board),
        ),
    ]


def _status(
    name: str, findings: Iterable[Finding], values: Iterable[tuple[str, object]]
) -> DiagnosticStatus:
    """Return a status: the worst level found, and all that was found as its message."""
    found = list(findings)
    level = max((level for level, _ in found), default=OK)
    message = " ".join(sentence for _, sentence in found) or "OK"
    pairs = [KeyValue(key=key, value=_text(value)) for key, value in values]
    return DiagnosticStatus(
        level=level, name=name, message=message, hardware_id=platform.node(), values=pairs
    )


def _draft_findings(state: NodeState) -> Iterable[Finding]:
    snapshot = state.snapshot
    if snapshot is None:
        return
    if snapshot.predictor_error:
        why = "as the predictor fails" if snapshot.predicted else "for want of a predictor"
        yield WARN, f"All drafts count alike, {why}: {snapshot.predictor_error}"
    for draft in snapshot.drafts:
        if draft.state is DraftState.FAILED:
            yield WARN, f"The draft '{draft.name}' has failed: {draft.error}"


def _draft_values(state: NodeState) -> Iterable[tuple[str, object]]:
    snapshot = state.snapshot or _NOTHING
    loads = snapshot.loads
    yield "strategy", snapshot.strategy
    yield "predictor", _predictor(snapshot)
    yield "capacity", snapshot.resident_capacity
    yield "scheduling_interval", snapshot.scheduling_interval
    yield "resident", snapshot.draft_names_in(DraftState.RESIDENT, DraftState.ACTIVE)
    yield "active", snapshot.active
    yield "wanted", snapshot.wanted
    yield "loading", snapshot.draft_names_in(DraftState.LOADING)
    yield "failed", snapshot.draft_names_in(DraftState.FAILED)
    yield "pinned", tuple(draft.name for draft in snapshot.drafts if draft.pinned)
    yield "acceptance", tuple(map(_acceptance, snapshot.drafts))
    yield "hits", loads.hits
    yield "misses", loads.misses
    yield "loads", loads.loads
    yield "evictions", loads.evictions
    yield "load_seconds_p50", loads.load_seconds_p50
    yield "load_seconds_p95", loads.load_seconds_p95
    yield "failures", loads.failures


def _acceptance(draft: DraftSnapshot) -> str:
    """Return how often each position of a draft's proposals was right, the first one first."""
    return " ".join([draft.name, *(f"{share:.2f}" for share in draft.acceptance_by_position)])


def _predictor(snapshot: RuntimeSnapshot) -> str:
    """Return which drafts the predictor ranks, or that there is none."""
    if snapshot.predicted:
        return f"for {', '.join(snapshot.predicted)}"
    return "missing" if snapshot.predictor_error else "none"


def _generation_findings(state: NodeState) -> Iterable[Finding]:
    snapshot = state.snapshot
    if state.failure is not None:
        yield ERROR, str(state.failure) or type(state.failure).__name__
    if snapshot is None:
        if state.failure is None:
            yield OK, f"The node is {state.lifecycle_state}."
        return
    if snapshot.worker_error:
        yield ERROR, f"The worker has ended: {snapshot.worker_error}"
    elif snapshot.loaded and not snapshot.worker_alive:
        yield ERROR, "The worker has ended."
    elif not snapshot.loaded:
        if state.lifecycle_state in ("active", "inactive"):
            yield ERROR, "There is no target."
        else:
            yield OK, "Models are loading."
    ratio = snapshot.generations.fallback_ratio_window
    limit = state.limits.fallback_warn_ratio
    if ratio > limit:
        yield WARN, f"Fallback took {ratio:.0%} of the last minute's decoding (limit {limit:.0%})."
    if snapshot.queue_capacity and snapshot.queue_length >= snapshot.queue_capacity:
        yield WARN, "The queue is full."


def _generation_values(state: NodeState) -> Iterable[tuple[str, object]]:
    snapshot = state.snapshot or _NOTHING
    counts = snapshot.generations
    yield "lifecycle_state", state.lifecycle_state
    yield "accepting", snapshot.accepting
    yield "running", snapshot.running
    yield "goals_accepted", counts.accepted
    yield "goals_succeeded", counts.succeeded
    yield "goals_cancelled", counts.cancelled
    yield "goals_aborted", counts.aborted
    yield "goals_rejected", counts.rejected
    yield "queue", snapshot.queue_length
    yield "queue_capacity", snapshot.queue_capacity
    yield "proposal", snapshot.proposal
    yield "tokens_per_second_now", counts.tokens_per_second_now
    yield "tokens_per_second_mean", counts.tokens_per_second_mean
    yield "time_to_first_token", counts.time_to_first_token_seconds
    yield "mean_accepted", counts.mean_accepted
    yield "fallback_time_s", counts.fallback_seconds
    yield "fallback_ratio_60s", counts.fallback_ratio_window
    yield "fallback_ratio", counts.fallback_ratio
    yield "desired_ratio", counts.desired_ratio
    yield "predictor_ratio", counts.predictor_ratio


def _memory_findings(state: NodeState) -> Iterable[Finding]:
    if state.out_of_memory:
        yield ERROR, "Out of memory."
    if state.snapshot is None or not state.snapshot.loaded:
        return
    memory = state.snapshot.memory
    if memory.used_bytes > memory.budget_bytes > 0:
        yield ERROR, "More memory is in use than the budget allows."
    if memory.pressure:
        yield WARN, memory.pressure
    elif memory.available_bytes < state.limits.memory_warn_ratio * memory.floor_bytes:
        available, floor = memory.available_bytes // MIB, memory.floor_bytes // MIB
        yield WARN, f"{available} MiB are available; memory.floor_mib is {floor}."


def _memory_values(state: NodeState) -> Iterable[tuple[str, object]]:
    memory = (state.snapshot or _NOTHING).memory
    available = memory.available_bytes or available_bytes()
    yield "available_mib", available / MIB
    yield "budget_mib", memory.budget_bytes / MIB
    yield "floor_mib", memory.floor_bytes / MIB
    yield "used_mib", memory.used_bytes / MIB
    yield "target_mib", memory.target_bytes / MIB
    yield "drafts_mib", memory.draft_bytes / MIB
    yield "kv_mib", memory.kv_bytes / MIB
    yield "in_flight_mib", memory.in_flight_bytes / MIB
    yield "predictor_mib", memory.predictor_bytes / MIB
    yield "pressure_level", memory.pressure_level
    yield "process_mib", psutil.Process().memory_info().rss / MIB


def _platform_findings(limits: Limits, board: Mapping[str, str]) -> Iterable[Finding]:
    for sensor, degrees in board.items():
        if sensor.startswith("temperature_") and float(degrees) >= limits.temperature_warn:
            limit = f"temperature_warn is {limits.temperature_warn:g}"
            yield WARN, f"{sensor} is {degrees} ({limit})."


def _platform_values(state: NodeState, board: Mapping[str, str]) -> Iterable[tuple[str, object]]:
    target = (state.snapshot or _NOTHING).target
    yield "target", target.path
    yield "family", target.family
    yield "dtype", target.dtype
    yield "kernel", target.kernel
    yield "device", target.device
    yield "threads", target.threads
    yield "context_tokens", target.context_tokens
    for rows in (1, 4):
        if rows <= len(target.pass_seconds):
            yield f"pass_ms_{rows}_rows", 1e3 * target.pass_seconds[rows - 1]
    yield "read_gb_per_second", target.read_bytes_per_second / 1e9
    yield "cpu_percent", psutil.cpu_percent()
    yield from _versions()
    yield from board.items()


@lru_cache(maxsize=1)
def _versions() -> tuple[tuple[str, str], ...]:
    return (
        ("machine", platform.machine()),
        ("python", platform.python_version()),
        ("torch", _version("torch")),
        ("transformers", _version("transformers")),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return str(value)


_NOTHING = RuntimeSnapshot(
    resident_capacity=0, scheduling_interval=0, strategy="", queue_capacity=0
)
