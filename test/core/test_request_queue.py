"""Who waits, who comes next and who goes, against what the policies promise."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspec_core.errors import QueueFullError
from memspec_core.request_queue import PREEMPT, QUEUE, QUEUE_POLICIES, REJECT, RequestQueue


@dataclass(frozen=True)
class Asked:
    priority: int
    number: int = 0


def line(queue: RequestQueue[Asked]) -> list[Asked]:
    """Return who waits, by taking all out and putting them back."""
    waiting = queue.clear()
    for item in waiting:
        assert queue.add(item, None) == []
    return waiting


def in_order(items: list[Asked]) -> list[Asked]:
    return sorted(items, key=lambda item: (-item.priority, item.number))


STEPS = st.lists(
    st.one_of(st.integers(-2, 2), st.sampled_from(["take", "leave first", "leave last"])),
    max_size=40,
)


@given(steps=STEPS, capacity=st.integers(1, 4), policy=st.sampled_from([QUEUE, PREEMPT]))
def test_order_bound_and_who_is_displaced(
    steps: list[int | str], capacity: int, policy: str
) -> None:
    queue = RequestQueue[Asked](policy, capacity)
    waiting: list[Asked] = []
    for number, step in enumerate(steps):
        if step == "take":
            first = queue.take()
            assert first == (in_order(waiting)[0] if waiting else None)
            waiting = [item for item in waiting if item != first]
        elif isinstance(step, str):
            if waiting:
                gone = waiting.pop(0 if step == "leave first" else -1)
                assert queue.remove(gone)
                assert not queue.remove(gone)
        else:
            asked = Asked(step, number)
            try:
                displaced = queue.add(asked, None)
            except QueueFullError:
                assert len(waiting) == capacity
                assert all(other.priority >= step for other in waiting)
                continue
            if policy == PREEMPT:
                assert displaced == in_order([o for o in waiting if o.priority <= step])
            else:
                lowest = in_order(waiting)[-1:]
                full = len(waiting) == capacity
                assert displaced == (lowest if full else [])
                assert all(other.priority < step for other in displaced)
            waiting = [item for item in waiting if item not in displaced] + [asked]
        assert len(queue) == len(waiting) <= capacity
    assert queue.clear() == in_order(waiting)
    assert len(queue) == 0


@given(running=st.integers(-128, 127), new=st.integers(-128, 127))
def test_only_preempt_ends_what_runs_and_nothing_more_urgent(running: int, new: int) -> None:
    for policy in QUEUE_POLICIES:
        preempts = RequestQueue[Asked](policy, 1).preempts(Asked(new), Asked(running))
        assert preempts == (policy == PREEMPT and new >= running)


def test_reject_takes_a_request_only_while_nothing_runs_or_waits() -> None:
    queue = RequestQueue[Asked](REJECT, 8)
    with pytest.raises(QueueFullError, match="queue_policy is reject"):
        queue.add(Asked(100), running=Asked(0))
    assert queue.add(Asked(0), running=None) == []
    with pytest.raises(QueueFullError, match="queue_policy is reject"):
        queue.check(100, running=None)
    assert queue.take() == Asked(0)


@given(priorities=st.lists(st.integers(-1, 1), max_size=6))
def test_a_refusal_changes_nothing(priorities: list[int]) -> None:
    queue = RequestQueue[Asked](QUEUE, 2)
    for number, priority in enumerate(priorities):
        before = line(queue)
        try:
            queue.check(priority, None)
        except QueueFullError:
            with pytest.raises(QueueFullError):
                queue.add(Asked(priority, number), None)
            assert line(queue) == before
        else:
            queue.add(Asked(priority, number), None)
