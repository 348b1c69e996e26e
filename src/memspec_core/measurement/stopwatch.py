"""What is spent between two iterations, added up by kind for the next one's account."""

from memspec_core.clock import Clock
from memspec_core.iteration import IterationSeconds

PREDICTION = "prediction"
LOAD_WAIT = "load_wait"
PROMPT = "prompt"


class Stopwatch:
    """Laps from a start; kinds are fields of `IterationSeconds`, and one may have several laps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spent: dict[str, float] = {}
        self._since = 0.0

    def start(self) -> None:
        """Begin a lap."""
        self._since = self._clock.now()

    def lap(self, kind: str) -> None:
        """Add the time since the last lap or start to a kind, and begin the next lap."""
        now = self._clock.now()
        self._spent[kind] = self._spent.get(kind, 0.0) + now - self._since
        self._since = now

    def spent(self, kind: str) -> float:
        """Return what was added up for a kind since the last `take`, in seconds."""
        return self._spent.get(kind, 0.0)

    def take(self) -> IterationSeconds:
        """Return what was added up, and begin anew."""
        spent, self._spent = self._spent, {}
        return IterationSeconds(**spent)
