"""Building the native step and loading it.

The library lies in the user's cache folder under a name made from its source, its flags and what
it is built for, so that a stale one is never loaded.
"""

import hashlib
import importlib.util
import logging
import os
import platform
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

from memspec_core.errors import MemSpecError

SWITCH = "MEMSPEC_NATIVE"
"""Set to 0, this environment variable has torch compute everything."""

BUILD_COMMAND = "python -m memspec_core.models.native"

_NAME = "memspec_native"
_SOURCE = Path(__file__).with_name("step.cpp")
_CPU_FLAGS = (
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
    "fma",
    "f16c",
)
_FLAGS = (
    *("-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-Wno-psabi"),
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


def library() -> ModuleType | None:
    """Return the loaded library, or None where torch has to do; never builds."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return load()
    except NativeUnavailableError as error:
        _LOG.info("%s", error)
        return None


@lru_cache(maxsize=1)
def load() -> ModuleType:
    """Load the library; raises `NativeUnavailableError` with what to do."""
    _require_cpu()
    path = library_path()
    if not path.exists():
        raise NativeUnavailableError(f"The native step is not built; run `{BUILD_COMMAND}`.")
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise NativeUnavailableError(
            f"{path} cannot be loaded ({error}); delete it and run `{BUILD_COMMAND}`."
        ) from error
    return module


def build() -> Path:
    """Compile the library, about a minute; returns its path. Nothing is done where it is there.

    Raises `NativeUnavailableError` where the CPU or the compiler does not do.
    """
    _require_cpu()
    path = library_path()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # ninja, which compiles, lies beside an environment's Python.
    own = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join((own, os.environ.get("PATH", "")))
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        try:
            # Not linked to a second OpenMP runtime: torch's own is found, and its threads shared.
            cpp_extension.load(
                _NAME, [str(_SOURCE)], extra_cflags=list(_FLAGS), build_directory=folder
            )
        except (RuntimeError, OSError, ImportError) as error:
            raise NativeUnavailableError(f"The native step cannot be compiled: {error}") from error
        (Path(folder) / f"{_NAME}.so").replace(path)
    return path


def library_path() -> Path:
    """Return where the library for this source, torch and Python lies once it is built."""
    made_for = (torch.__version__, sys.implementation.cache_tag, platform.machine(), *_FLAGS)
    digest = hashlib.sha256(_SOURCE.read_bytes() + repr(made_for).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "memspec" / f"{_NAME}-{digest[:16]}.so"


def _require_cpu() -> None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    missing = [flag for flag in _CPU_FLAGS if flag not in flags]
    if missing:
        raise NativeUnavailableError(
            f"The native step needs a CPU with {', '.join(missing)}; torch computes instead."
        )
