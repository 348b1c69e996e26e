"""A preallocated key-value cache that rolls back by forgetting its newest rows."""

import math

import torch

from memspec_core.models.configuration import DecoderConfig

_ROUNDING = 16
"""The native step keeps this many positions of a key together."""


class KeyValueCache:
    """Keys and values of one sequence, batch 1.

    `rows` [layers, 2 · kv_heads, capacity or a little more, head_size]: the keys' heads first,
    then the values'; how positions lie within a head is the decoder's affair.
    Rows from `length` on are free; rolling back is setting `length` lower.
    """

    def __init__(
        self, config: DecoderConfig, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows = torch.zeros(_shape(config, capacity), dtype=dtype, device=device)
        self.layers = tuple(self.rows.unbind(0))
        self.capacity = capacity
        self.length = 0

    @staticmethod
    def bytes_for(config: DecoderConfig, capacity: int, dtype: torch.dtype) -> int:
        """Return the fast memory of a cache, in bytes, without allocating it."""
        return math.prod(_shape(config, capacity)) * dtype.itemsize

    def truncate(self, length: int) -> None:
        """Forget all rows from `length` on; a longer length than there is changes nothing."""
        self.length = min(self.length, length)


def _shape(config: DecoderConfig, capacity: int) -> tuple[int, int, int, int]:
    positions = -(-capacity // _ROUNDING) * _ROUNDING
    return (config.layers, 2 * config.kv_heads, positions, config.head_size)
