"""A preallocated key-value cache that rolls back by forgetting its newest rows."""

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch

from memspec_core.models.configuration import DecoderConfig

_ROUNDING = 16
"""The native step keeps this many positions of a key together."""


_MADVISE: Any = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


class KeyValueCache:
    """Keys and values of one sequence, batch 1.

    `rows` [layers, 2 · kv_heads, capacity or a little more, head_size]: the keys' heads first,
    then the values'; how positions lie within a head is the decoder's affair.
    Rows from `length` on are free; rolling back is forgetting the newest `token_ids`.

    `features` [capacity, taps · hidden] in fp16, where there are `taps`: for each position the
    residual stream after the layers `taps` (from 0), as the next layer reads it, or the head:
    normed, which keeps it within fp16's range. They are what a feature draft starts from.

    `settled`, for other threads: a context, and how many of its first tokens have rows that stay as
    they are as long as this is the same list, which may grow; None where nothing is settled.
    """

    def __init__(
        self,
        config: DecoderConfig,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.rows = torch.zeros(_shape(config, capacity), dtype=dtype, device=device)
        self.layers = tuple(self.rows.unbind(0))
        self.capacity = capacity
        self.taps = taps
        self.features: torch.Tensor | None = None
        if taps:
            shape = (capacity, len(taps) * config.hidden_size)
            self.features = torch.zeros(shape, dtype=torch.float16, device=device)
        self.token_ids: list[int] = []
        self.settled: tuple[list[int], int] | None = None

    @property
    def length(self) -> int:
        """How many positions are taken."""
        return len(self.token_ids)

    @staticmethod
    def bytes_for(
        config: DecoderConfig, capacity: int, dtype: torch.dtype, taps: tuple[int, ...] = ()
    ) -> int:
        """Return the fast memory of a cache, in bytes, without allocating it."""
        feature_bytes = capacity * len(taps) * config.hidden_size * torch.float16.itemsize
        return math.prod(_shape(config, capacity)) * dtype.itemsize + feature_bytes

    def truncate(self, length: int) -> None:
        """Forget all rows from `length` on; a longer length than there is changes nothing."""
        del self.token_ids[length:]

    def release_unused(self) -> None:
        """Give the memory of free rows back to the system, until they are taken again (on CPUs)."""
        if self.rows.device.type != "cpu":
            return
        for block in self.rows.flatten(0, 1):  # one head of one layer
            _give_back(block[self._first_free :])
        if self.features is not None:
            _give_back(self.features[self.length :])

    @property
    def _first_free(self) -> int:
        # Positions that are kept together go together.
        return -(-self.length // _ROUNDING) * _ROUNDING

    def keep_common(self, token_ids: Sequence[int]) -> None:
        """Forget what does not begin as `token_ids` do."""
        self.truncate(common_length(self.token_ids, token_ids))


def _give_back(rows: torch.Tensor) -> None:
    """Have the system take whole pages of rows in place; they read as zeros from then on."""
    page = mmap.PAGESIZE
    first = -(-rows.data_ptr() // page) * page
    end = (rows.data_ptr() + rows.numel() * rows.element_size()) // page * page
    if end > first and _MADVISE is not None:
        _MADVISE(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    most = min(len(one), len(other))
    if list(one[:most]) == list(other[:most]):
        return most
    return next(place for place in range(most) if one[place] != other[place])


def _shape(config: DecoderConfig, capacity: int) -> tuple[int, int, int, int]:
    positions = -(-capacity // _ROUNDING) * _ROUNDING
    return (config.layers, 2 * config.kv_heads, positions, config.head_size)
