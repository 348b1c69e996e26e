"""The books of fast memory."""

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memspec_core.errors import MemoryBudgetError
from memspec_core.residency.ledger import MIB, Account, Ledger, available_bytes, open_ledger


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    ledger = Ledger(10 * MIB)
    ledger.reserve(Account.TARGET, "target", 6 * MIB)
    with pytest.raises(MemoryBudgetError) as refused:
        ledger.reserve(Account.KV, "target", 5 * MIB)
    said = str(refused.value)
    assert all(part in said for part in ("KV cache of target", "5.0 MiB", "10.0 MiB", "4.0 MiB"))
    assert ledger.free_bytes == 4 * MIB
    ledger.reserve(Account.KV, "target", 4 * MIB)
    assert ledger.free_bytes == 0


def test_sums_by_account() -> None:
    ledger = Ledger(1000, floor_bytes=7)
    ledger.reserve(Account.TARGET, "target", 100)
    ledger.reserve(Account.KV, "target", 20)
    ledger.reserve(Account.KV, "a", 30)
    ledger.reserve(Account.IN_FLIGHT, "a", 40)
    ledger.reserve(Account.DRAFT, "b", 50)
    found = ledger.snapshot()
    assert (found.budget_bytes, found.floor_bytes) == (1000, 7)
    assert (found.target_bytes, found.kv_bytes) == (100, 50)
    assert (found.in_flight_bytes, found.draft_bytes) == (40, 50)
    assert found.used_bytes == 240 == 1000 - ledger.free_bytes
    assert found.available_bytes > 0


def test_moving_correcting_and_releasing() -> None:
    ledger = Ledger(1000)
    ledger.reserve(Account.IN_FLIGHT, "a", 40)
    ledger.move("a", Account.IN_FLIGHT, Account.DRAFT)
    assert (ledger.snapshot().in_flight_bytes, ledger.snapshot().draft_bytes) == (0, 40)
    ledger.correct(Account.DRAFT, "a", 45)
    assert ledger.free_bytes == 955
    ledger.release(Account.DRAFT, "a")
    ledger.release(Account.DRAFT, "a")  # it is gone already, which is no error
    assert ledger.free_bytes == 1000


def test_a_budget_is_given_or_measured() -> None:
    assert open_ledger(100, 5).budget_bytes == 100 * MIB
    measured = open_ledger(0, 64)
    assert measured.floor_bytes == 64 * MIB
    assert 0 < measured.budget_bytes <= available_bytes() + 1024 * MIB
    assert open_ledger(0, 10**6).budget_bytes == 0


def test_many_threads_never_take_more_than_there_is() -> None:
    ledger, taken = Ledger(1000), []

    def take(name: str) -> None:
        for _ in range(50):
            try:
                ledger.reserve(Account.DRAFT, name, 7)
            except MemoryBudgetError:
                return
            taken.append(7)

    threads = [threading.Thread(target=take, args=(name,)) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == ledger.snapshot().draft_bytes == 994


class LedgerMachine(RuleBasedStateMachine):
    """Compares the ledger with plain sums."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(200)
        self.entries: dict[tuple[Account, str], int] = {}

    @rule(account=st.sampled_from(Account), name=st.sampled_from("ab"), amount=st.integers(0, 120))
    def reserve(self, account: Account, name: str, amount: int) -> None:
        if amount > 200 - sum(self.entries.values()):
            with pytest.raises(MemoryBudgetError):
                self.ledger.reserve(account, name, amount)
        else:
            self.ledger.reserve(account, name, amount)
            self.entries[account, name] = self.entries.get((account, name), 0) + amount

    @rule(account=st.sampled_from(Account), name=st.sampled_from("ab"))
    def release(self, account: Account, name: str) -> None:
        self.ledger.release(account, name)
        self.entries.pop((account, name), None)

    @invariant()
    def sums_agree(self) -> None:
        assert self.ledger.free_bytes == 200 - sum(self.entries.values())
        assert self.ledger.snapshot().used_bytes == sum(self.entries.values())


TestLedgerMachine = LedgerMachine.TestCase
