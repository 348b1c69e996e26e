"""A generation that was submitted: its events as they come, and its result."""

import queue
import threading
from collections.abc import Callable, Iterator

from memspec_core.iteration import Iteration
from memspec_core.measurement.statistics import GenerationRecorder
from memspec_core.request import FinishReason, GenerationRequest, GenerationResult
from memspec_core.strategies.base import Strategy

Listener = Callable[[Iteration], None]


class Generation:
    """What `Runtime.submit` returns. Any thread may cancel, iterate or wait; one iterates.

    With a `listener` each iteration goes to it, in the worker's thread, and `iterations` yields
    none; a listener that raises aborts its generation. `strategy`: its own one, None for what the
    settings name.
    """

    def __init__(
        self,
        request: GenerationRequest,
        submitted_at: float,
        on_stop: Callable[["Generation", FinishReason], None],
        listener: Listener | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.request = request
        self.strategy = strategy
        self.submitted_at = submitted_at
        self._on_stop = on_stop
        self._events: queue.SimpleQueue[Iteration | None] = queue.SimpleQueue()
        self._listener: Listener = self._events.put if listener is None else listener
        self._ended = threading.Event()
        self._result: GenerationResult | None = None
        self._interruption: FinishReason | None = None
        self._interruption_error = ""
        self._recorder = GenerationRecorder(prompt_tokens=0)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._first_token_at: float | None = None

    @property
    def priority(self) -> int:
        """How urgent it is; the highest runs first."""
        return self.request.priority

    def cancel(self) -> None:
        """Stop within one iteration; the result keeps the text so far."""
        self._on_stop(self, FinishReason.CANCELLED)

    def iterations(self) -> Iterator[Iteration]:
        """Yield the iterations as they come; ends when the generation has ended."""
        while (event := self._events.get()) is not None:
            yield event

    def result(self) -> GenerationResult:
        """Wait for the end and return the result; a failure is a result with its error.

        A request that still waits when its time is over ends then, whatever the worker is at.
        """
        if not self._ended.wait(self.request.time_limit_seconds or None):
            self._on_stop(self, FinishReason.TIME_LIMIT)
            self._ended.wait()
        assert self._result is not None
        return self._result

    def interrupt(self, reason: FinishReason, error: str = "") -> None:
        """Ask the worker to stop at the next iteration, for this reason; the first one counts."""
        if self._interruption is None:
            self._interruption_error = error
            self._interruption = reason

    def interruption(self, now: float) -> FinishReason | None:
        """Return why the generation must stop now, if it must."""
        if self._interruption is None and self._overdue(now):
            return FinishReason.TIME_LIMIT
        return self._interruption

    def begin(self, prompt_tokens: int) -> None:
        """Say that the worker has begun (worker only)."""
        self._recorder = GenerationRecorder(prompt_tokens)

    def record(self, iteration: Iteration, now: float) -> None:
        """Add an iteration and pass it on (worker only)."""
        if iteration.committed and self._first_token_at is None:
            self._first_token_at = now
        self._recorder.add(iteration)
        self._text.append(iteration.text)
        self._token_ids.extend(iteration.token_ids)
        self._listener(iteration)

    def finish(self, reason: FinishReason, error: str = "") -> GenerationResult:
        """End the generation with what it has; every accepted generation comes here once."""
        waited = 0.0
        if self._first_token_at is not None:
            waited = self._first_token_at - self.submitted_at
        self._result = GenerationResult(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            error=error or (self._interruption_error if reason is FinishReason.ABORTED else ""),
            stats=self._recorder.stats(waited),
        )
        self._ended.set()
        self._events.put(None)
        return self._result

    def _overdue(self, now: float) -> bool:
        limit = self.request.time_limit_seconds
        return limit > 0.0 and now - self.submitted_at >= limit
