"""What is spent between two iterations, added up by kind for the next one's account."""

from collections.abc import Iterator
from contextlib import contextmanager

from memspec_core.clock import Clock
from memspec_core.iteration import IterationSeconds

PREDICTION = "prediction"
LOAD_WAIT = "load_wait"
PROMPT = "prompt"


class Stopwatch:
    """Kinds are fields of `IterationSeconds`; one may be timed several times."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spent: dict[str, float] = {}

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Add what the body takes to a kind."""
        started = self._clock.now()
        try:
            yield
        finally:
            self._spent[kind] = self._spent.get(kind, 0.0) + self._clock.now() - started

    def spent(self, kind: str) -> float:
        """Return what was added up for a kind since the last `take`, in seconds."""
        return self._spent.get(kind, 0.0)

    def take(self) -> IterationSeconds:
        """Return what was added up, and begin anew."""
        spent, self._spent = self._spent, {}
        return IterationSeconds(**spent)
