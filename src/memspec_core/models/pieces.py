"""Reading files in pieces, so that what decodes meanwhile keeps its share of the memory's rate."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from memspec_core.errors import CheckpointError

PIECE_BYTES = 1 << 20

Pace = Callable[[int], None]
"""Told of the bytes of each piece that was read; it may wait, and what it raises ends the load."""


def at_once(count: int) -> None:
    """Be the pace of a load that need not wait for anybody."""


@dataclass(frozen=True)
class FileVersion:
    """What tells whether a file is the one that was seen before, without reading it."""

    path: Path
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class ReadFile:
    """A file's bytes [size] (uint8), its version, and the hash of the bytes where it was wanted."""

    data: torch.Tensor
    version: FileVersion
    sha256: str


def read_file(
    path: Path, pace: Pace, is_known: Callable[[FileVersion], bool], *, pinned: bool = False
) -> ReadFile:
    """Read a file into memory, and hash it unless its version is known.

    `pinned`: into memory that a GPU copies from by itself. The system's own copy of the file is
    dropped. Raises `CheckpointError`, also where the file changes or ends while it is read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            version = _version(path, file.fileno())
            data = torch.empty(version.size, dtype=torch.uint8, pin_memory=pinned)
            digest = None if is_known(version) else hashlib.sha256()
            view = data.numpy().data
            place = 0
            while count := file.readinto(view[place : place + PIECE_BYTES]):
                if digest is not None:
                    digest.update(view[place : place + count])
                place += count
                pace(count)
            _forget(file.fileno())
            if place < version.size or _version(path, file.fileno()) != version:
                raise CheckpointError(f"{path} changed while it was read; copy the draft again.")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; copy the draft again.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    return ReadFile(data, version, digest.hexdigest() if digest else "")


def read_ahead(path: Path, pace: Pace) -> None:
    """Have the system read a file that is to be mapped; raises `CheckpointError`."""
    piece = bytearray(PIECE_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                pace(count)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def forget(path: Path) -> None:
    """Have the system drop its copy of a file that is no longer mapped."""
    try:
        with path.open("rb") as file:
            _forget(file.fileno())
    except FileNotFoundError:
        return  # and its copy went with it


def _version(path: Path, descriptor: int) -> FileVersion:
    found = os.fstat(descriptor)
    return FileVersion(path, found.st_size, found.st_mtime_ns)


def _forget(descriptor: int) -> None:
    """Drop the page cache: on unified memory it would hold every draft a second time."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
