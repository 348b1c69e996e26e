"""The runtime on tiny checkpoints: its life, its queue, its faults."""

import contextlib
import gc
import json
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.tiny import ManualClock, make_settings, sampling
from memspec_core.errors import (
    CheckpointError,
    MemoryBudgetError,
    MemSpecError,
    NotAcceptingError,
    QueueFullError,
    RequestError,
    SettingsError,
    UnknownDraftError,
)
from memspec_core.generation import Generation
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.decoder import Decoder
from memspec_core.models.draft import MANIFEST, WEIGHTS, DraftPlan
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.target import TargetPlan
from memspec_core.models.torch_decoder import TorchDecoder
from memspec_core.models.weights import WeightReader
from memspec_core.prediction.context import RECENT
from memspec_core.prediction.head import HIDDEN_STATES, PredictorPlan, RankingHead, save_head
from memspec_core.request import FinishReason, GenerationRequest, GenerationResult
from memspec_core.residency.cache import DraftCache
from memspec_core.residency.ledger import Account, Ledger
from memspec_core.residency.pressure import MemoryPressure, PressureLevel
from memspec_core.runtime import DISPLACED, Runtime
from memspec_core.settings import Settings
from memspec_core.snapshot import DraftState, MemorySnapshot

SECONDS = 30
"""No test waits so long unless something hangs."""


class Gate:
    """Holds the worker in the target's forward, or lets it fail there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._passes: int | None = None
        self._released = threading.Event()
        self._faults: list[BaseException | None] = []
        self.reached = threading.Event()
        forward = TorchDecoder.forward

        def guarded(
            decoder: TorchDecoder, ids: Sequence[int], cache: KeyValueCache, *parents: Any
        ) -> torch.Tensor:
            self._pass()
            fault = self._faults.pop(0) if self._faults else None
            if fault is not None:
                raise fault
            return forward(decoder, ids, cache, *parents)

        monkeypatch.setattr(TorchDecoder, "forward", guarded)

    def _pass(self) -> None:
        if self._passes == 0:
            self.reached.set()
            assert self._released.wait(SECONDS)
        elif self._passes is not None:
            self._passes -= 1

    def hold(self, after: int = 0) -> None:
        """Hold the worker at its next pass, or after so many more."""
        self.reached.clear()
        self._released.clear()
        self._passes = after

    def release(self) -> None:
        self._passes = None
        self._released.set()

    def fail_after(self, passes: int, fault: BaseException) -> None:
        self._faults = [*[None] * passes, fault]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def start(target_folder: Path, draft_folders: dict[str, Path]) -> Iterator[Callable[..., Runtime]]:
    """Return a function that loads and opens a runtime with drafts by name."""
    started: list[Runtime] = []

    def begin(*drafts: str, clock: ManualClock | None = None, **parameters: Any) -> Runtime:
        folders = {name: draft_folders[name] for name in drafts}
        runtime = Runtime(make_settings(target_folder, folders, **parameters), clock=clock)
        started.append(runtime)
        runtime.load()
        runtime.open()
        return runtime

    yield begin
    for runtime in started:
        runtime.close()


def asked(prompt: str = "Hello there", **fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, **fields)


def answer(runtime: Runtime, *args: Any, **fields: Any) -> GenerationResult:
    return result_of(runtime.submit(asked(*args, **fields)))


def result_of(generation: Generation) -> GenerationResult:
    """Return a result, or fail the test where none comes."""
    waited = threading.Thread(target=generation.result, daemon=True)
    waited.start()
    waited.join(SECONDS)
    assert not waited.is_alive(), "a generation never ended"
    return generation.result()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does soon."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("memspec-")]


class Decoders:
    """Sees which decoders, of targets and drafts, are in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: weakref.WeakSet[Decoder] = weakref.WeakSet()
        make = Decoder.__init__

        def counted(decoder: Decoder, *arguments: Any, **more: Any) -> None:
            make(decoder, *arguments, **more)
            self._made.add(decoder)

        monkeypatch.setattr(Decoder, "__init__", counted)

    def alive(self, *, collected: bool = True) -> int:
        if collected:
            gc.collect()
        return len(self._made)


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Decoders:
    return Decoders(monkeypatch)


# Life


def test_load_open_shut_close_and_again(target_folder: Path) -> None:
    runtime = Runtime(make_settings(target_folder))
    texts = []
    for _ in range(2):
        with pytest.raises(NotAcceptingError):
            runtime.open()
        runtime.load()
        with pytest.raises(NotAcceptingError, match="loaded already"):
            runtime.load()
        assert (runtime.snapshot().loaded, runtime.snapshot().accepting) == (True, False)
        with pytest.raises(NotAcceptingError, match="not active"):
            runtime.submit(asked())
        for _ in range(2):
            runtime.open()
            assert runtime.snapshot().accepting
            texts.append(answer(runtime).text)
            runtime.shut()
            with pytest.raises(NotAcceptingError):
                runtime.submit(asked())
            assert runtime.snapshot().loaded
        runtime.close()
        assert not runtime.snapshot().loaded
    assert len(set(texts)) == 1


def test_close_frees_everything_and_may_be_called_again(
    start: Callable[..., Runtime], decoders: Decoders
) -> None:
    runtime = start("itself", "first_layer", resident_capacity=2)
    assert decoders.alive() == 2
    assert runtime.snapshot().memory.used_bytes > 0
    answer(runtime, draft="first_layer")
    for _ in range(3):
        runtime.close()
    after = runtime.snapshot()
    assert after.memory.used_bytes == 0
    assert not (after.loaded or after.accepting or after.worker_alive or after.running)
    assert {draft.state for draft in after.drafts} == {DraftState.STORED}
    assert own_threads() == []
    assert decoders.alive() == 0


def test_close_needs_no_search_for_cycles(
    start: Callable[..., Runtime], decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = start("itself", "first_layer", resident_capacity=2)
    answer(runtime, draft="first_layer")
    monkeypatch.setattr("memspec_core.runtime.return_memory", lambda: None)
    gc.disable()
    try:
        runtime.close()
        assert decoders.alive(collected=False) == 0
    finally:
        gc.enable()


def test_close_waits_for_whoever_describes_the_models(
    start: Callable[..., Runtime], decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = start("itself")
    begun, go_on = threading.Event(), threading.Event()

    def slowly(pressure: MemoryPressure, memory: MemorySnapshot) -> MemorySnapshot:
        begun.set()
        assert go_on.wait(SECONDS)
        return memory

    monkeypatch.setattr(MemoryPressure, "describe", slowly)
    describing = threading.Thread(target=runtime.snapshot)
    describing.start()
    assert begun.wait(SECONDS)
    closing = threading.Thread(target=runtime.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    go_on.set()
    closing.join(SECONDS)
    describing.join(SECONDS)
    assert decoders.alive(collected=False) == 0


def test_close_without_a_load(target_folder: Path) -> None:
    Runtime(make_settings(target_folder)).close()


def test_what_is_loaded_is_shown(start: Callable[..., Runtime], target_folder: Path) -> None:
    runtime = start("itself", "other")
    shown = runtime.snapshot()
    assert (shown.loaded, shown.accepting, shown.worker_alive) == (True, True, True)
    assert shown.target.path == str(target_folder)
    assert (shown.target.family, shown.target.dtype) == ("llama", "fp32")
    assert shown.target.context_tokens == 256
    assert shown.draft_names_in(DraftState.RESIDENT) == ("itself",)
    assert shown.draft_names_in(DraftState.STORED) == ("other",)
    memory = shown.memory
    assert memory.target_bytes > 0
    assert memory.draft_bytes > 0
    assert memory.kv_bytes > 0
    assert memory.in_flight_bytes == 0
    assert memory.used_bytes <= memory.budget_bytes == 2000 * 2**20


def test_a_load_that_fails_leaves_nothing(
    target_folder: Path, tmp_path: Path, decoders: Decoders
) -> None:
    broken = Path(shutil.copytree(target_folder, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    runtime = Runtime(make_settings(broken))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        runtime.load()
    assert not runtime.snapshot().loaded
    assert not runtime.snapshot().worker_alive
    assert own_threads() == []
    assert decoders.alive() == 0


@pytest.mark.parametrize("part", ["load_head", "Controller", "MemoryPressure"])
def test_a_fault_in_any_part_of_the_load_leaves_no_thread(
    part: str,
    target_folder: Path,
    draft_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faulty(*_: object, **__: object) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr(f"memspec_core.engine.{part}", faulty)
    folders = {name: draft_folders[name] for name in ("itself", "other")}
    runtime = Runtime(make_settings(target_folder, folders, predictor__path="unused"))
    with pytest.raises(OSError, match="Input/output"):
        runtime.load()
    assert own_threads() == []


def test_a_predictor_that_gives_no_numbers_is_shown_until_it_gives_some(
    start: Callable[..., Runtime],
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_head(head_for(target_folder, ("itself", "other")), tmp_path)
    runtime = start(
        "itself",
        "other",
        strategy="memspec",
        predictor__path=str(tmp_path),
        scheduling_interval=1,
    )
    assert runtime.snapshot().predictor_error == ""
    assert runtime.snapshot().memory.predictor_bytes > 0
    with monkeypatch.context() as patch:
        patch.setattr(RankingHead, "logits", lambda *_: np.full(2, np.nan, np.float32))
        assert answer(runtime).error == ""
        assert "not finite" in runtime.snapshot().predictor_error
        assert caplog.text.count("not finite") == 1
    answer(runtime)
    assert runtime.snapshot().predictor_error == ""


def test_without_room_for_a_predictor_all_drafts_count_alike(
    start: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memspec_core.engine.weight_bytes", lambda _: 2**50)
    runtime = start("itself", "other", strategy="memspec", predictor__path="unused")
    snapshot = runtime.snapshot()
    assert "No room for the predictor" in snapshot.predictor_error
    assert snapshot.memory.predictor_bytes == 0


def head_for(target: Path, drafts: tuple[str, ...]) -> RankingHead:
    """A predictor for a target to which all drafts are the same."""
    checkpoint, count = open_checkpoint(target), len(drafts)
    hidden = checkpoint.config.hidden_size
    plan = PredictorPlan(
        drafts=drafts,
        inputs=RECENT,
        encoder=HIDDEN_STATES,
        hidden_size=hidden,
        positions=16,
        prompt_positions=16,
        interval=4,
        target_sha256=checkpoint.sha256(),
        card={},
    )
    weight, bias = np.zeros((count, hidden), np.float32), np.zeros(count, np.float32)
    return RankingHead(plan, weight, bias, np.full((count, count), 0.5, np.float32))


def test_a_corrupt_draft_fails_the_load_and_leaves_nothing(
    target_folder: Path, distilled: Path, tmp_path: Path, decoders: Decoders
) -> None:
    draft = Path(shutil.copytree(distilled, tmp_path / "draft"))
    content = bytearray((draft / WEIGHTS).read_bytes())
    content[len(content) // 2] ^= 255
    (draft / WEIGHTS).write_bytes(content)
    runtime = Runtime(make_settings(target_folder, {"draft": draft}))
    with pytest.raises(CheckpointError, match=r"draft\.safetensors.*checksum"):
        runtime.load()
    assert own_threads() == []
    assert decoders.alive() == 0
    # With the file mended the same runtime loads.
    shutil.copy(distilled / WEIGHTS, draft / WEIGHTS)
    runtime.load()
    runtime.open()
    assert answer(runtime).stats.drafted_tokens > 0
    runtime.close()


def junk_manifest(draft: Path) -> None:
    (draft / MANIFEST).write_text("junk")


def cut_weights(draft: Path) -> None:
    os.truncate(draft / WEIGHTS, 1000)


def no_weights(draft: Path) -> None:
    (draft / WEIGHTS).unlink()


def other_target(draft: Path) -> None:
    fields = json.loads((draft / MANIFEST).read_text())
    (draft / MANIFEST).write_text(json.dumps(fields | {"hidden_size": 12}))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (junk_manifest, "not a draft's manifest"),
        (cut_weights, "truncated"),
        (no_weights, "missing"),
        (other_target, "another|hidden size"),
    ],
)
def test_where_drafts_may_fail_the_others_take_the_place(
    harm: Callable[[Path], None], said: str, target_folder: Path, distilled: Path, tmp_path: Path
) -> None:
    folders = {name: Path(shutil.copytree(distilled, tmp_path / name)) for name in ("bad", "good")}
    harm(folders["bad"])
    settings = make_settings(target_folder, folders, resident_capacity=1, strategy="memspec")
    with pytest.raises(CheckpointError, match=said):
        Runtime(settings).load()

    with running(Runtime(settings, drafts_may_fail=True)) as runtime:
        bad, good = runtime.snapshot().drafts
        assert (bad.state, good.state) == (DraftState.FAILED, DraftState.RESIDENT)
        assert re.search(said, bad.error)
        assert str(folders["bad"]) in bad.error
        assert answer(runtime).stats.drafted_tokens > 0
        asked_for = answer(runtime, draft="bad")
        assert asked_for.finish_reason is FinishReason.ABORTED
        assert asked_for.error == bad.error
        assert runtime.snapshot().memory.in_flight_bytes == 0


def test_where_all_drafts_have_failed_it_decodes_plainly(
    target_folder: Path, distilled: Path, tmp_path: Path
) -> None:
    folders = {name: Path(shutil.copytree(distilled, tmp_path / name)) for name in ("one", "two")}
    junk_manifest(folders["one"])
    cut_weights(folders["two"])
    settings = make_settings(target_folder, folders, strategy="memspec")
    with running(Runtime(settings, drafts_may_fail=True)) as runtime:
        assert {draft.state for draft in runtime.snapshot().drafts} == {DraftState.FAILED}
        result = answer(runtime)
        assert result.finish_reason is not FinishReason.ABORTED
        assert (result.error, result.stats.drafted_tokens) == ("", 0)
        with contextlib.suppress(MemSpecError):
            runtime.pin("one", True)
        until(lambda: runtime.snapshot().drafts[0].state is DraftState.FAILED)
        assert answer(runtime).token_ids == result.token_ids


def test_a_draft_that_is_nowhere_is_a_mistake_of_the_settings(
    target_folder: Path, distilled: Path, tmp_path: Path
) -> None:
    settings = make_settings(target_folder, {"good": distilled, "absent": tmp_path / "absent"})
    with pytest.raises(CheckpointError, match=r"no draft at.*absent; check drafts\.absent\.path"):
        Runtime(settings, drafts_may_fail=True).load()
    assert own_threads() == []


@contextlib.contextmanager
def running(runtime: Runtime) -> Iterator[Runtime]:
    runtime.load()
    try:
        runtime.open()
        yield runtime
    finally:
        runtime.close()


def test_without_room_nothing_is_allocated(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("allocated before the budget was asked")

    monkeypatch.setattr(TargetPlan, "load", load)
    runtime = Runtime(make_settings(target_folder, memory__budget_mib=1))
    with pytest.raises(MemoryBudgetError, match=r"target.*budget of 1\.0 MiB"):
        runtime.load()


def test_without_room_for_a_draft(
    target_folder: Path, draft_folders: dict[str, Path], decoders: Decoders
) -> None:
    settings = make_settings(
        target_folder, {"other": draft_folders["other"]}, memory__budget_mib=27
    )
    with pytest.raises(MemoryBudgetError, match="other"):
        Runtime(settings).load()
    assert decoders.alive() == 0


def test_without_room_for_any_draft_it_decodes_plainly_where_drafts_may_fail(
    target_folder: Path, draft_folders: dict[str, Path]
) -> None:
    settings = make_settings(
        target_folder, {"other": draft_folders["other"]}, memory__budget_mib=27
    )
    with running(Runtime(settings, drafts_may_fail=True)) as runtime:
        (draft,) = runtime.snapshot().drafts
        assert draft.state is DraftState.FAILED
        assert re.search(r"No room for the draft other.*raise memory\.budget_mib", draft.error)
        assert answer(runtime).stats.drafted_tokens == 0
        assert runtime.snapshot().memory.used_bytes <= 27 * 2**20


class Watched(Ledger):
    """Knows the most that was ever on it, in bytes."""

    peak = 0

    def reserve(self, account: Account, name: str, amount: int) -> None:
        super().reserve(account, name, amount)
        self.peak = max(self.peak, self.budget_bytes - self.free_bytes)


def test_where_only_one_draft_fits_the_best_ranked_one_stays(
    target_folder: Path, draft_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(capacity: int, ledger: Ledger) -> list[DraftState]:
        monkeypatch.setattr("memspec_core.engine.open_ledger", lambda *_: ledger)
        settings = make_settings(
            target_folder, drafts, resident_capacity=capacity, strategy="memspec"
        )
        with running(Runtime(settings)) as runtime:
            assert runtime.snapshot().loads.evictions == 0
            return [draft.state for draft in runtime.snapshot().drafts]

    drafts = {name: draft_folders[name] for name in ("other", "first_layer")}
    one = Watched(2**30)
    assert load(1, one) == [DraftState.RESIDENT, DraftState.STORED]
    assert load(2, Ledger(2**30)) == [DraftState.RESIDENT, DraftState.RESIDENT]
    assert load(2, Ledger(one.peak)) == [DraftState.RESIDENT, DraftState.STORED]


def test_short_of_memory_it_decodes_plainly_and_says_so(start: Callable[..., Runtime]) -> None:
    runtime = start("first_layer", clock=ManualClock(step=1.0), memory__floor_mib=1_000_000)
    result = runtime.submit(asked(max_new_tokens=40)).result()
    assert result.finish_reason is FinishReason.LENGTH
    memory = runtime.snapshot().memory
    assert memory.pressure_level == PressureLevel.PLAIN
    assert "memory.floor_mib" in memory.pressure
    runtime.submit(asked(max_new_tokens=4)).result()
    assert runtime.snapshot().memory.draft_bytes == 0


def test_a_wrong_device_is_an_error_of_the_settings(target_folder: Path) -> None:
    for device in ("tpu", "gpu0", "cuda:99", "meta"):
        with pytest.raises(SettingsError, match=device):
            Runtime(make_settings(target_folder, device=device)).load()


def test_a_load_can_be_interrupted_and_watched(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    layer = WeightReader.layer

    def slow(*arguments: Any) -> Any:
        reading.set()
        assert go_on.wait(SECONDS)
        return layer(*arguments)

    monkeypatch.setattr(WeightReader, "layer", slow)
    runtime = Runtime(make_settings(target_folder))
    failures: list[BaseException] = []

    def load() -> None:
        try:
            runtime.load()
        except NotAcceptingError as error:
            failures.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    assert reading.wait(SECONDS)
    shown = runtime.snapshot()  # it does not wait for the load
    assert (shown.loaded, shown.worker_alive) == (False, True)
    with pytest.raises(NotAcceptingError):
        runtime.open()
    runtime.interrupt_load()
    go_on.set()
    loading.join(SECONDS)
    assert len(failures) == 1
    assert own_threads() == []
    runtime.load()  # the interruption is over
    runtime.close()


# Answers


def test_an_answer_is_its_iterations_put_together(start: Callable[..., Runtime]) -> None:
    runtime = start("first_layer")
    generation = runtime.submit(asked())
    events = list(generation.iterations())
    result = generation.result()
    assert "".join(event.text for event in events) == result.text
    assert [i for event in events for i in event.token_ids] == list(result.token_ids)
    assert events[-1].finish_reason is result.finish_reason is FinishReason.LENGTH
    assert len(result.token_ids) == 16
    stats = result.stats
    assert stats.generated_tokens == 16
    assert stats.prompt_tokens > 5
    assert stats.drafted_tokens == sum(event.proposed for event in events)
    assert stats.accepted_tokens == sum(event.accepted for event in events)
    assert stats.time_to_first_token_seconds > 0
    assert stats.tokens_per_second > 0
    assert {usage.draft for usage in stats.drafts} <= {"first_layer", "none"}


def test_a_listener_gets_the_iterations_instead(start: Callable[..., Runtime]) -> None:
    runtime = start("first_layer")
    heard: list[str] = []
    generation = runtime.submit(asked(), lambda iteration: heard.append(iteration.text))
    result_of(generation)
    assert list(generation.iterations()) == []
    assert "".join(heard) == generation.result().text == answer(runtime).text


def test_a_listener_that_raises_aborts_its_generation_alone(start: Callable[..., Runtime]) -> None:
    runtime = start()

    def fail(iteration: object) -> None:
        raise OSError("the wire is cut")

    result = result_of(runtime.submit(asked(), fail))
    assert result.finish_reason is FinishReason.ABORTED
    assert "the wire is cut" in result.error
    assert result.text
    assert answer(runtime).finish_reason is not FinishReason.ABORTED


def test_all_drafts_and_none_give_one_answer(start: Callable[..., Runtime]) -> None:
    runtime = start("itself", "first_layer", "other", "short", resident_capacity=2)
    names = ("", "none", "itself", "first_layer", "other", "short", "itself")
    results = [answer(runtime, draft=name) for name in names]
    assert len({result.token_ids for result in results}) == 1
    assert results[1].stats.drafted_tokens == 0


def test_the_draft_of_a_request_is_loaded_where_it_is_not_resident(
    start: Callable[..., Runtime],
) -> None:
    runtime = start("itself", "other", resident_capacity=1)
    result = answer(runtime, draft="other")
    assert {usage.draft for usage in result.stats.drafts} <= {"other", "none"}
    shown = runtime.snapshot()
    assert shown.draft_names_in(DraftState.RESIDENT) == ("other",)
    assert shown.loads.evictions == 1
    assert next(d for d in shown.drafts if d.name == "other").uses > 0
    # The next goal decodes on with what is resident until its own draft has landed.
    until(lambda: any(usage.draft == "itself" for usage in answer(runtime).stats.drafts))


def test_bad_requests_are_refused_at_once(start: Callable[..., Runtime]) -> None:
    runtime = start("itself")
    bad = [
        asked(""),
        asked("a" * 2**21),
        asked("\udcff"),
        asked(draft="poetry"),
        asked(max_new_tokens=-1),
        asked(sampling=sampling(float("nan"))),
        asked(stop=("",)),
    ]
    for request in bad:
        for call in (runtime.check, runtime.submit):
            with pytest.raises(RequestError):
                call(request)
    runtime.check(asked())
    assert answer(runtime).finish_reason is FinishReason.LENGTH


def test_a_prompt_that_is_too_long_aborts_with_the_sentence(
    start: Callable[..., Runtime],
) -> None:
    runtime = start()
    result = answer(runtime, "word " * 220)
    assert result.finish_reason is FinishReason.ABORTED
    assert "max_prompt_tokens is 200" in result.error
    assert (result.text, result.token_ids) == ("", ())
    wide = start(max_prompt_tokens=5000)
    result = answer(wide, "word " * 400)
    assert result.finish_reason is FinishReason.ABORTED
    assert "the context holds 256" in result.error
    assert answer(wide).finish_reason is FinishReason.LENGTH


def test_settings_of_a_request_do_not_stay(start: Callable[..., Runtime]) -> None:
    runtime = start("first_layer")
    before = answer(runtime)
    answer(runtime, sampling=sampling(3.0, seed=2), stop=("a",), max_new_tokens=40, draft="none")
    assert answer(runtime).token_ids == before.token_ids


@pytest.mark.parametrize("temperature", [1e-45, 1e-10, 100.0])
def test_absurd_temperatures_still_answer(
    temperature: float, start: Callable[..., Runtime]
) -> None:
    result = answer(start("first_layer"), sampling=sampling(temperature))
    assert result.error == ""
    assert result.finish_reason in (FinishReason.LENGTH, FinishReason.END_OF_SEQUENCE)


# Ends from outside


def test_cancel_while_running_keeps_the_text(start: Callable[..., Runtime], gate: Gate) -> None:
    runtime = start("first_layer")
    whole = answer(runtime, max_new_tokens=60)
    gate.hold(after=15)
    generation = runtime.submit(asked(max_new_tokens=60))
    assert gate.reached.wait(SECONDS)
    generation.cancel()
    generation.cancel()
    gate.release()
    result = result_of(generation)
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.error == ""
    assert 0 < len(result.token_ids) < len(whole.token_ids)
    assert whole.text.startswith(result.text)
    assert result.text
    generation.cancel()  # after the end it means nothing
    assert generation.result() is result
    assert answer(runtime, max_new_tokens=60).token_ids == whole.token_ids


def test_cancel_while_queued(start: Callable[..., Runtime], gate: Gate) -> None:
    runtime = start()
    gate.hold()
    first, second = runtime.submit(asked()), runtime.submit(asked())
    assert gate.reached.wait(SECONDS)
    second.cancel()
    result = result_of(second)  # at once, although the worker is held
    assert (result.finish_reason, result.text) == (FinishReason.CANCELLED, "")
    assert list(second.iterations()) == []
    assert runtime.snapshot().queue_length == 0
    gate.release()
    assert result_of(first).finish_reason is FinishReason.LENGTH


def test_the_queue_is_bounded(start: Callable[..., Runtime], gate: Gate) -> None:
    runtime = start(queue_size=2)
    gate.hold()
    running = runtime.submit(asked())
    assert gate.reached.wait(SECONDS)
    queued = [runtime.submit(asked()) for _ in range(2)]
    shown = runtime.snapshot()  # it does not wait for the iteration
    assert (shown.running, shown.queue_length, shown.queue_capacity) == (True, 2, 2)
    for call in (runtime.check, runtime.submit):
        with pytest.raises(QueueFullError, match="2 requests"):
            call(asked())
    gate.release()
    for generation in (running, *queued):
        assert result_of(generation).finish_reason is FinishReason.LENGTH
    assert answer(runtime).finish_reason is FinishReason.LENGTH


def test_what_is_most_urgent_runs_first(start: Callable[..., Runtime], gate: Gate) -> None:
    runtime = start()
    order: list[int] = []
    gate.hold()
    running = runtime.submit(asked())
    assert gate.reached.wait(SECONDS)
    waiting = [
        runtime.submit(asked(priority=priority), listener=lambda _, n=n: order.append(n))
        for n, priority in enumerate([0, 5, -5, 5])
    ]
    gate.release()
    for generation in (running, *waiting):
        assert result_of(generation).finish_reason is FinishReason.LENGTH
    assert list(dict.fromkeys(order)) == [1, 3, 0, 2]


def test_a_full_queue_lets_the_least_urgent_go(start: Callable[..., Runtime], gate: Gate) -> None:
    runtime = start(queue_size=1)
    gate.hold()
    running = runtime.submit(asked())
    assert gate.reached.wait(SECONDS)
    lower, higher = runtime.submit(asked()), runtime.submit(asked(priority=1))
    result = result_of(lower)  # while another still runs
    assert (result.finish_reason, result.error) == (FinishReason.ABORTED, DISPLACED)
    gate.release()
    for generation in (running, higher):
        assert result_of(generation).finish_reason is FinishReason.LENGTH


def test_a_newer_request_preempts_what_is_not_more_urgent(
    start: Callable[..., Runtime], gate: Gate
) -> None:
    runtime = start(queue_policy="preempt")
    gate.hold(after=5)
    urgent = runtime.submit(asked(priority=1, max_new_tokens=60))
    assert gate.reached.wait(SECONDS)
    first, second = runtime.submit(asked()), runtime.submit(asked())
    assert result_of(first).error == DISPLACED
    most_urgent = runtime.submit(asked(priority=1, max_new_tokens=3))
    gate.release()
    result = result_of(urgent)
    assert (result.finish_reason, result.error) == (FinishReason.ABORTED, DISPLACED)
    assert result.text
    assert result_of(second).error == DISPLACED
    assert result_of(most_urgent).finish_reason is FinishReason.LENGTH


def test_time_is_over_for_what_waits_as_well(start: Callable[..., Runtime], gate: Gate) -> None:
    runtime = start()
    gate.hold()
    running = runtime.submit(asked())
    assert gate.reached.wait(SECONDS)
    late = runtime.submit(asked(time_limit_seconds=0.01))
    result = result_of(late)  # while another still runs
    assert (result.finish_reason, result.text) == (FinishReason.TIME_LIMIT, "")
    gate.release()
    assert result_of(running).finish_reason is FinishReason.LENGTH
    assert runtime.snapshot().generations.succeeded == 2


def test_a_time_limit(start: Callable[..., Runtime]) -> None:
    clock = ManualClock(step=1.0)
    runtime = start("first_layer", clock=clock)
    result = answer(runtime, max_new_tokens=200, time_limit_seconds=60.0)
    assert result.finish_reason is FinishReason.TIME_LIMIT
    assert 0 < len(result.token_ids) < 200
    assert result.error == ""
    assert answer(runtime, time_limit_seconds=1e9).finish_reason is FinishReason.LENGTH


def test_shutting_ends_what_runs_and_waits(start: Callable[..., Runtime], gate: Gate) -> None:
    runtime = start("first_layer")
    whole = answer(runtime, max_new_tokens=60)
    gate.hold(after=15)
    running = runtime.submit(asked(max_new_tokens=60))
    assert gate.reached.wait(SECONDS)
    queued = runtime.submit(asked())
    shutting = threading.Thread(target=runtime.shut, args=("The robot rests.",))
    shutting.start()
    assert result_of(queued).error == "The robot rests."
    gate.release()
    shutting.join(SECONDS)
    result = result_of(running)
    assert result.finish_reason is FinishReason.ABORTED
    assert result.error == "The robot rests."
    assert result.text
    assert whole.text.startswith(result.text)
    runtime.open()
    assert answer(runtime, max_new_tokens=60).token_ids == whole.token_ids


def test_closing_ends_what_runs(start: Callable[..., Runtime], gate: Gate) -> None:
    runtime = start()
    gate.hold(after=3)
    running, queued = runtime.submit(asked(max_new_tokens=200)), runtime.submit(asked())
    assert gate.reached.wait(SECONDS)
    closing = threading.Thread(target=runtime.close)
    closing.start()
    result_of(queued)
    gate.release()
    closing.join(SECONDS)
    for generation in (running, queued):
        result = result_of(generation)
        assert (result.finish_reason, result.error) == (
            FinishReason.ABORTED,
            "The runtime was closed.",
        )


def test_a_hundred_requests_from_many_threads(start: Callable[..., Runtime]) -> None:
    runtime = start("first_layer", queue_size=16)
    expected = answer(runtime, max_new_tokens=4).token_ids
    results: list[GenerationResult] = []
    full: list[QueueFullError] = []

    def client(number: int) -> None:
        for turn in range(10):
            try:
                generation = runtime.submit(asked(max_new_tokens=4))
            except QueueFullError as error:
                full.append(error)
                runtime.count_rejected()
                continue
            if (number + turn) % 4 == 0:
                generation.cancel()
            results.append(generation.result())

    threads = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive()
    assert len(results) + len(full) == 100
    for result in results:
        assert result.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        assert result.token_ids == expected[: len(result.token_ids)]
    until(lambda: not runtime.snapshot().running)
    counts = runtime.snapshot().generations
    assert counts.accepted == len(results) + 1
    assert counts.succeeded + counts.cancelled == counts.accepted
    assert (counts.aborted, counts.rejected) == (0, len(full))


# Faults


@pytest.mark.parametrize("passes", [0, 1, 5, 8])
def test_a_fault_ends_its_generation_alone(
    passes: int, start: Callable[..., Runtime], gate: Gate
) -> None:
    runtime = start("first_layer")
    whole = answer(runtime, max_new_tokens=60)
    gate.fail_after(passes, RuntimeError("out of shared memory"))
    generation = runtime.submit(asked(max_new_tokens=60))
    waiting = runtime.submit(asked(max_new_tokens=60))
    result = result_of(generation)
    assert result.finish_reason is FinishReason.ABORTED
    assert "out of shared memory" in result.error
    assert whole.text.startswith(result.text)
    assert whole.token_ids[: len(result.token_ids)] == result.token_ids
    assert len(result.token_ids) > 0 or passes < 8
    assert result_of(waiting).token_ids == whole.token_ids
    assert runtime.snapshot().worker_alive
    assert runtime.snapshot().generations.aborted == 1


def test_a_fault_loses_no_text_that_was_held_back(
    start: Callable[..., Runtime], gate: Gate
) -> None:
    runtime = start()
    whole = answer(runtime, max_new_tokens=20)
    gate.fail_after(10, RuntimeError("out of shared memory"))
    never_complete = whole.text + "\x00"
    result = answer(runtime, max_new_tokens=20, stop=(never_complete,))
    assert result.finish_reason is FinishReason.ABORTED
    assert result.text
    assert whole.text.startswith(result.text)
    assert result.stats.generated_tokens == len(result.token_ids) > 0


def test_a_worker_that_dies_ends_everything_and_says_so(
    start: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    runtime = start("itself", "other")
    collect = DraftCache.collect

    def broken(cache: DraftCache) -> None:
        if threading.current_thread().name == "memspec-worker":
            raise RuntimeError("the books are wrong")
        collect(cache)

    monkeypatch.setattr(DraftCache, "collect", broken)
    runtime._collect_loads()
    until(lambda: not runtime.snapshot().worker_alive)
    shown = runtime.snapshot()
    assert "the books are wrong" in shown.worker_error
    assert not shown.accepting
    with pytest.raises(NotAcceptingError):
        runtime.submit(asked())
    monkeypatch.setattr(DraftCache, "collect", collect)
    runtime.close()
    runtime.load()
    assert runtime.snapshot().worker_error == ""
    runtime.open()
    assert answer(runtime).finish_reason is FinishReason.LENGTH


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_even_the_end_of_the_thread_ends_every_generation(
    start: Callable[..., Runtime], gate: Gate
) -> None:
    runtime = start()
    gate.hold()
    gate.fail_after(1, SystemExit())
    generations = [runtime.submit(asked()) for _ in range(3)]
    gate.release()
    for generation in generations:
        result = result_of(generation)
        assert result.finish_reason is FinishReason.ABORTED
        assert result.error
    until(lambda: not runtime.snapshot().worker_alive)
    runtime.close()


@pytest.mark.parametrize("end", ["cancel", "shut", "time"])
def test_a_load_that_hangs_holds_no_end_up(
    end: str, start: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = start("itself", "first_layer", resident_capacity=1)
    begun, go_on = threading.Event(), threading.Event()
    load = DraftPlan.load

    def hanging(plan: DraftPlan, *arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(SECONDS)
        return load(plan, *arguments)

    monkeypatch.setattr(DraftPlan, "load", hanging)
    limit = 0.2 if end == "time" else 0.0
    waiting = runtime.submit(asked(draft="first_layer", time_limit_seconds=limit))
    assert begun.wait(SECONDS)
    if end == "cancel":
        waiting.cancel()
    if end == "shut":
        runtime.shut()
        runtime.open()
    expected = {"cancel": "CANCELLED", "shut": "ABORTED", "time": "TIME_LIMIT"}
    assert result_of(waiting).finish_reason is FinishReason[expected[end]]
    assert answer(runtime, draft="none").finish_reason is FinishReason.LENGTH
    go_on.set()
    assert answer(runtime, draft="first_layer").finish_reason is FinishReason.LENGTH


# Changes while running


def test_gamma_changes_in_mid_answer(start: Callable[..., Runtime], gate: Gate) -> None:
    runtime = start("other", draft_length=2, scheduling_interval=1)
    gate.hold(after=10)
    generation = runtime.submit(asked(max_new_tokens=60))
    assert gate.reached.wait(SECONDS)
    runtime.change({"draft_length": 5, "recent_tokens": 10})
    gate.release()
    proposed = [event.proposed for event in generation.iterations()]
    assert proposed[:2] == [2, 2]
    assert max(proposed) == 5


def test_k_and_n_change_while_running(start: Callable[..., Runtime]) -> None:
    runtime = start("itself", "other", "first_layer", resident_capacity=1)
    runtime.change({"resident_capacity": 3, "scheduling_interval": 2})
    shown = runtime.snapshot()
    assert (shown.resident_capacity, shown.scheduling_interval) == (3, 2)
    for name in ("other", "first_layer"):
        answer(runtime, draft=name)
    assert len(runtime.snapshot().draft_names_in(DraftState.RESIDENT)) == 3
    runtime.change({"resident_capacity": 1})
    answer(runtime, draft="other")
    assert runtime.snapshot().draft_names_in(DraftState.RESIDENT) == ("other",)


def test_changes_that_are_refused_change_nothing(start: Callable[..., Runtime]) -> None:
    runtime = start()
    for changes in ({"resident_capacity": 0}, {"target.path": "/x"}, {"nonsense": 1}):
        with pytest.raises(SettingsError):
            runtime.change({"scheduling_interval": 9, **changes})
    assert runtime.snapshot().scheduling_interval == 4


def test_pinning(start: Callable[..., Runtime]) -> None:
    runtime = start("itself", "other", "first_layer", resident_capacity=2)
    runtime.pin("other", pinned=True)
    until(lambda: "other" in runtime.snapshot().draft_names_in(DraftState.RESIDENT))
    assert next(d for d in runtime.snapshot().drafts if d.name == "other").pinned
    answer(runtime, draft="first_layer")
    assert set(runtime.snapshot().draft_names_in(DraftState.RESIDENT)) == {"other", "first_layer"}
    runtime.pin("first_layer", pinned=True)
    with pytest.raises(MemoryBudgetError, match="2 drafts are pinned"):
        runtime.pin("itself", pinned=True)
    runtime.pin("other", pinned=False)
    answer(runtime, draft="itself")
    assert set(runtime.snapshot().draft_names_in(DraftState.RESIDENT)) == {"itself", "first_layer"}
    with pytest.raises(UnknownDraftError, match="poetry"):
        runtime.pin("poetry", pinned=True)


def test_pinning_in_mid_answer(start: Callable[..., Runtime], gate: Gate) -> None:
    runtime = start("itself", "other", resident_capacity=2)
    whole = answer(runtime, max_new_tokens=60)
    gate.hold(after=10)
    generation = runtime.submit(asked(max_new_tokens=60))
    assert gate.reached.wait(SECONDS)
    pinning = threading.Thread(target=runtime.pin, args=("other", True))
    pinning.start()
    gate.release()
    pinning.join(SECONDS)
    assert result_of(generation).token_ids == whole.token_ids
    until(lambda: "other" in runtime.snapshot().draft_names_in(DraftState.RESIDENT))


def test_pinning_without_models(target_folder: Path, draft_folders: dict[str, Path]) -> None:
    runtime = Runtime(make_settings(target_folder, {"other": draft_folders["other"]}))
    with pytest.raises(NotAcceptingError):
        runtime.pin("other", pinned=True)


def test_whoever_listens_is_told_of_changes(target_folder: Path) -> None:
    told = threading.Event()
    runtime = Runtime(make_settings(target_folder), on_change=told.set)
    for act in (runtime.load, runtime.open, lambda: answer(runtime), runtime.shut):
        told.clear()
        act()
        assert told.is_set() or act == runtime.load
    runtime.close()


def test_threads_are_set_where_they_are_asked_for(start: Callable[..., Runtime]) -> None:
    before = torch.get_num_threads()
    try:
        assert start(threads=2).snapshot().target.threads == 2
    finally:
        torch.set_num_threads(before)


def test_default_settings_are_checked_before_anything_is_loaded() -> None:
    runtime = Runtime(Settings.from_parameters({"target.path": "/nowhere"}))
    with pytest.raises(CheckpointError, match="/nowhere"):
        runtime.load()


def test_a_broken_model_aborts_with_the_text_so_far(
    start: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = start("other")
    logits, passes = TorchDecoder.logits, []

    def breaking(decoder: TorchDecoder, hidden: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        found = logits(decoder, hidden)
        return found if len(passes) <= 4 else found * float("nan")

    monkeypatch.setattr(TorchDecoder, "logits", breaking)
    result = runtime.submit(GenerationRequest(prompt="Hello", draft="none")).result()
    assert result.finish_reason is FinishReason.ABORTED
    assert "no finite numbers" in result.error
    assert 0 < len(result.token_ids) <= 4


def test_a_request_may_ask_for_the_lookup_alone(start: Callable[..., Runtime]) -> None:
    runtime = start("other", draft_length=3)
    plain = runtime.submit(GenerationRequest(prompt="a b a b a b", raw=True, draft="none")).result()
    looked_up = runtime.submit(
        GenerationRequest(prompt="a b a b a b", raw=True, draft="lookup")
    ).result()
    assert looked_up.token_ids == plain.token_ids
    assert {usage.draft for usage in looked_up.stats.drafts} <= {"lookup", "none"}


def test_the_snapshot_says_what_passes_cost(start: Callable[..., Runtime]) -> None:
    snapshot = start("other", draft_length=0, lookup=True).snapshot()
    assert len(snapshot.target.pass_seconds) == 16
    assert list(snapshot.target.pass_seconds) == sorted(snapshot.target.pass_seconds)
    assert snapshot.target.read_bytes_per_second > 0
    assert snapshot.proposal == "none"
