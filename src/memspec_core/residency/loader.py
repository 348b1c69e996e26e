"""The background thread that brings drafts from disc into fast memory."""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memspec_core.clock import Clock
from memspec_core.errors import MemSpecError
from memspec_core.speculation.proposal import Draft

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedLoad:
    """A load that has ended: the draft, or the sentence that says why there is none."""

    name: str
    seconds: float
    draft: Draft | None = None
    error: str = ""


class DraftLoader:
    """Loads drafts one at a time, in the order in which they were asked for.

    The thread owns a draft until `finished` hands it over. `on_finished` is called from the
    thread after each load.
    """

    def __init__(
        self,
        load: Callable[[str], Draft],
        clock: Clock,
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        self._load = load
        self._clock = clock
        self._on_finished = on_finished
        self._wanted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[FinishedLoad] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="memspec-loader", daemon=True)
        self._thread.start()

    def start(self, name: str) -> None:
        """Begin to load a draft in the background."""
        self._wanted.put(name)

    def finished(self) -> list[FinishedLoad]:
        """Take over all loads that have ended since the last call."""
        loads = []
        while not self._finished.empty():
            loads.append(self._finished.get())
        return loads

    def wait(self) -> FinishedLoad:
        """Wait for the next load to end and take it over."""
        return self._finished.get()

    def close(self) -> None:
        """End the thread after the load under way."""
        self._wanted.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)  # here; the cores are the decoder's
        while (name := self._wanted.get()) is not None:
            self._finished.put(self._loaded(name))
            self._on_finished()

    def _loaded(self, name: str) -> FinishedLoad:
        """Load one draft; nothing of it stays in this thread, for it may be evicted soon."""
        started = self._clock.now()
        draft, error = None, ""
        try:
            draft = self._load(name)
        except MemSpecError as failure:
            error = str(failure)
        except Exception as failure:  # whatever a broken file raises must not end the thread
            _LOG.exception("The draft %s could not be loaded", name)
            error = f"The draft {name} could not be loaded: {failure!r}."
        return FinishedLoad(name, self._clock.now() - started, draft, error)
