"""The background thread that loads drafts."""

import gc
import os
import sys
import threading
import weakref

import pytest

from core.tiny import ManualClock
from memspec_core.errors import CheckpointError, LoadGivenUpError
from memspec_core.models.pieces import Pace
from memspec_core.residency import loader as loader_module
from memspec_core.residency.loader import LOADER_NICENESS, STALL_SECONDS, DraftLoader
from memspec_core.residency.pace import LoadAbandonedError, LoadPace, load_rate
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

    def known(self, context: object) -> int:
        return 0

    def rollback(self, length: int) -> None:
        pass


def named(name: str, pace: Pace) -> Draft:
    return NamedDraft(name)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_loads_stand_back_behind_what_decodes() -> None:
    found = []

    def load(name: str, pace: Pace) -> Draft:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))
        return NamedDraft(name)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    loader = DraftLoader(load, ManualClock())
    loader.start("a")
    loader.wait()
    loader.close()
    assert found == [min(19, before + LOADER_NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_drafts_are_loaded_in_the_order_asked_for() -> None:
    gate, loaded = threading.Event(), []

    def load(name: str, pace: Pace) -> Draft:
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
    def load(name: str, pace: Pace) -> Draft:
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

    def load(name: str, pace: Pace) -> Draft:
        clock.seconds += 2.5
        return NamedDraft(name)

    loader = DraftLoader(load, clock)
    loader.start("a")
    assert loader.wait().seconds == 2.5
    loader.close()


def test_a_load_counts_from_when_it_was_asked_for_and_the_one_before_had_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, clock = threading.Event(), ManualClock()

    def load(name: str, pace: Pace) -> Draft:
        clock.seconds += 10.0
        return NamedDraft(name)

    monkeypatch.setattr(loader_module, "_stand_back", lambda: late.wait(10))
    loader = DraftLoader(load, clock)
    loader.start("a")
    clock.seconds += 3.0  # the thread comes late
    loader.start("b")
    clock.seconds += 1.0
    late.set()
    assert [loader.wait().seconds for _ in range(2)] == [14.0, 10.0]
    loader.close()


def test_it_says_when_a_load_has_ended() -> None:
    ended = threading.Event()
    loader = DraftLoader(named, ManualClock(), on_finished=ended.set)
    loader.start("a")
    assert ended.wait(10)
    assert [load.name for load in loader.finished()] == ["a"]
    loader.close()


def test_close_waits_for_the_load_under_way() -> None:
    begun, go_on, loaded = threading.Event(), threading.Event(), []

    def load(name: str, pace: Pace) -> Draft:
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


class Hanging:
    """Loads of "stuck" hang until they are let go; all others end at once."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.ended = (threading.Event() for _ in range(3))

    def __call__(self, name: str, pace: Pace) -> Draft:
        if name == "stuck":
            self.begun.set()
            self.go_on.wait(10)
            self.ended.set()
        return NamedDraft(name)


def test_a_load_that_hangs_fails_in_time_and_others_go_on() -> None:
    clock, load = ManualClock(), Hanging()
    loader = DraftLoader(load, clock)
    loader.start("stuck")
    loader.start("next")
    assert load.begun.wait(10)
    assert loader.finished() == []
    clock.seconds += STALL_SECONDS
    stuck = loader.wait()
    assert (stuck.name, stuck.draft, stuck.seconds) == ("stuck", None, STALL_SECONDS)
    assert "60 s" in stuck.error
    after = loader.wait()
    assert (after.name, after.error) == ("next", "")
    loader.start("stuck")  # which would hang as well
    assert "still hangs" in loader.wait().error
    load.go_on.set()
    assert load.ended.wait(10)
    loader.start("last")
    assert loader.wait().name == "last"  # what came late was dropped
    loader.close()


def test_whoever_waits_may_give_up_and_the_load_goes_on() -> None:
    load = Hanging()
    loader = DraftLoader(load, ManualClock())
    loader.start("stuck")
    assert load.begun.wait(10)
    with pytest.raises(LoadGivenUpError):
        loader.wait(lambda: True)
    load.go_on.set()
    assert loader.wait().draft is not None
    loader.close()


def test_close_leaves_a_thread_behind_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    load = Hanging()
    loader = DraftLoader(load, ManualClock(), close_seconds=0.01)
    loader.start("stuck")
    loader.start("never loaded")
    assert load.begun.wait(10)
    loader.close()
    assert "left behind" in caplog.text
    threads = [t for t in threading.enumerate() if t.name == "memspec-loader"]
    assert all(thread.daemon for thread in threads)
    load.go_on.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_close_ends_a_load_at_its_next_piece() -> None:
    begun, ended = threading.Event(), []

    def load(name: str, pace: Pace) -> Draft:
        begun.set()
        try:
            while True:
                pace(1)
        except LoadAbandonedError as error:
            ended.append(error)
            raise

    loader = DraftLoader(load, ManualClock())
    loader.start("a")
    assert begun.wait(10)
    loader.close()
    assert len(ended) == 1


def test_a_pace_waits_until_bytes_are_due() -> None:
    clock = ManualClock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.seconds += seconds

    pace = LoadPace(100.0, lambda: False, clock, sleep)
    pace(50)
    clock.seconds += 0.25  # that reading itself took
    pace(50)
    clock.seconds += 3.0
    pace(50)
    assert slept == [pytest.approx(0.5), pytest.approx(0.25)]


def test_the_rate_follows_from_that_of_memory() -> None:
    assert load_rate(10e9) == pytest.approx(0.5e9)  # 15 % of it, read, copied and checked
    assert load_rate(10e9, slowdown=0.3) == pytest.approx(1e9)
    assert load_rate(0.0) == float("inf")


def test_loads_keep_to_the_rate() -> None:
    clock = ManualClock()
    slept: list[float] = []

    def load(name: str, pace: Pace) -> Draft:
        pace(1_000_000)
        return NamedDraft(name)

    loader = DraftLoader(load, clock, sleep=slept.append)
    loader.start("a")
    loader.wait()
    loader.limit_rate(20e6)
    loader.start("a")
    loader.wait()
    loader.close()
    assert slept == [pytest.approx(1.0)]


def test_a_draft_that_was_handed_over_is_not_kept_alive() -> None:
    loader = DraftLoader(named, ManualClock())
    loader.start("a")
    load = loader.wait()
    assert load.draft is not None
    seen = weakref.ref(load.draft)
    del load
    gc.collect()
    assert seen() is None
    loader.close()
