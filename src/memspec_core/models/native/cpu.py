"""Which CPUs run the native step. Imports no torch, so that a set-up can ask in no time."""

from pathlib import Path

CPU_FLAGS = (
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
    "fma",
    "f16c",
)
"""What the step needs, as /proc/cpuinfo names it."""


def missing_flags() -> list[str]:
    """Return those of `CPU_FLAGS` that this CPU has not; all of them on other architectures."""
    found = _flags()
    return [flag for flag in CPU_FLAGS if flag not in found]


def _flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.split() for line in lines if line.startswith("flags")), ()))
