"""The background thread that brings drafts from disc into fast memory."""

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memspec_core.clock import Clock
from memspec_core.errors import LoadGivenUpError, MemSpecError, is_out_of_memory
from memspec_core.models.pieces import Pace
from memspec_core.residency.pace import LoadPace, load_rate
from memspec_core.speculation.proposal import Draft

STALL_SECONDS = 60.0
"""A load that takes longer counts as failed, and the next one begins beside it."""

CLOSE_SECONDS = 5.0
"""So long `close` waits for a load that does not end; its thread ends with the process then."""

LOADER_NICENESS = 10
"""How far the thread stands back behind those that decode, in the system's steps.

On two cores a pass, whose threads wait for one another, took 1.2 times as long beside a load then,
in the median, against 1.5 times, and a load 3 iterations instead of 1.5.
"""

_LOOK_SECONDS = 0.05
_LOG = logging.getLogger(__name__)

Load = Callable[[str, Pace], Draft]
"""Loads a draft by its name, and tells a pace of what it has read."""


@dataclass(frozen=True)
class FinishedLoad:
    """A load that has ended: the draft, or the sentence that says why there is none.

    `seconds`: since it was asked for, or since the load before it ended. The thread, which stands
    back, may begin late on busy cores, and whoever waits for a draft waits for that as well.
    """

    name: str
    seconds: float
    draft: Draft | None = None
    error: str = ""


@dataclass
class _LoadUnderWay:
    """`started`: when it could have begun."""

    name: str
    started: float
    abandoned: threading.Event = field(default_factory=threading.Event)


class DraftLoader:
    """Loads drafts one at a time, in the order in which they were asked for.

    The thread owns a draft until `finished` hands it over. `on_finished` is called from the
    thread after each load. A load that takes longer than `STALL_SECONDS` is given up at the next
    look at what has ended: it counts as failed, another thread loads what is next, and what it
    brings after all is dropped. On a GPU loads have a stream of their own.
    """

    def __init__(
        self,
        load: Load,
        clock: Clock,
        on_finished: Callable[[], None] = lambda: None,
        *,
        device: torch.device | None = None,
        sleep: Callable[[float], None] = time.sleep,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._load = load
        self._clock = clock
        self._on_finished = on_finished
        self._device = device or torch.device("cpu")
        self._sleep = sleep
        self._close_seconds = close_seconds
        self._bytes_per_second = float("inf")
        self._wanted: queue.SimpleQueue[tuple[str, float] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[FinishedLoad] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._under_way: _LoadUnderWay | None = None
        self._stuck: set[str] = set()
        self._closing = False
        self._thread = self._begin_thread()

    def limit_rate(self, read_bytes_per_second: float) -> None:
        """Have further loads leave enough of the memory's measured rate to decoding."""
        self._bytes_per_second = load_rate(read_bytes_per_second)

    def start(self, name: str) -> None:
        """Begin to load a draft in the background."""
        with self._lock:
            stuck = name in self._stuck
        if stuck:
            error = f"The draft {name} cannot be loaded: its last load still hangs; check the disc."
            self._finished.put(FinishedLoad(name, 0.0, error=error))
        else:
            self._wanted.put((name, self._clock.now()))

    def finished(self) -> list[FinishedLoad]:
        """Take over all loads that have ended since the last call."""
        self._give_up_stalled()
        loads = []
        while not self._finished.empty():
            loads.append(self._finished.get())
        return loads

    def wait(self, give_up: Callable[[], bool] = lambda: False) -> FinishedLoad:
        """Wait for the next load to end and take it over.

        Raises `LoadGivenUpError` once `give_up` says that nobody waits any longer; what is loaded
        goes on.
        """
        while not give_up():
            self._give_up_stalled()
            with contextlib.suppress(queue.Empty):
                return self._finished.get(timeout=_LOOK_SECONDS)
        raise LoadGivenUpError("A load is no longer waited for.")

    def close(self) -> None:
        """End the thread, and the load under way at its next piece."""
        with self._lock:
            self._closing = True
        self._wanted.put(None)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            _LOG.warning("A load does not end; its thread is left behind")
        # It may know the cache that owns this loader, and with it all models: they would be freed
        # only when Python next looks for cycles.
        self._load = _closed

    def _begin_thread(self) -> threading.Thread:
        now = self._clock.now()
        thread = threading.Thread(target=self._run, args=(now,), name="memspec-loader", daemon=True)
        thread.start()
        return thread

    def _run(self, free_since: float) -> None:
        torch.set_num_threads(1)  # here; the cores are the decoder's
        _stand_back()
        with _own_stream(self._device):
            while (wanted := self._wanted.get()) is not None and not self._closing:
                name, asked = wanted
                load = _LoadUnderWay(name, max(asked, free_since))
                with self._lock:
                    self._under_way = load
                if not self._hand_over(load, self._loaded(load)):
                    return
                free_since = self._clock.now()
                self._on_finished()

    def _hand_over(self, load: _LoadUnderWay, finished: FinishedLoad) -> bool:
        """Make a load's end known; false where it was given up, and another thread goes on."""
        with self._lock:
            if load.abandoned.is_set():
                self._stuck.discard(load.name)
                return False
            self._under_way = None
            self._finished.put(finished)
            return True

    def _give_up_stalled(self) -> None:
        with self._lock:
            load = self._under_way
            seconds = 0.0 if load is None else self._clock.now() - load.started
            if load is None or seconds < STALL_SECONDS or self._closing:
                return
            load.abandoned.set()
            self._stuck.add(load.name)
            self._under_way = None
            self._thread = self._begin_thread()
        error = (
            f"The draft {load.name} could not be loaded within {STALL_SECONDS:.0f} s; check the "
            "disc that it lies on."
        )
        self._finished.put(FinishedLoad(load.name, seconds, error=error))

    def _loaded(self, load: _LoadUnderWay) -> FinishedLoad:
        """Load one draft; nothing of it stays in this thread, for it may be evicted soon."""
        draft, error = None, ""
        pace = LoadPace(
            self._bytes_per_second,
            lambda: self._closing or load.abandoned.is_set(),
            self._clock,
            self._sleep,
        )
        try:
            draft = self._load(load.name, pace)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except MemSpecError as failure:
            error = str(failure)
        except Exception as failure:  # whatever a broken file raises must not end the thread
            if is_out_of_memory(failure):
                error = f"There is no memory for the draft {load.name}: {failure!r}."
            else:
                _LOG.exception("The draft %s could not be loaded", load.name)
                error = f"The draft {load.name} could not be loaded: {failure!r}."
        return FinishedLoad(load.name, self._clock.now() - load.started, draft, error)


def _closed(name: str, pace: Pace) -> Draft:
    raise MemSpecError(f"The draft {name} cannot be loaded: the loader is closed.")


def _stand_back() -> None:
    """Lower the calling thread's priority, where the system knows priorities of threads."""
    if sys.platform == "linux":
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + LOADER_NICENESS
        os.setpriority(os.PRIO_PROCESS, 0, min(19, niceness))


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))
