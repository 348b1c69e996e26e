"""What a measurement was made on."""

import importlib.metadata
import platform
from pathlib import Path

_PACKAGES = ("torch", "transformers", "llama_cpp_python")
_CPU_NAME = ("model name", "Model", "Hardware")
"""Keys of /proc/cpuinfo that name the processor: on x86, and on boards with an ARM."""


def describe_machine() -> dict[str, object]:
    """Return processor, system and versions of what computes; None for what is not installed."""
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as the kernel has it, or its architecture."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    named = (found[key] for key in _CPU_NAME if found.get(key))
    return next(named, platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
