"""The draft model cache: which drafts are resident, which come and which go (Algorithm 2)."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memspec_core.clock import Clock
from memspec_core.errors import CheckpointError, MemoryBudgetError
from memspec_core.residency.ledger import Account, Ledger
from memspec_core.residency.loader import FinishedLoad
from memspec_core.snapshot import DraftState, LoadCounters
from memspec_core.speculation.proposal import Draft
from memspec_core.strategies.base import Ranking

RETRY_SECONDS = 30.0
"""A draft that could not be loaded is tried again after this time, doubled at each failure."""

_MAX_RETRY_SECONDS = 3600.0
_KEPT_LOADS = 256
_RECENT_LOADS = 8
"""Loads that tell what the next one takes: enough for a median that one slow load leaves alone, few
enough that storage which turns slower or faster is noticed after half of them."""

_SHORT_OF_MEMORY = "the system is short of memory; free some, or wait until there is more."


class Loader(Protocol):
    """What the cache needs of a loader."""

    def start(self, name: str) -> None:
        """Begin to load a draft in the background."""
        ...

    def finished(self) -> list[FinishedLoad]:
        """Take over all loads that have ended."""
        ...

    def wait(self, give_up: Callable[[], bool]) -> FinishedLoad:
        """Wait for the next load to end and take it over.

        Raises `LoadGivenUpError` once `give_up` says that nobody waits any longer.
        """
        ...


@dataclass(frozen=True)
class DraftBytes:
    """Fast memory that a draft takes; `transient` beside it while it is loaded."""

    weights: int
    kv: int
    transient: int = 0

    @property
    def resident(self) -> int:
        """Bytes once it is resident."""
        return self.weights + self.kv

    @property
    def loading(self) -> int:
        """Bytes while it is loaded."""
        return self.resident + self.transient


@dataclass
class _Failure:
    error: str
    attempts: int
    retry_at: float


@dataclass
class _Counts:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    failures: int = 0
    loads: int = 0
    load_seconds: list[float] = field(default_factory=list)
    load_seconds_sum: float = 0.0


class DraftCache:
    """The resident set, at most `capacity` drafts with the loads under way.

    One thread, the worker, changes it; any thread may ask for states and counts, and is never
    made to wait for a load. No call but `require` waits for one, and the active draft is never
    evicted. Under memory pressure `limit` allows fewer drafts than `capacity`.
    """

    def __init__(
        self,
        sizes: Mapping[str, DraftBytes],
        loader: Loader,
        ledger: Ledger,
        capacity: int,
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.capacity = capacity
        self._sizes = dict(sizes)
        self._loader = loader
        self._ledger = ledger
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.RLock()
        self._resident: dict[str, Draft] = {}
        self._loading: list[str] = []
        self._failed: dict[str, _Failure] = {}
        self._pinned: set[str] = set()
        self._scores: dict[str, float] = {}
        self._counts = _Counts()
        self._active: str | None = None
        self._order: tuple[str, ...] = ()
        self._most: int | None = None
        self._limit: int | None = None
        self._pins_stay = True
        self.demanded: str | None = None
        """What was wanted last, for other threads to see."""

    def update(
        self,
        ranking: Ranking,
        active: str | None,
        most: int | None = None,
        costly: Collection[str] = (),
    ) -> None:
        """Steer the resident set towards the working set W of the ranking.

        W: the best-ranked drafts, K at the most, that fit into the budget together, beside the
        active draft and the pins; no more than `most` where that is given, and none of those that
        are too `costly` to load, unless they are resident. Drafts that cannot be
        loaded for now leave their place to the next. As Algorithm 2, except that loads under way
        count towards K, that pinned drafts stay, and that nothing is evicted for a draft that has
        no room even then.
        """
        with self._lock:
            self._active = active
            self._scores = dict(ranking.scores)
            here = {*self._resident, *self._loading}
            self._order = tuple(d for d in ranking.order if d in here or d not in costly)
            self._most = most
            self.collect()
            working_set = self._working_set()
            for name in self._missing(working_set):
                if self._make_room(name, working_set):
                    self._start(name)
            self._shrink(working_set)

    def contenders(self, ranking: Ranking) -> list[str]:
        """Return the drafts that are not here, and better ranked than so many that they may come.

        Those behind the K-th that is here have no place in W, whatever they cost.
        """
        with self._lock:
            here, absent = 0, []
            for name in ranking.order:
                if here >= self._places:
                    break
                if self._is_here(name):
                    here += 1
                else:
                    absent.append(name)
            return absent

    def count_demand(self, name: str | None) -> None:
        """Count whether the draft that is wanted now is resident: a hit or a miss."""
        with self._lock:
            self.demanded = name
            self.collect()
            if name is not None:
                self._counts.hits += name in self._resident
                self._counts.misses += name not in self._resident

    @property
    def residents(self) -> Mapping[str, Draft]:
        """The resident drafts by name."""
        return self._resident

    @property
    def loading(self) -> tuple[str, ...]:
        """Names of the drafts that are being loaded."""
        return tuple(self._loading)

    @property
    def load_seconds(self) -> float:
        """What a load takes by now: the median of the last few, 0 before the first."""
        with self._lock:
            return _quantile(sorted(self._counts.load_seconds[-_RECENT_LOADS:]), 0.5)

    def best_resident(self, ranking: Ranking) -> Draft | None:
        """Return the best-ranked resident draft (d = argmax over G), or None."""
        with self._lock:
            self.collect()
            usable = () if self._limit == 0 else ranking.order
            name = next((name for name in usable if name in self._resident), None)
            self._active = name
            return None if name is None else self._resident[name]

    def require(self, name: str, give_up: Callable[[], bool] = lambda: False) -> Draft:
        """Return a draft, waiting for its load if it is not resident (the only wait).

        Raises `CheckpointError` if it cannot be loaded, `MemoryBudgetError` if it has no room, and
        `LoadGivenUpError` once `give_up` says that nobody waits any longer.
        """
        if self._limit == 0:
            raise MemoryBudgetError(f"No room for the draft {name}: {_SHORT_OF_MEMORY}")
        self.collect()
        while (draft := self._resident.get(name)) is None:
            with self._lock:
                self._begin(name)
            load = self._loader.wait(give_up)
            with self._lock:
                self._take_over(load, awaited=name)
            if load.name == name and load.draft is None:
                raise CheckpointError(load.error)
        return draft

    def may_load(self, name: str) -> bool:
        """Whether a draft is worth a try: it has not failed, or its back-off is over."""
        with self._lock:
            failure = self._failed.get(name)
            return failure is None or self._clock.now() >= failure.retry_at

    def has_room(self, name: str) -> bool:
        """Whether a draft can be loaded beside those that are here."""
        with self._lock:
            free = self._ledger.free_bytes >= self._sizes[name].loading
            return free and self._occupied < self._places

    def fail(self, name: str, error: str) -> None:
        """Count a draft as failed without trying to load it."""
        with self._lock:
            self._fail(FinishedLoad(name, 0.0, error=error))

    def collect(self) -> None:
        """Take over what the loader has finished."""
        if not self._loading:
            return
        with self._lock:
            for load in self._loader.finished():
                self._take_over(load)

    def rest(self) -> None:
        """Say that no draft is active, as between generations."""
        with self._lock:
            self._active = None
            self.collect()
        self._on_change()

    def pin(self, name: str, pinned: bool) -> None:
        """Keep a draft resident, loading it in the background, or let it go again.

        Raises `MemoryBudgetError` if too many are pinned for the capacity or it has no room.
        """
        with self._lock:
            self.collect()
            if not pinned:
                self._pinned.discard(name)
            elif name not in self._pinned:
                self._pin(name)
        self._on_change()

    def set_capacity(self, capacity: int) -> None:
        """Change K; drafts beyond it go at the next update."""
        with self._lock:
            self.capacity = capacity

    def limit(self, most: int | None, *, pins_stay: bool = True) -> None:
        """Allow at most so many drafts for now, or as many as K with None.

        What is over goes at once, but for the active draft. Pins stay beside the limit, unless
        `pins_stay` is false: then they are evicted like others, and loaded again afterwards. With
        0 `best_resident` gives no draft, and the next update evicts all.
        """
        with self._lock:
            self._limit, self._pins_stay = most, pins_stay
            self._shrink(self._working_set())

    def clear(self) -> None:
        """Let every resident draft go."""
        with self._lock:
            self._active = None
            self._pinned.clear()
            for name in list(self._resident):
                self._evict(name)

    def state(self, name: str) -> DraftState:
        """Return where a draft is."""
        with self._lock:
            if name == self._active:
                return DraftState.ACTIVE
            if name in self._resident:
                return DraftState.RESIDENT
            if name in self._loading:
                return DraftState.LOADING
            return DraftState.FAILED if name in self._failed else DraftState.STORED

    def score(self, name: str) -> float:
        """Return the last ranking's score of a draft."""
        return self._scores.get(name, 0.0)

    def pinned(self, name: str) -> bool:
        """Whether a draft is kept resident."""
        return name in self._pinned

    def error(self, name: str) -> str:
        """Return why a draft could not be loaded, or nothing."""
        failure = self._failed.get(name)
        return failure.error if failure else ""

    def bytes_of(self, name: str) -> DraftBytes:
        """Return the fast memory that a draft takes when resident."""
        return self._sizes[name]

    def counters(self) -> LoadCounters:
        """Return what has happened since the cache was made."""
        with self._lock:
            seconds = sorted(self._counts.load_seconds)
            return LoadCounters(
                loads=self._counts.loads,
                hits=self._counts.hits,
                misses=self._counts.misses,
                evictions=self._counts.evictions,
                failures=self._counts.failures,
                load_seconds_p50=_quantile(seconds, 0.50),
                load_seconds_p95=_quantile(seconds, 0.95),
                load_seconds_sum=self._counts.load_seconds_sum,
            )

    @property
    def _occupied(self) -> int:
        return len(self._resident) + len(self._loading)

    @property
    def _places(self) -> int:
        """How many drafts may be there now."""
        if self._limit is None:
            return self.capacity
        pins = len(self._pinned | ({self._active} if self._active else set()))
        return min(self.capacity, max(self._limit, pins) if self._pins_stay else self._limit)

    def _stays(self, name: str) -> bool:
        return name == self._active or (self._pins_stay and name in self._pinned)

    def _is_here(self, name: str) -> bool:
        """Whether a draft is resident or will be."""
        return name in self._resident or name in self._loading

    def _working_set(self) -> tuple[str, ...]:
        """Return W: pins that are to be there, then the best-ranked drafts that fit with them."""
        staying = [name for name in self._sizes if self._stays(name)]
        places = self._places - len(staying)
        here = (*self._resident, *self._loading)
        free = self._ledger.free_bytes + sum(map(self._needs, here))
        free -= sum(map(self._needs, staying))
        ranked: list[str] = []
        for name in self._order:
            if self._most is not None and len(ranked) == self._most:
                break
            if name in staying:
                ranked.append(name)
            elif places > 0 and self._needs(name) <= free and self._may_be_here(name):
                ranked.append(name)
                places -= 1
                free -= self._needs(name)
        return tuple(dict.fromkeys((*staying, *ranked)))

    def _needs(self, name: str) -> int:
        """Return the bytes of a draft: those it takes, or would take while it is loaded."""
        size = self._sizes[name]
        return size.resident if name in self._resident else size.loading

    def _may_be_here(self, name: str) -> bool:
        return self._is_here(name) or self.may_load(name)

    def _missing(self, working_set: Sequence[str]) -> list[str]:
        """Return those of the working set that are to be loaded."""
        return [name for name in working_set if not self._is_here(name) and self.may_load(name)]

    def _begin(self, name: str) -> None:
        """Start a load that is waited for, unless it is under way or others must land first."""
        if name in self._loading:
            return
        if self._make_room(name, (name,)):
            self._start(name)
        elif not self._loading:
            raise MemoryBudgetError(f"No room for the draft {name}: {self._refusal(name)}")

    def _pin(self, name: str) -> None:
        if len(self._pinned) >= self.capacity:
            raise MemoryBudgetError(
                f"{len(self._pinned)} drafts are pinned and resident_capacity is "
                f"{self.capacity}; let one go first."
            )
        self._pinned.add(name)
        if name in self._resident or name in self._loading:
            return
        self._failed.pop(name, None)
        if not self._make_room(name, tuple(self._pinned)):
            self._pinned.discard(name)
            raise MemoryBudgetError(f"No room to pin {name}: {self._refusal(name)}")
        self._start(name)

    def _make_room(self, name: str, kept: Sequence[str]) -> bool:
        """Evict until one more draft fits by number and by bytes; say whether it does.

        Where it would not fit even then, nothing is evicted.
        """
        victims = self._victims(kept)
        places = self._places - self._occupied
        free = self._ledger.free_bytes
        going = 0
        while places < 1 or free < self._sizes[name].loading:
            if going == len(victims):
                return False
            places, free = places + 1, free + self._sizes[victims[going]].resident
            going += 1
        for victim in victims[:going]:
            self._evict(victim)
        return True

    def _victims(self, kept: Sequence[str]) -> list[str]:
        """Return what may go, the lowest-scored first: not the working set, active and pins."""
        free = [name for name in self._resident if name not in kept and not self._stays(name)]
        return sorted(free, key=lambda name: self._scores.get(name, 0.0))

    def _refusal(self, name: str) -> str:
        size = self._sizes[name]
        if self._places < self.capacity and self._occupied >= self._places:
            return _SHORT_OF_MEMORY
        if self._occupied >= self.capacity:
            return f"resident_capacity is {self.capacity}, and its drafts are pinned or in use."
        return (
            f"it needs {size.loading / 2**20:.1f} MiB to be loaded and "
            f"{max(self._ledger.free_bytes, 0) / 2**20:.1f} MiB of the budget are free; raise "
            "memory.budget_mib or lower context_tokens."
        )

    def _shrink(self, working_set: Sequence[str]) -> None:
        """After K was lowered, let go what is over."""
        victims = self._victims(working_set)
        for victim in victims[: max(0, self._occupied - self._places)]:
            self._evict(victim)

    def _start(self, name: str) -> None:
        size = self._sizes[name]
        self._ledger.reserve(Account.IN_FLIGHT, name, size.weights + size.transient)
        self._ledger.reserve(Account.KV, name, size.kv)
        self._loading.append(name)
        self._loader.start(name)
        self._on_change()

    def _take_over(self, load: FinishedLoad, awaited: str | None = None) -> None:
        """Make a loaded draft resident.

        One that a newer ranking does not want is dropped where it would have to go for another.
        """
        self._loading.remove(load.name)
        self._ledger.release(Account.IN_FLIGHT, load.name)
        self._ledger.release(Account.KV, load.name)
        if load.draft is None:
            self._fail(load)
        else:
            self._failed.pop(load.name, None)
            self._counts.loads += 1
            self._counts.load_seconds.append(load.seconds)
            self._counts.load_seconds_sum += load.seconds
            del self._counts.load_seconds[:-_KEPT_LOADS]
            if load.name == awaited or self._may_stay(load.name):
                self._enter(load.name, load.draft)
        self._on_change()

    def _enter(self, name: str, draft: Draft) -> None:
        self._ledger.reserve(Account.DRAFT, name, self._sizes[name].weights)
        self._ledger.reserve(Account.KV, name, self._sizes[name].kv)
        self._resident[name] = draft

    def _may_stay(self, name: str) -> bool:
        """Whether a draft that has landed may stay: W has it, or all of W fits beside it."""
        working_set = self._working_set()
        if name in working_set:
            return True
        missing = self._missing(working_set)
        free = self._ledger.free_bytes - self._sizes[name].resident
        return (
            self._occupied + 1 + len(missing) <= self._places
            and sum(self._sizes[other].loading for other in missing) <= free
        )

    def _fail(self, load: FinishedLoad) -> None:
        attempts = self._failed[load.name].attempts + 1 if load.name in self._failed else 1
        pause = min(RETRY_SECONDS * 2 ** (attempts - 1), _MAX_RETRY_SECONDS)
        self._failed[load.name] = _Failure(load.error, attempts, self._clock.now() + pause)
        self._counts.failures += 1

    def _evict(self, name: str) -> None:
        del self._resident[name]
        self._ledger.release(Account.DRAFT, name)
        self._ledger.release(Account.KV, name)
        self._counts.evictions += 1
        self._on_change()


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
