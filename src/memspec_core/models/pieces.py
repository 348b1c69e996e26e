"""Reading files in pieces, so that what decodes meanwhile keeps its share of the memory's rate."""

import contextlib
import errno
import hashlib
import io
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from memspec_core.errors import CheckpointError, is_out_of_memory

PIECE_BYTES = 1 << 22

_DIRECT = getattr(os, "O_DIRECT", 0)
_HUGE_PAGE_BYTES = 1 << 21

Pace = Callable[[int], None]
"""Told of the bytes of each piece that was read; it may wait, and what it raises ends the load."""


def at_once(count: int) -> None:
    """Be the pace of a load that need not wait for anybody."""


@dataclass(frozen=True)
class FileVersion:
    """What tells whether a file is the one that was seen before, without reading it.

    `mtime_ns` can be set by whoever copies a file (`cp -p`, `rsync -t`), `ctime_ns` by nobody.
    """

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileVersion":
        """Look at a file; raises `CheckpointError`."""
        with reading(path):
            return cls._from(path, path.stat())

    @classmethod
    def of_open(cls, path: Path, descriptor: int) -> "FileVersion":
        """Look at what was opened of a file."""
        return cls._from(path, os.fstat(descriptor))

    @classmethod
    def _from(cls, path: Path, found: os.stat_result) -> "FileVersion":
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


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

    The disc writes straight into that memory where the file system lets it, which takes a core a
    quarter of the time; else the system's own copy of the file is dropped. `pinned`: into memory
    that a GPU copies from by itself. Raises `CheckpointError`, also where the file changes or ends
    while it is read.
    """
    with reading(path):
        try:
            return _read(path, pace, is_known, pinned, _DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return _read(path, pace, is_known, pinned, 0)


def _read(
    path: Path, pace: Pace, is_known: Callable[[FileVersion], bool], pinned: bool, flags: int
) -> ReadFile:
    with io.FileIO(path, opener=lambda name, how: os.open(name, how | flags)) as file:
        version = FileVersion.of_open(path, file.fileno())
        data = _memory(version.size + 1, pinned)
        digest = None if is_known(version) else hashlib.sha256()
        view = data.numpy().data
        place = 0
        while count := file.readinto(view[place : place + PIECE_BYTES]):
            if digest is not None:
                digest.update(view[place : place + count])
            place += count
            pace(count)
        _forget(file.fileno())
        if place != version.size or FileVersion.of_open(path, file.fileno()) != version:
            raise CheckpointError(f"{path} changed while it was read; copy the draft again.")
    return ReadFile(data[:place], version, digest.hexdigest() if digest else "")


def _memory(size: int, pinned: bool) -> torch.Tensor:
    """Return whole pages for so many bytes, where the system has huge pages mostly such.

    Getting pages of the usual size would take a core as long as the disc takes to fill them.
    """
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    if pinned:
        some = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True)
        return some[_to_boundary(some, mmap.PAGESIZE) :][:size]
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages
    room = mmap.mmap(-1, size + 2 * _HUGE_PAGE_BYTES, flags=private)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    start = _to_boundary(whole, _HUGE_PAGE_BYTES)
    # The last one pays where it is filled by half.
    huge_bytes = (size + _HUGE_PAGE_BYTES // 2) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if huge_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            room.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
    return whole[start:][:size]


def _to_boundary(memory: torch.Tensor, size: int) -> int:
    """Return how many bytes lie before the first address that is a multiple of a size."""
    return -memory.data_ptr() % size


def read_ahead(path: Path, pace: Pace) -> None:
    """Have the system read a file that is to be mapped; raises `CheckpointError`."""
    piece = bytearray(PIECE_BYTES)
    with reading(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            pace(count)


def forget(path: Path) -> None:
    """Have the system drop its copy of a file that is no longer mapped."""
    try:
        with path.open("rb") as file:
            _forget(file.fileno())
    except FileNotFoundError:
        return  # and its copy went with it


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise `CheckpointError` where the system does not give a file or a folder that is read.

    Want of memory is no fault of theirs, and passes as it is.
    """
    try:
        yield
    except OSError as error:
        if is_out_of_memory(error):
            raise
        raise _unreadable(Path(error.filename or path), error) from error


def require_content(path: Path) -> None:
    """Raise `CheckpointError` where a file is missing or empty, or may not be read."""
    with reading(path), path.open("rb") as file:
        if not file.read(1):
            raise CheckpointError(f"{path} is empty; copy it again.")


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path} is missing; copy it again.")
    if isinstance(error, PermissionError):
        return CheckpointError(
            f"{path} cannot be read: {error.strerror}; let the user that runs this read it and its "
            "folders."
        )
    return CheckpointError(
        f"{path} cannot be read: {error.strerror or error}; check the disc that it lies on."
    )


def _forget(descriptor: int) -> None:
    """Drop the page cache: on unified memory it would hold every draft a second time."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
