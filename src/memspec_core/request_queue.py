"""Who waits behind the running request, who comes next, and who has to go."""

from typing import Generic, Protocol, TypeVar

from memspec_core.errors import QueueFullError

REJECT, QUEUE, PREEMPT = "reject", "queue", "preempt"
QUEUE_POLICIES = (REJECT, QUEUE, PREEMPT)


class Ranked(Protocol):
    """What may wait: higher priorities come first."""

    @property
    def priority(self) -> int:
        """How urgent it is."""
        ...


_Item = TypeVar("_Item", bound=Ranked)


class RequestQueue(Generic[_Item]):
    """At most `capacity` requests in the order in which they are to run.

    The higher priority first, and among equals the one that came first. By `policy`: "reject"
    takes a request only while none runs or waits; "queue" has it wait, and a full queue lets the
    newest of the lowest priority go for a higher one; "preempt" has a new request end all others,
    running or waiting, whose priority is not higher than its own. Not safe for several threads.
    """

    def __init__(self, policy: str, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self._waiting: list[_Item] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, priority: int, running: _Item | None) -> None:
        """Raise `QueueFullError` where a request of a priority has no place now."""
        if self.policy == REJECT and (running is not None or self._waiting):
            raise QueueFullError(
                "Another request runs or waits, and queue_policy is reject; try again later."
            )
        if len(self._waiting) - len(self._displaced_by(priority)) >= self.capacity:
            raise QueueFullError(
                f"{len(self._waiting)} requests of this priority or a higher one wait already "
                "(queue_size); try again later."
            )

    def add(self, item: _Item, running: _Item | None) -> list[_Item]:
        """Take a request in; return those that waited and had to go for it.

        Raises `QueueFullError`, and changes nothing then.
        """
        self.check(item.priority, running)
        displaced = self._displaced_by(item.priority)
        for other in displaced:
            self._waiting.remove(other)
        behind = (i for i, other in enumerate(self._waiting) if other.priority < item.priority)
        self._waiting.insert(next(behind, len(self._waiting)), item)
        return displaced

    def preempts(self, item: _Item, running: _Item) -> bool:
        """Whether a request that was just taken in ends the running one."""
        return self.policy == PREEMPT and item.priority >= running.priority

    def take(self) -> _Item | None:
        """Take out the request that is to run next, if any waits."""
        return self._waiting.pop(0) if self._waiting else None

    def remove(self, item: _Item) -> bool:
        """Take out a request that is to wait no longer; return whether it waited."""
        if item not in self._waiting:
            return False
        self._waiting.remove(item)
        return True

    def clear(self) -> list[_Item]:
        """Take out all, in their order."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def _displaced_by(self, priority: int) -> list[_Item]:
        if self.policy == PREEMPT:
            return [other for other in self._waiting if other.priority <= priority]
        full = len(self._waiting) >= self.capacity
        return self._waiting[-1:] if full and self._waiting[-1].priority < priority else []
