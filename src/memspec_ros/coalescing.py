"""Which iterations of a goal share a message.

A fast target ends an iteration every 2 to 3 ms. A message for each wakes the middleware's threads
and the client that often, on cores that decode, for text that nobody reads so fast.
"""

from dataclasses import dataclass

from memspec_core.clock import Clock
from memspec_core.iteration import Iteration


@dataclass(frozen=True)
class Piece:
    """What one message carries: one or more iterations that followed each other.

    `sequence` counts the messages of the goal from 0.
    """

    sequence: int
    iterations: tuple[Iteration, ...]

    @property
    def text(self) -> str:
        """The text that these iterations made final."""
        return "".join(iteration.text for iteration in self.iterations)

    @property
    def token_ids(self) -> list[int]:
        """The tokens that these iterations made final."""
        return [token for iteration in self.iterations for token in iteration.token_ids]

    @property
    def newest(self) -> Iteration:
        """The iteration that tells draft, fallback and counts."""
        return self.iterations[-1]


class Coalescer:
    """Joins the iterations that end within `period_seconds` of a goal's last message.

    The first iteration and the last go out at once. There is no timer: what is held back goes out
    with the first iteration that ends after the period, or with `flush`. An iteration that takes
    longer than the period so goes out by itself, and nothing waits longer than the period and the
    iteration under way. A period of 0 joins nothing.
    """

    def __init__(self, period_seconds: float, clock: Clock) -> None:
        self.sequence = 0
        """The sequence of the next message."""
        self._period_seconds = period_seconds
        self._clock = clock
        self._held: list[Iteration] = []
        self._sent_at = float("-inf")

    def add(self, iteration: Iteration) -> Piece | None:
        """Take an iteration that has just ended; return what is to be sent now, if anything."""
        self._held.append(iteration)
        waited = self._clock.now() - self._sent_at
        if waited < self._period_seconds and iteration.finish_reason is None:
            return None
        return self.flush()

    def flush(self) -> Piece | None:
        """Return what is held back, if anything."""
        if not self._held:
            return None
        piece = Piece(self.sequence, tuple(self._held))
        self._held.clear()
        self._sent_at = self._clock.now()
        self.sequence += 1
        return piece
