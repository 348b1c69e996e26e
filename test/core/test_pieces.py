"""Reading a draft's file in pieces, while it may change."""

import errno
import mmap
import os
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memspec_core.errors import CheckpointError
from memspec_core.models.pieces import PIECE_BYTES, FileVersion, at_once, read_file
from memspec_core.models.safetensors_files import SafetensorsFiles

CONTENT = bytes(range(256)) * (PIECE_BYTES // 256 * 2) + b"end"


def unknown(version: FileVersion) -> bool:
    return False


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "draft.safetensors"
    path.write_bytes(CONTENT)
    return path


def test_a_file_is_read_piece_by_piece_and_hashed(file: Path) -> None:
    pieces: list[int] = []
    read = read_file(file, pieces.append, unknown)
    assert pieces == [PIECE_BYTES, PIECE_BYTES, 3]
    assert read.data.numpy().tobytes() == CONTENT
    assert read.sha256 == sha256(CONTENT).hexdigest()


def test_what_is_known_is_not_hashed_again_until_it_changes(file: Path) -> None:
    known = {read_file(file, at_once, unknown).version}
    assert read_file(file, at_once, known.__contains__).sha256 == ""
    os.utime(file, ns=(1, 1))
    assert read_file(file, at_once, known.__contains__).sha256 != ""


def test_what_was_replaced_by_one_of_the_same_size_and_time_is_hashed(file: Path) -> None:
    before = file.stat()
    known = {read_file(file, at_once, unknown).version}
    other = file.with_name("other")
    other.write_bytes(CONTENT[::-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(file)
    assert read_file(file, at_once, known.__contains__).sha256 == sha256(CONTENT[::-1]).hexdigest()


@pytest.mark.parametrize("length", [PIECE_BYTES, len(CONTENT) + 5])
def test_a_file_that_changes_while_it_is_read(length: int, file: Path) -> None:
    def change(count: int) -> None:
        os.truncate(file, length)

    with pytest.raises(CheckpointError, match="changed while it was read"):
        read_file(file, change, unknown)


def test_a_disc_that_does_not_write_into_our_memory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(path: Path, flags: int) -> int:
        asked.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os_open(path, flags)

    os_open = os.open
    monkeypatch.setattr("memspec_core.models.pieces.os.open", refuse)
    assert read_file(file, at_once, unknown).data.numpy().tobytes() == CONTENT
    assert [bool(flags & os.O_DIRECT) for flags in asked] == [True, False]


@pytest.mark.parametrize("size", [0, 1, mmap.PAGESIZE, 2 * PIECE_BYTES])
def test_files_of_any_size(size: int, file: Path) -> None:
    file.write_bytes(CONTENT[:size])
    read = read_file(file, at_once, unknown)
    assert read.data.numpy().tobytes() == CONTENT[:size]
    assert read.sha256 == sha256(CONTENT[:size]).hexdigest()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        read_file(tmp_path / "nowhere", at_once, unknown)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_file(tmp_path, at_once, unknown)


def test_bytes_are_read_as_the_file_is(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7, dtype=torch.uint8),
        "model.c": torch.randn(2).bfloat16(),
        "d": torch.zeros(0, 4),
        "e": torch.tensor(1, dtype=torch.int32),
    }
    path = tmp_path / "some.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    data = read_file(path, at_once, unknown).data
    held, mapped = SafetensorsFiles.of_bytes(path, data), SafetensorsFiles([path])
    assert sorted(held.names()) == sorted(mapped.names())
    assert held.where == mapped.where
    for name in held.names():
        found = held.raw(name)
        assert torch.equal(found, mapped.raw(name))
        assert found.untyped_storage().nbytes() == found.nbytes  # the file's bytes may go
        if found.is_floating_point():
            assert held.stored_dtype(name) == mapped.stored_dtype(name)
            assert held.shape(name) == mapped.shape(name)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}',
        b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "X1", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "U8", "shape": "4", "data_offsets": [0, 4]}}',
    ],
)
def test_bytes_that_are_no_safetensors_file(header: bytes, tmp_path: Path) -> None:
    content = len(header).to_bytes(8, "little") + header + b"1234"
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        SafetensorsFiles.of_bytes(tmp_path / "odd", data)
