"""A preallocated key-value cache that rolls back by forgetting its newest rows."""

import torch

from memspec_core.models.configuration import DecoderConfig


class KeyValueCache:
    """Keys and values of one sequence, batch 1.

    `rows` [layers, 2 · kv_heads, capacity, head_size]: the keys' heads first, then the values'.
    Rows from `length` on are free; rolling back is setting `length` lower.
    """

    def __init__(
        self, config: DecoderConfig, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.layers, 2 * config.kv_heads, capacity, config.head_size)
        self.rows = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = tuple(self.rows.unbind(0))
        self.capacity = capacity
        self.length = 0

    @staticmethod
    def bytes_for(config: DecoderConfig, capacity: int, dtype: torch.dtype) -> int:
        """Return the fast memory of a cache, in bytes, without allocating it."""
        return config.layers * 2 * config.kv_heads * capacity * config.head_size * dtype.itemsize

    def truncate(self, length: int) -> None:
        """Forget all rows from `length` on; a longer length than there is changes nothing."""
        self.length = min(self.length, length)
