"""Files and folders that are there under their name only once they are complete."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from memspec_core.errors import CacheMismatchError, OutputError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write, which appears at `path` when the block has ended well, else nowhere."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def check_output(path: Path, *, may_replace: bool) -> None:
    """Raise `OutputError` where something is to be written that has no place or replaces another.

    To be asked before the work that makes it.
    """
    if path.exists() and not may_replace:
        raise OutputError(f"{path} exists already; choose another name, or replace it: --force.")
    if not path.parent.is_dir():
        raise OutputError(f"There is no folder {path.parent} to write {path.name} into; make it.")


def claim_folder(
    record: Path, what: str, wanted: Mapping[str, Any], found: Mapping[str, Any] | None
) -> None:
    """Write what a folder of cached work is made from, where nothing is `found` there yet.

    Raises `CacheMismatchError` if it was made from something else than is wanted.
    """
    if found is None:
        with whole_file(record) as file:
            file.write(json.dumps(wanted, indent=1).encode())
    elif differing := sorted(key for key in {*wanted, *found} if found.get(key) != wanted.get(key)):
        raise CacheMismatchError(
            f"The {what} in {record.parent} was made with another {', '.join(differing)}; choose "
            "another folder or delete this one."
        )


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a folder to write into, which appears at `path` when the block has ended well.

    One that is there already is replaced only then.
    """
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
