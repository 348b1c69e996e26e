"""One account of fast memory, in bytes: models, KV caches and loads under way."""

import threading
from enum import Enum

from memspec_core.errors import MemoryBudgetError
from memspec_core.residency.available import available_bytes
from memspec_core.settings import MIB
from memspec_core.snapshot import MemorySnapshot


class Account(Enum):
    """What memory is used for.

    What is kept of the last goal's context has no account of its own: it lies in the target's KV
    cache, which is allocated once for the longest context.
    """

    TARGET = "target"
    PREDICTOR = "predictor"
    DRAFT = "draft"
    KV = "KV cache"
    TOKENS = "table of tokens for json_schema"
    IN_FLIGHT = "load under way"


class Ledger:
    """The books of fast memory; everything is entered before it is allocated.

    `floor_bytes` is what the rest of the system keeps. Any thread may use a ledger.
    """

    def __init__(self, budget_bytes: int, floor_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self._entries: dict[tuple[Account, str], int] = {}
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """What the budget has left."""
        with self._lock:
            return self.budget_bytes - sum(self._entries.values())

    def reserve(self, account: Account, name: str, amount: int) -> None:
        """Enter bytes; raises `MemoryBudgetError` if the budget does not have them."""
        with self._lock:
            free = self.budget_bytes - sum(self._entries.values())
            if amount > free:
                raise MemoryBudgetError(
                    f"No room for the {account.value} of {name}: it needs {_mib(amount)}, of a "
                    f"budget of {_mib(self.budget_bytes)} {_mib(max(free, 0))} are free; raise "
                    "memory.budget_mib, lower context_tokens or resident_capacity, or free memory."
                )
            self._entries[account, name] = self._entries.get((account, name), 0) + amount

    def correct(self, account: Account, name: str, amount: int) -> None:
        """Replace an estimate by what was really allocated."""
        with self._lock:
            self._entries[account, name] = amount

    def move(self, name: str, source: Account, destination: Account) -> None:
        """Carry an entry over to another account."""
        with self._lock:
            self._entries[destination, name] = self._entries.pop((source, name))

    def release(self, account: Account, name: str) -> None:
        """Strike an entry out; one that is not there is no error."""
        with self._lock:
            self._entries.pop((account, name), None)

    def snapshot(self) -> MemorySnapshot:
        """Return the sums by account, beside what the system has available."""
        with self._lock:
            sums = dict.fromkeys(Account, 0)
            for (account, _), amount in self._entries.items():
                sums[account] += amount
        return MemorySnapshot(
            budget_bytes=self.budget_bytes,
            target_bytes=sums[Account.TARGET] + sums[Account.TOKENS],
            predictor_bytes=sums[Account.PREDICTOR],
            draft_bytes=sums[Account.DRAFT],
            kv_bytes=sums[Account.KV],
            in_flight_bytes=sums[Account.IN_FLIGHT],
            available_bytes=available_bytes(),
            floor_bytes=self.floor_bytes,
        )


def open_ledger(budget_mib: int, floor_mib: int) -> Ledger:
    """Open a ledger over the given budget, or over what is available now above the floor."""
    floor_bytes = floor_mib * MIB
    budget_bytes = budget_mib * MIB if budget_mib else max(0, available_bytes() - floor_bytes)
    return Ledger(budget_bytes, floor_bytes)


def _mib(amount: int) -> str:
    return f"{amount / MIB:.1f} MiB"
