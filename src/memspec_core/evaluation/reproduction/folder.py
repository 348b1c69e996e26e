"""The output folder: what it was made from, and the parts that are done.

Each part is a file that is there only once it is whole, so that a run that was cut goes on where
it stopped. Parts made from something else are never taken over.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memspec_core.errors import CacheMismatchError
from memspec_core.files import claim_folder, whole_file

RECORD = "reproduction.json"
PARTS = "parts"
FIGURES = "figures"
REPORT = "report.md"
TABLE = "figures.csv"
VALUES = "figures.json"

_OURS = (RECORD, PARTS, FIGURES, REPORT, TABLE, VALUES)


class Output:
    """A folder that a reproduction is written into."""

    def __init__(self, folder: Path, inputs: Mapping[str, Any], *, force: bool = False) -> None:
        """Begin it, or go on with it.

        Raises `CacheMismatchError` if it holds anything else, unless it is to be overwritten; then
        what a reproduction wrote there is deleted, and nothing else.
        """
        self.folder = folder
        record = folder / RECORD
        if force:
            for name in _OURS:
                _delete(folder / name)
        elif folder.exists() and not record.exists() and any(folder.iterdir()):
            raise CacheMismatchError(
                f"{folder} exists and is no reproduction; choose another folder, or give --force."
            )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            claim_folder(record, "reproduction", inputs, _read(record))
        except CacheMismatchError as error:
            raise CacheMismatchError(f"{str(error).rstrip('.')}, or give --force.") from error
        for name in (PARTS, FIGURES):
            (folder / name).mkdir(exist_ok=True)

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a part, JSON-able, from its file or, if it is not done yet, made and kept."""
        path = self.folder / PARTS / f"{name}.json"
        found = _read(path)
        if found is None:
            found = make()
            self.write(path, json.dumps(found))
        return found

    def write(self, path: Path, text: str) -> None:
        """Write a file of the folder, whole or not at all."""
        with whole_file(path) as file:
            file.write(text.encode())


def _read(path: Path) -> Any:
    """Return what a file holds, None if there is none; raises `CacheMismatchError`."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CacheMismatchError(
            f"{path} is damaged ({error}); delete it and run the same command again."
        ) from error


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
