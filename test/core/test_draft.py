"""Draft folders: with a manifest, or any full checkpoint with the target's tokenizer."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.conftest import Checkpoints
from core.tiny import decode, ids_of, load_draft, make_model
from memspec_core.errors import CheckpointError, VocabularyMismatchError
from memspec_core.models.draft import (
    MANIFEST,
    WEIGHTS,
    draft_folder,
    plan_draft,
    read_manifest,
    weights_are_whole,
)
from memspec_core.models.target import Target

PROMPT = [30, 40, 50, 60]
NOBODY = 65534


@pytest.fixture
def folder(distilled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(distilled, tmp_path / "draft"))


def change_manifest(folder: Path, **changes: object) -> None:
    fields = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(fields | changes))


def refused(folder: Path, target: Target, *names: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_draft("draft", folder, target)
    for name in names:
        assert name in str(error.value), str(error.value)


def test_a_distilled_draft_proposes_and_the_answer_is_the_targets(
    folder: Path, target: Target
) -> None:
    draft = load_draft("draft", folder, target)
    events = decode(target, PROMPT, draft, max_new_tokens=40)
    assert ids_of(events) == ids_of(decode(target, PROMPT, max_new_tokens=40))
    assert sum(event.proposed for event in events) > 20
    assert sum(event.accepted for event in events) > 0


def test_it_shares_the_targets_embedding_and_is_small(folder: Path, target: Target) -> None:
    plan = plan_draft("draft", str(folder), target)
    decoder, cache = plan.load(target)
    assert decoder.embedding is target.decoder.embedding
    assert decoder.head_token_ids is not None
    assert len(decoder.head_token_ids) == 49152 // 3
    own_bytes = decoder.layer_bytes + decoder.head.weight_bytes
    assert own_bytes <= plan.weight_bytes * 2.2  # its head is in fp32 here, as the target's
    assert cache.rows.nbytes == plan.kv_bytes


def test_a_full_checkpoint_is_a_draft_as_well(
    draft_folders: dict[str, Path], target: Target
) -> None:
    plan = plan_draft("other", str(draft_folders["other"]), target)
    assert (plan.kind, plan.manifest) == ("independent", None)
    assert plan.weight_bytes > 0


def test_missing_folder(tmp_path: Path, target: Target) -> None:
    refused(tmp_path / "nowhere", target, str(tmp_path / "nowhere"), "drafts.draft.path")


def test_a_draft_that_the_project_does_not_bring() -> None:
    with pytest.raises(CheckpointError, match=r"no draft 'poetry'.*drafts\.poetry\.path"):
        draft_folder("poetry", "default")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format_version": 1}', "\udcff"])
def test_corrupt_manifest(content: str, folder: Path, target: Target) -> None:
    (folder / MANIFEST).write_bytes(content.encode(errors="surrogateescape"))
    refused(folder, target, str(folder / MANIFEST))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format_version": 2}, "format 2"),
        ({"kind": "oracle"}, "kind 'oracle'"),
        ({"kind": "feature"}, "taps []"),
        ({"taps": [1]}, "taps [1]"),
        ({"hidden_size": 32}, "hidden size 32"),
        ({"tokenizer_sha256": "0"}, "another tokenizer"),
        ({"weights_sha256": "0"}, "checksum"),
        ({"layers": [0, 1]}, "layers.1"),
        ({"extra": 1}, MANIFEST),
    ],
)
def test_manifests_that_do_not_fit(
    changes: dict[str, object], said: str, folder: Path, target: Target
) -> None:
    change_manifest(folder, **changes)
    refused(folder, target, str(folder), said)


def test_corrupt_weights(folder: Path, target: Target) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-100] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    assert not weights_are_whole(folder, read_manifest(folder))
    refused(folder, target, str(folder / WEIGHTS), "checksum")


def test_truncated_and_empty_weights(folder: Path, target: Target) -> None:
    content = (folder / WEIGHTS).read_bytes()
    for length in (len(content) // 2, 0):
        (folder / WEIGHTS).write_bytes(content[:length])
        refused(folder, target, str(folder / WEIGHTS), "truncated")


def test_missing_weights(folder: Path, target: Target) -> None:
    (folder / WEIGHTS).unlink()
    refused(folder, target, str(folder / WEIGHTS))


def test_weights_that_change_after_they_were_loaded(folder: Path, target: Target) -> None:
    plan = plan_draft("draft", str(folder), target)
    plan.load(target)
    plan.load(target)
    content = (folder / WEIGHTS).read_bytes()
    changed = bytearray(content)
    changed[-100] ^= 1
    (folder / WEIGHTS).write_bytes(changed)
    with pytest.raises(CheckpointError, match="checksum"):
        plan.load(target)
    (folder / WEIGHTS).write_bytes(content[:1000])
    with pytest.raises(CheckpointError, match="truncated"):
        plan.load(target)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        plan.load(target)
    (folder / WEIGHTS).write_bytes(content)
    plan.load(target)


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Have the permissions of files count for root as well."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("kind", ["distilled", "full"])
def test_what_may_not_be_read_is_named_with_what_to_do(
    kind: str, folder: Path, draft_folders: dict[str, Path], target: Target, tmp_path: Path
) -> None:
    if kind == "full":
        folder = Path(shutil.copytree(draft_folders["other"], tmp_path / "full"))
    plan = plan_draft("draft", str(folder), target)
    folder.chmod(0)
    said = rf"{folder}.*cannot be read: Permission denied; let the user"
    with without_privileges():
        for read in (lambda: plan_draft("draft", str(folder), target), lambda: plan.load(target)):
            with pytest.raises(CheckpointError, match=said):
                read()
    folder.chmod(0o755)


def test_a_full_checkpoint_that_goes_while_running(
    draft_folders: dict[str, Path], target: Target, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(draft_folders["other"], tmp_path / "full"))
    plan = plan_draft("full", str(folder), target)
    read: list[int] = []
    plan.load(target, read.append)
    assert sum(read) == (folder / "model.safetensors").stat().st_size
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=str(folder)):
        plan.load(target)


def test_a_checkpoint_with_another_tokenizer(
    checkpoints: Checkpoints, target: Target, tmp_path: Path
) -> None:
    made = checkpoints.save("foreign", make_model(vocab_size=320))
    folder = Path(shutil.copytree(made, tmp_path / "foreign"))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(VocabularyMismatchError) as error:
        load_draft("draft", folder, target)
    assert str(folder) in str(error.value)


def test_a_manifest_survives_writing_and_reading(folder: Path) -> None:
    manifest = read_manifest(folder)
    (folder / MANIFEST).write_text(manifest.to_json())
    assert read_manifest(folder) == manifest
