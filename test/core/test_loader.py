"""The background thread that loads drafts."""

import gc
import threading
import weakref

import pytest

from core.tiny import ManualClock
from memspec_core.errors import CheckpointError
from memspec_core.residency.loader import DraftLoader
from memspec_core.speculation.proposal import Draft, Proposal


class NamedDraft:
    """A draft of which only the name matters."""

    kind = "named"

    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, *_: object) -> Proposal:
        return Proposal()

    def read(self, context: object) -> None:
        pass

    def rollback(self, length: int) -> None:
        pass


def test_drafts_are_loaded_in_the_order_asked_for() -> None:
    gate, loaded = threading.Event(), []

    def load(name: str) -> Draft:
        gate.wait(10)
        loaded.append(name)
        return NamedDraft(name)

    loader = DraftLoader(load, ManualClock())
    for name in "cab":
        loader.start(name)
    assert loader.finished() == []
    gate.set()
    loads = [loader.wait() for _ in range(3)]
    assert [load.name for load in loads] == loaded == ["c", "a", "b"]
    assert [load.draft.name for load in loads if load.draft] == loaded
    assert loader.finished() == []
    loader.close()


def test_a_failure_is_a_finished_load_and_the_thread_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load(name: str) -> Draft:
        if name == "broken":
            raise CheckpointError("draft.safetensors is truncated.")
        if name == "odd":
            raise ZeroDivisionError("what a broken file raises")
        return NamedDraft(name)

    loader = DraftLoader(load, ManualClock())
    for name in ("broken", "odd", "whole"):
        loader.start(name)
    broken, odd, whole = (loader.wait() for _ in range(3))
    assert (broken.draft, broken.error) == (None, "draft.safetensors is truncated.")
    assert odd.draft is None
    assert "odd" in odd.error
    assert "ZeroDivisionError" in odd.error
    assert whole.draft is not None
    assert whole.error == ""
    assert "ZeroDivisionError" in caplog.text
    loader.close()


def test_seconds_are_those_of_the_clock() -> None:
    clock = ManualClock()

    def load(name: str) -> Draft:
        clock.seconds += 2.5
        return NamedDraft(name)

    loader = DraftLoader(load, clock)
    loader.start("a")
    assert loader.wait().seconds == 2.5
    loader.close()


def test_it_says_when_a_load_has_ended() -> None:
    ended = threading.Event()
    loader = DraftLoader(NamedDraft, ManualClock(), on_finished=ended.set)
    loader.start("a")
    assert ended.wait(10)
    assert [load.name for load in loader.finished()] == ["a"]
    loader.close()


def test_close_waits_for_the_load_under_way() -> None:
    begun, go_on, loaded = threading.Event(), threading.Event(), []

    def load(name: str) -> Draft:
        begun.set()
        go_on.wait(10)
        loaded.append(name)
        return NamedDraft(name)

    loader = DraftLoader(load, ManualClock())
    loader.start("a")
    begun.wait(10)
    closing = threading.Thread(target=loader.close)
    closing.start()
    go_on.set()
    closing.join(10)
    assert not closing.is_alive()
    assert loaded == ["a"]


def test_a_draft_that_was_handed_over_is_not_kept_alive() -> None:
    loader = DraftLoader(NamedDraft, ManualClock())
    loader.start("a")
    load = loader.wait()
    assert load.draft is not None
    seen = weakref.ref(load.draft)
    del load
    gc.collect()
    assert seen() is None
    loader.close()
