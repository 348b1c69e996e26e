"""Drafts kept on disc as the native step has them in memory."""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from core.conftest import Checkpoints
from core.tiny import CPU, load_feature_draft, load_target, make_model, write_feature_draft
from memspec_core.errors import CheckpointError
from memspec_core.models.decoder import FeatureDecoder
from memspec_core.models.draft import WEIGHTS, DraftPlan, plan_draft
from memspec_core.models.native import layouts
from memspec_core.models.native.backend import NativeLinear
from memspec_core.models.native.library import NativeUnavailableError, library
from memspec_core.models.pieces import at_once
from memspec_core.models.target import Target
from memspec_core.request import SamplingSettings
from memspec_core.residency.pace import LoadAbandonedError
from memspec_core.speculation.sampling import Sampler

TAPS = (0, 2)
CONTEXT = [5, 9, 2, 7, 11, 3, 3, 8]


@pytest.fixture(scope="module")
def target(checkpoints: Checkpoints) -> Target:
    if library() is None:
        pytest.skip("the native step is not there")
    model: PreTrainedModel = make_model(seed=9, vocab_size=192)
    place = checkpoints.save("of-layouts", model)
    return load_target(place, dtype="bf16", context_tokens=64, taps=TAPS, threads=2)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kept"
    monkeypatch.setattr(layouts, "folder", lambda: folder)
    return folder


@pytest.fixture
def draft(target: Target, tmp_path: Path, kept: Path) -> Path:
    return write_feature_draft(tmp_path / "draft", target, TAPS, layers=2, four_bits=True)


def plan(draft: Path, target: Target) -> DraftPlan:
    return plan_draft("draft", str(draft), target)


def files(kept: Path) -> list[Path]:
    return sorted(kept.glob("*.safetensors"))


def proposal(draft: Path, target: Target) -> tuple[int, ...]:
    target.cache.truncate(0)
    target.decoder.forward(CONTEXT[:-1], target.cache)
    loaded = load_feature_draft("draft", draft, target)
    return loaded.propose(CONTEXT, 4, Sampler(SamplingSettings(), CPU)).token_ids


def spoil(path: Path) -> None:
    """Change a byte in the middle of a file that looks the same as before from outside."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_draft_is_kept_and_taken_from_there_bit_for_bit(
    draft: Path, target: Target, kept: Path
) -> None:
    first = plan(draft, target)
    made, _ = first.load_feature(target)
    (file,) = files(kept)
    proposed = proposal(draft, target)

    spoil(draft / WEIGHTS)  # which nobody reads again
    taken, _ = plan(draft, target).load_feature(target)

    for one, other in zip(linears(made), linears(taken), strict=True):
        assert one.packed.values.equal(other.packed.values)
        assert other.packed.values.data_ptr() % 64 == 0
    assert made.norm.equal(taken.norm)
    assert made.head_token_ids is not None
    assert taken.head_token_ids is not None
    assert made.head_token_ids.equal(taken.head_token_ids)
    assert taken.weight_bytes == made.weight_bytes
    assert proposal(draft, target) == proposed
    assert files(kept) == [file]


def linears(decoder: FeatureDecoder) -> Iterator[NativeLinear]:
    for layer in decoder.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
    yield from (decoder.head, decoder.fuse.features, decoder.fuse.input)


def test_one_that_was_made_from_other_weights_is_made_anew(
    draft: Path, target: Target, kept: Path
) -> None:
    plan(draft, target).load_feature(target)
    (old,) = files(kept)
    os.utime(draft / WEIGHTS, ns=(1, 1))

    plan(draft, target).load_feature(target)

    (new,) = files(kept)
    assert new != old


def test_weights_that_are_gone_or_cut_are_missed_though_the_draft_is_kept(
    draft: Path, target: Target
) -> None:
    whole = plan(draft, target)
    whole.load_feature(target)
    weights = (draft / WEIGHTS).read_bytes()
    (draft / WEIGHTS).write_bytes(weights[:-5])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        whole.load_feature(target)
    (draft / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        whole.load_feature(target)


@pytest.mark.parametrize("harm", [spoil, lambda path: os.truncate(path, 100)])
def test_a_kept_draft_that_is_damaged_is_made_anew(
    harm: Callable[[Path], None],
    draft: Path,
    target: Target,
    kept: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposed = proposal(draft, target)
    (file,) = files(kept)
    whole = file.read_bytes()
    harm(file)

    with caplog.at_level(logging.WARNING):
        assert proposal(draft, target) == proposed

    assert "made anew" in caplog.text
    assert [path.read_bytes() for path in files(kept)] == [whole]


def test_one_that_changes_while_running_is_checked_again(
    draft: Path, target: Target, kept: Path
) -> None:
    same = plan(draft, target)
    same.load_feature(target)
    same.load_feature(target)
    (file,) = files(kept)
    spoil(file)
    os.utime(file)
    same.load_feature(target)
    assert file in files(kept), "it was made anew, and is the same"


def test_nothing_depends_on_a_place_to_keep_it(
    draft: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposed = proposal(draft, target)
    (tmp_path / "a file").touch()
    monkeypatch.setattr(layouts, "folder", lambda: tmp_path / "a file" / "kept")
    assert proposal(draft, target) == proposed

    def nowhere() -> Path:
        raise NativeUnavailableError("no home")

    monkeypatch.setattr(layouts, "folder", nowhere)
    assert proposal(draft, target) == proposed


def test_a_full_disc_is_left_as_it_was(
    draft: Path, target: Target, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("memspec_core.files.os.fsync", full)
    plan(draft, target).load_feature(target)
    assert list(kept.iterdir()) == []


def test_kept_drafts_of_folders_that_are_gone_are_deleted(
    draft: Path, target: Target, kept: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(draft, tmp_path / "other"))
    for folder in (draft, other):
        plan(folder, target).load_feature(target)
    assert len(files(kept)) == 2
    shutil.rmtree(draft)
    os.utime(other / WEIGHTS, ns=(1, 1))
    plan(other, target).load_feature(target)
    assert len(files(kept)) == 1


def test_a_load_of_a_kept_draft_can_be_given_up(draft: Path, target: Target, kept: Path) -> None:
    def give_up(count: int) -> None:
        raise LoadAbandonedError("The load was given up.")

    whole = plan(draft, target)
    whole.load_feature(target, at_once)
    with pytest.raises(LoadAbandonedError):
        whole.load_feature(target, give_up)
    assert len(files(kept)) == 1


def test_torch_keeps_none(checkpoints: Checkpoints, kept: Path, tmp_path: Path) -> None:
    place = checkpoints.save("of-torch-layouts", make_model(seed=9, vocab_size=192))
    target = load_target(place, context_tokens=64, taps=TAPS)
    assert target.backend.name == "torch"
    draft = write_feature_draft(tmp_path / "draft", target, TAPS)
    plan(draft, target).load_feature(target)
    assert files(kept) == []
