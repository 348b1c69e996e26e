"""Tokenizers of GGUF files, kept on disc in the tokenizer's own form.

Making one from the lists in a GGUF file takes seconds, and hundreds of megabytes that Python keeps
in pieces. So the first load keeps the tokenizer in the user's cache folder, and a later one takes a
fraction of a second.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from memspec_core.files import whole_folder
from memspec_core.models.native.library import NativeUnavailableError, cache_folder
from memspec_core.models.pieces import FileVersion

_LOG = logging.getLogger(__name__)

Load = Callable[[Path], PreTrainedTokenizerBase]


def kept_tokenizer(
    file: Path, load: Load, make: Callable[[], PreTrainedTokenizerBase]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file: `load` it from where it is kept, or `make` and keep it.

    One that is damaged, or was made from another version of the file, is made anew; where none can
    be kept, it is made each time.
    """
    try:
        place = _place(file)
    except NativeUnavailableError:
        return make()
    if place.is_dir():
        try:
            return load(place)
        except Exception as error:  # transformers raises many types for broken files
            _LOG.warning("A kept tokenizer is left out and made anew: %s", error)
    made = make()
    _keep(made, place)
    return made


def _keep(tokenizer: PreTrainedTokenizerBase, place: Path) -> None:
    outdated = [path for path in place.parent.glob(f"{place.name[:16]}-*") if path != place]
    try:
        with whole_folder(place) as folder:
            tokenizer.save_pretrained(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(place.with_name(f".{place.name}.partial"))
        _LOG.info("The tokenizer in %s is not kept: %s", place, error)
        return
    for path in outdated:
        shutil.rmtree(path, ignore_errors=True)


def _place(file: Path) -> Path:
    """Return the folder for a version of a file: its name tells the file, then what it holds."""
    version = FileVersion.of(file.resolve())
    made_from = repr((version.size, version.mtime_ns, metadata.version("transformers")))
    return cache_folder() / "tokenizers" / f"{_short(str(version.path))}-{_short(made_from)}"


def _short(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
