"""What a decoder of the Llama and Qwen2 families is made of, and what it can do."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memspec_core.models.configuration import DecoderConfig
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.linear import Linear, Table


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer; `qkv` and `gate_up` hold their parts stacked along the outputs."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def weight_bytes(self) -> int:
        """Fast memory that the layer's weights take."""
        linears = (self.qkv, self.output, self.gate_up, self.down)
        return sum(linear.weight_bytes for linear in linears) + 2 * self.input_norm.nbytes


@dataclass(frozen=True)
class DecoderParts:
    """What a decoder is put together from.

    `embedding` [vocabulary, hidden]; `head` maps normed hidden rows to logits. `head_token_ids`
    [m] names the tokens of the head's m outputs where it covers a part of the vocabulary only.
    """

    config: DecoderConfig
    embedding: Table
    layers: list[DecoderLayer]
    norm: torch.Tensor
    head: Linear
    head_token_ids: torch.Tensor | None = None


class Decoder(ABC):
    """A causal decoder over token ids, for one sequence; its attributes are those of its parts."""

    def __init__(self, parts: DecoderParts) -> None:
        self.config = parts.config
        self.embedding = parts.embedding
        self.layers = parts.layers
        self.norm = parts.norm
        self.head = parts.head
        self.head_token_ids = parts.head_token_ids
        self.device = parts.norm.device

    @property
    def kernel(self) -> str:
        """What computes most of the weights."""
        return self.layers[0].gate_up.kernel if self.layers else self.head.kernel

    @property
    def layer_bytes(self) -> int:
        """Fast memory of all layers, without embedding and head."""
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        """Fast memory of all weights, a head tied to the embedding counted once."""
        head_bytes = 0 if self.head is self.embedding else self.head.weight_bytes
        return self.layer_bytes + self.embedding.weight_bytes + head_bytes

    @abstractmethod
    def forward(
        self,
        token_ids: Sequence[int],
        cache: KeyValueCache,
        parents: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Feed n tokens, append their rows to the cache, return hidden rows [n, hidden].

        The rows are those before the final norm, in fp32. The caller sees to it that the cache
        has room. Without `parents` each row follows the one before.

        `parents` [m] feeds a tree, in one pass or several: it names the parent of every row since
        the tree's first, -1 for the context before it; the last n of them are fed now, the
        others are the cache's newest rows. A row sees the context and its ancestors.
        """

    def keep(self, cache: KeyValueCache, start: int, rows: Sequence[int]) -> None:
        """Make of a tree in the cache one of its paths, and forget the rest.

        `start` is where the tree's first row lies; `rows` are the path's, counted from there and
        rising. The cache is then as if the path alone had been fed.
        """
        moves = [(start + row, start + place) for place, row in enumerate(rows) if row != place]
        if moves:
            self._move(cache, [source for source, _ in moves], [place for _, place in moves])
        cache.token_ids[start:] = [cache.token_ids[start + row] for row in rows]

    @abstractmethod
    def _move(self, cache: KeyValueCache, sources: list[int], places: list[int]) -> None:
        """Copy rows of the cache to other places; all are read before any is written."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's outputs [n, m] in fp32 for hidden rows [n, hidden]."""
