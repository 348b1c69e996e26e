"""Immutable pictures of the runtime for everyone but the worker thread."""

from dataclasses import dataclass, field
from enum import IntEnum


class DraftState(IntEnum):
    """Where a draft is; the values are those of memspec_msgs/DraftInfo."""

    STORED = 0
    LOADING = 1
    RESIDENT = 2
    ACTIVE = 3
    FAILED = 4


@dataclass(frozen=True)
class DraftSnapshot:
    """One candidate draft.

    `bytes`: fast memory it takes when resident, KV cache included; `score`: the strategy's last;
    `acceptance`: accepted over proposed tokens since configure, and `acceptance_by_position` the
    same of its first, second, ... proposals where all before them were right; `uses`: iterations
    it ran.
    """

    name: str
    path: str
    kind: str
    state: DraftState
    pinned: bool = False
    bytes: int = 0
    score: float = 0.0
    acceptance: float = 0.0
    uses: int = 0
    error: str = ""
    acceptance_by_position: tuple[float, ...] = ()


@dataclass(frozen=True)
class MemorySnapshot:
    """The ledger of fast memory beside what the system has left, in bytes.

    `kv_bytes`: KV caches with the features that drafts read; what the target's keeps of the last
    goal's context lies in the same rows. `in_flight_bytes`: loads under way, with what they need
    only until they land. `pressure_level`: what has been given up, from 0 for nothing to 4 for all
    drafts, and `pressure` says so in a sentence; see `residency.pressure`.
    """

    budget_bytes: int = 0
    target_bytes: int = 0
    predictor_bytes: int = 0
    draft_bytes: int = 0
    kv_bytes: int = 0
    in_flight_bytes: int = 0
    available_bytes: int = 0
    floor_bytes: int = 0
    pressure_level: int = 0
    pressure: str = ""

    @property
    def used_bytes(self) -> int:
        """Everything on the ledger."""
        models = self.target_bytes + self.predictor_bytes + self.draft_bytes
        return models + self.kv_bytes + self.in_flight_bytes


@dataclass(frozen=True)
class LoadCounters:
    """Loads of drafts since configure. A hit: a wanted draft was resident when scheduled.

    `load_seconds_sum`: what all loads took together.
    """

    loads: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    failures: int = 0
    load_seconds_p50: float = 0.0
    load_seconds_p95: float = 0.0
    load_seconds_sum: float = 0.0


@dataclass(frozen=True)
class GenerationCounters:
    """Generations since configure; ratios are shares of decoding time, 0 where none was spent."""

    accepted: int = 0
    succeeded: int = 0
    cancelled: int = 0
    aborted: int = 0
    rejected: int = 0
    tokens_per_second_now: float = 0.0
    tokens_per_second_mean: float = 0.0
    time_to_first_token_seconds: float = 0.0
    mean_accepted: float = 0.0
    fallback_seconds: float = 0.0
    fallback_ratio_window: float = 0.0
    fallback_ratio: float = 0.0
    desired_ratio: float = 0.0
    predictor_ratio: float = 0.0


@dataclass(frozen=True)
class TargetSnapshot:
    """The target as it is loaded, what computes it, and what that costs.

    `weight_bytes` of the layers, the embedding and the head; `kv_bytes_per_token` of keys and
    values. `pass_seconds[n - 1]` of a pass of n rows, as measured when it was loaded, like the
    memory's `read_bytes_per_second`.
    """

    path: str = ""
    family: str = ""
    dtype: str = ""
    kernel: str = ""
    device: str = ""
    threads: int = 0
    context_tokens: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: float = 0.0
    pass_seconds: tuple[float, ...] = ()
    read_bytes_per_second: float = 0.0


@dataclass(frozen=True)
class RuntimeSnapshot:
    """Everything that status messages, services and diagnostics show.

    `proposal`: what the next iteration proposes, in words; `predicted`: the drafts that the loaded
    predictor ranks; `predictor_error`: why the strategy has to do without one, or why the one that
    is loaded failed at the last ranking; empty otherwise.
    """

    resident_capacity: int
    scheduling_interval: int
    strategy: str
    queue_capacity: int
    loaded: bool = False
    accepting: bool = False
    worker_alive: bool = False
    worker_error: str = ""
    running: bool = False
    queue_length: int = 0
    active: str = ""
    wanted: str = ""
    proposal: str = ""
    predicted: tuple[str, ...] = ()
    predictor_error: str = ""
    drafts: tuple[DraftSnapshot, ...] = ()
    target: TargetSnapshot = field(default_factory=TargetSnapshot)
    memory: MemorySnapshot = field(default_factory=MemorySnapshot)
    loads: LoadCounters = field(default_factory=LoadCounters)
    generations: GenerationCounters = field(default_factory=GenerationCounters)

    def draft_names_in(self, *states: DraftState) -> tuple[str, ...]:
        """Names of the drafts that are in one of the states, in their order."""
        return tuple(draft.name for draft in self.drafts if draft.state in states)
