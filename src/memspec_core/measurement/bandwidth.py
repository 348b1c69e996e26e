"""How fast memory can be read: what bounds decoding, since each pass reads all weights."""

import contextlib
import statistics
import time
from collections.abc import Iterator

import torch

from memspec_core.settings import MIB

READ_BYTES = 256 * MIB
"""More than any last-level cache holds, so that the array comes from memory each time."""


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute on `count` threads in the calling thread, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_bandwidth(
    threads: int, device: str = "cpu", *, size_bytes: int = READ_BYTES, repeats: int = 9
) -> float:
    """Return bytes a second at which `threads` threads sum an array of `size_bytes`.

    The median of `repeats` readings after one that is not counted. On a GPU `threads` has no
    meaning. Takes `size_bytes` of memory while it runs.
    """
    # Whole numbers: their sum is one vector addition a word, so that memory is what it waits for.
    # Written to, since untouched pages are all one page of zeros.
    words = torch.ones(max(1, size_bytes // 8), dtype=torch.int64, device=device)
    with torch_threads(threads):
        seconds = [_seconds_to_sum(words) for _ in range(repeats + 1)][1:]
    return words.nbytes / statistics.median(seconds)


def _seconds_to_sum(words: torch.Tensor) -> float:
    started = time.perf_counter()
    int(words.sum())  # as a number of Python's: a GPU has finished by then
    return time.perf_counter() - started
