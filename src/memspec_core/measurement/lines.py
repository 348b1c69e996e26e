"""Files of JSON lines that are appended to while the runtime works, each line whole."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from memspec_core.errors import SettingsError

_LOG = logging.getLogger(__name__)


def line_writer(path: Path, what: str) -> Callable[[str], None]:
    """Return what appends lines to a file; raises `SettingsError` if it cannot be opened.

    A last line that was cut off, as when a robot lost power, stays a line of its own. A write that
    fails later, as on a full disc, ends the file and no answer. `what` the lines are, in the plural
    and with a capital, is what messages say.
    """
    try:
        was_cut_off = _ends_in_mid_line(path)
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise SettingsError(f"{what} cannot be recorded in {path}: {error}.") from error

    def write(line: str) -> None:
        if file.closed:
            return
        try:
            file.write(f"{line}\n".encode())
        except OSError as error:
            _LOG.warning("%s are no longer recorded in %s: %s", what, path, error)
            file.close()

    if was_cut_off:
        write("")
    return write


def _ends_in_mid_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
