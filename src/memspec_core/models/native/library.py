"""Building the native step and loading it.

The library lies in the user's cache folder under a name made from its sources, its flags and what
it is built for, so that a stale one is never loaded. It ends in a checksum: loading half a library,
as a full disc or a power cut may leave it, would end the process.
"""

import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

from memspec_core.errors import MemSpecError
from memspec_core.models.native.cpu import missing_flags

SWITCH = "MEMSPEC_NATIVE"
"""Set to 0, this environment variable has torch compute everything."""

BUILD_COMMAND = "python -m memspec_core.models.native"

_NAME = "memspec_native"
_SOURCE = Path(__file__).with_name("step.cpp")
_FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-pthread", "-ffp-contract=off", "-Wno-psabi"),
    "-fvisibility=hidden",  # state in headers stays this library's own
    *(
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512vnni",
        "-mavx512bf16",
        "-mfma",
        "-mf16c",
    ),
)
_LOG = logging.getLogger(__name__)


class NativeUnavailableError(MemSpecError):
    """The native step cannot be built or loaded here; torch computes instead."""


class NativeBrokenError(NativeUnavailableError):
    """The native step was built, but what is there cannot be loaded."""


def is_switched_off() -> bool:
    """Whether the user wants torch to compute everything."""
    return os.environ.get(SWITCH) == "0"


def library() -> ModuleType | None:
    """Return the loaded library, or None where torch has to do; never builds."""
    if is_switched_off():
        return None
    try:
        return load()
    except NativeUnavailableError as error:
        broken = isinstance(error, NativeBrokenError)
        _log_once(logging.WARNING if broken else logging.INFO, str(error))
        return None


@lru_cache
def _log_once(level: int, text: str) -> None:
    _LOG.log(level, "%s", text)


@lru_cache(maxsize=1)
def load() -> ModuleType:
    """Load the library; raises `NativeUnavailableError` with what to do."""
    _require_cpu()
    path = library_path()
    if not path.is_file():
        raise NativeUnavailableError(f"The native step is not built; run `{BUILD_COMMAND}`.")
    if not _is_whole(path):
        raise NativeBrokenError(f"{path} is damaged; run `{BUILD_COMMAND}`.")
    try:
        return _import(path)
    except ImportError as error:
        raise NativeBrokenError(
            f"{path} cannot be loaded ({error}); delete it and run `{BUILD_COMMAND}`."
        ) from error


def build() -> Path:
    """Compile the library, about a minute; returns its path. Nothing is done where it is there.

    Raises `NativeUnavailableError` where the CPU or the compiler does not do. Builds and loads may
    go on at the same time: a library appears at its path at once and whole.
    """
    _require_cpu()
    path = library_path()
    if _is_whole(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
            made = Path(folder) / path.name
            _compile(made)
            _seal(made)
            _import(made)
            made.replace(path)
    except (OSError, ImportError) as error:
        raise NativeUnavailableError(f"The native step cannot be built: {error}") from error
    return path


def library_path() -> Path:
    """Return where the library for these sources, torch and Python lies once it is built."""
    sources = [(file.name, file.read_bytes()) for file in _sources()]
    made_for = (torch.__version__, sys.implementation.cache_tag, platform.machine(), *_FLAGS)
    digest = hashlib.sha256(repr((sources, made_for)).encode()).hexdigest()
    return cache_folder() / f"{_NAME}-{digest[:16]}.so"


def _sources() -> list[Path]:
    """Return the source and the headers beside it, of which it includes all."""
    return sorted([_SOURCE, *_SOURCE.parent.glob("*.h")])


def cache_folder() -> Path:
    """Return the project's folder in the user's cache; raises `NativeUnavailableError`."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(chosen) if chosen else Path.home() / ".cache") / "memspec"
    except RuntimeError as error:
        raise NativeUnavailableError(
            "The native step has no place: there is no home folder, and XDG_CACHE_HOME is not set."
        ) from error


def _require_cpu() -> None:
    missing = missing_flags()
    if missing:
        raise NativeUnavailableError(
            f"The native step needs a CPU with {', '.join(missing)}; torch computes instead."
        )


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(path: Path) -> None:
    """Compile the library to `path`."""
    compiler = _compiler()
    parts = path.with_suffix(".o")
    torch_folder = Path(torch.__file__).parent
    headers = torch_folder / "include"
    api_headers = headers / "torch" / "csrc" / "api" / "include"
    _run(
        *(*compiler, "-c", str(_SOURCE), "-o", str(parts), *_FLAGS),
        f"-DTORCH_EXTENSION_NAME={_NAME}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(headers), "-isystem", str(api_headers)),
        *("-isystem", sysconfig.get_paths()["include"]),
    )
    libraries = ("-lc10", "-ltorch_cpu", "-ltorch_python")
    _run(*compiler, "-shared", str(parts), "-o", str(path), f"-L{torch_folder / 'lib'}", *libraries)


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    return chosen or ["c++" if shutil.which("c++") else "g++"]


def _run(*command: str) -> None:
    """Run a compiler; what it says goes to the log where it fails, and the reason to the error."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        return
    said = done.stdout.strip()
    if said:
        _LOG.error("%s", said)
    errors = [line for line in said.splitlines() if "error" in line]
    reason = errors[0] if errors else f"exit code {done.returncode}"
    raise NativeUnavailableError(f"The native step cannot be compiled: {command[0]}: {reason}")


def _seal(path: Path) -> None:
    """Put the checksum behind a library, where loaders do not look, and all of it on the disc."""
    checksum = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(checksum)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]
