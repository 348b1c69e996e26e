"""Checkpoints that are missing, broken or of the wrong kind: an error that names the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from core.conftest import Checkpoints
from core.tiny import load_target, make_model, write_gguf
from memspec_core.errors import CheckpointError
from memspec_core.models.checkpoint import open_checkpoint

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(checkpoints: Checkpoints) -> Path:
    return checkpoints.save("whole", make_model(vocab_size=320))


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    write_gguf(file, make_model(vocab_size=320, num_hidden_layers=1))
    return file


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "checkpoint"))


def refused(path: Path, *names: str) -> str:
    """Load a checkpoint, which must fail with an error that names what is wrong."""
    with pytest.raises(CheckpointError) as error:
        load_target(path)
    for name in names:
        assert name in str(error.value)
    return str(error.value)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_whole_one_loads(folder: Path) -> None:
    assert load_target(folder).decoder.config.layers == 3


def test_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"))


def test_folder_without_a_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), WEIGHTS)


def test_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"1")
    refused(tmp_path / "weights.bin", "weights.bin")


def test_pickles_are_not_read(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "pytorch_model.bin")
    refused(folder, str(folder), WEIGHTS)


def test_empty_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")
    assert "empty" in refused(folder, str(folder / WEIGHTS))


@pytest.mark.parametrize("share", [0.00001, 0.001, 0.5, 0.999])
def test_truncated_safetensors(folder: Path, share: float) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[: max(4, int(file.stat().st_size * share))])
    assert "truncated" in refused(folder, str(file))


def test_corrupt_safetensors(folder: Path) -> None:
    file = folder / WEIGHTS
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)
    refused(folder, str(file))


def test_shard_that_is_missing(checkpoints: Checkpoints, tmp_path: Path) -> None:
    made = checkpoints.save("shards", make_model(vocab_size=320), max_shard_size="60KB")
    folder = Path(shutil.copytree(made, tmp_path / "checkpoint"))
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.unlink()
    refused(folder, str(last))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": 3}'])
def test_corrupt_index(folder: Path, content: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(content)
    refused(folder, f"{WEIGHTS}.index.json")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model_type": "llama"', "\udcff"])
def test_corrupt_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    refused(folder, str(folder), "config.json")


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": 3},
        {"head_dim": -1},
        {"head_dim": 7},
        {"hidden_size": "many"},
        {"num_key_value_heads": 3},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
    ],
)
def test_config_with_sizes_that_cannot_be(folder: Path, changes: dict[str, object]) -> None:
    change_config(folder, **changes)
    refused(folder, str(folder))


def test_corrupt_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    refused(folder, "generation_config.json")


def test_missing_tensor(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    change_tensors(folder, lambda tensors: tensors.pop(name))
    refused(folder, WEIGHTS, name.removeprefix("model."))


def test_missing_embedding(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    refused(folder, WEIGHTS, "embed_tokens.weight")


def test_wrong_embedding_size(folder: Path) -> None:
    change_config(folder, vocab_size=321)
    refused(folder, str(folder), "(320, 64)", "(321, 64)")


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 128},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"num_attention_heads": 8},
    ],
)
def test_weights_of_other_sizes_than_the_config_says(
    folder: Path, changes: dict[str, object]
) -> None:
    change_config(folder, **changes)
    refused(folder, WEIGHTS, "layers.0")


def test_tensor_of_an_integer_type(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].int()}))
    with pytest.raises(CheckpointError, match=name.removeprefix("model.")):
        load_target(folder, dtype="stored")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_corrupt_tokenizer(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    refused(folder, str(folder), "tokenizer")


def test_missing_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refused(folder, str(folder), "tokenizer")


def test_hash_follows_the_weights(folder: Path) -> None:
    before = open_checkpoint(folder).sha256()
    assert before == open_checkpoint(folder).sha256()
    change_tensors(folder, lambda tensors: tensors["model.norm.weight"].add_(1.0))
    assert open_checkpoint(folder).sha256() != before


# GGUF


def test_gguf_by_its_folder_and_by_its_own_path(whole_gguf: Path) -> None:
    for path in (whole_gguf, whole_gguf.parent):
        checkpoint = open_checkpoint(path)
        assert checkpoint.path == whole_gguf
        assert checkpoint.quantisation == "F32 x12"


def test_two_gguf_files_in_a_folder(whole_gguf: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(whole_gguf, tmp_path / name)
    assert "2 GGUF files" in refused(tmp_path, str(tmp_path))


def test_empty_gguf(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    assert "empty" in refused(tmp_path, "empty.gguf")


@pytest.mark.parametrize("share", [0.00002, 0.001, 0.01, 0.5, 0.99])
def test_truncated_gguf(whole_gguf: Path, tmp_path: Path, share: float) -> None:
    content = whole_gguf.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: max(1, int(len(content) * share))])
    refused(tmp_path, "cut.gguf")


def test_gguf_without_its_magic(whole_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.gguf").write_bytes(b"JUNK" + whole_gguf.read_bytes()[4:])
    refused(tmp_path, "odd.gguf")


def test_gguf_of_another_family(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model(vocab_size=320), "gemma")
    refused(tmp_path, "model.gguf", "gemma")


def test_gguf_that_lacks_a_tensor(tmp_path: Path) -> None:
    model = make_model(vocab_size=320, num_hidden_layers=1)
    del model.model.layers[0].mlp.up_proj
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.gguf lacks the tensor blk\.0\.ffn_up"):
        checkpoint.weights.dense("layers.0.mlp.up_proj.weight")


@settings(max_examples=60)
@given(data=st.data())
def test_gguf_with_any_bytes_changed(whole_gguf: Path, data: st.DataObject) -> None:
    """A broken file is refused or, where the damage is in values, opened; never anything else."""
    content = bytearray(whole_gguf.read_bytes())
    header = 1500
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    file = whole_gguf.with_name("changed") / "model.gguf"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    try:
        open_checkpoint(file)
    except CheckpointError as error:
        assert "model.gguf" in str(error)
