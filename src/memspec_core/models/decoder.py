"""What a decoder of the Llama and Qwen2 families is made of, and what it can do.

A `Decoder` is fed tokens alone; a `FeatureDecoder`, which is a draft, also what the target thought.
"""

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


@dataclass(frozen=True)
class Fuse:
    """The two matrices that make one row of a token and of what the target thought before it.

    `features` [hidden, taps · hidden] maps the target's features; `input` [hidden, 2 · hidden] maps
    the token's embedding beside these. `embedding_norm` [hidden]: the norm of the target's first
    layer.
    """

    features: Linear
    input: Linear
    embedding_norm: torch.Tensor

    @property
    def weight_bytes(self) -> int:
        """Fast memory that both take."""
        return self.features.weight_bytes + self.input.weight_bytes


class Layers(ABC):
    """Decoder layers for one sequence, with an embedding and a head: what all decoders share.

    Its attributes are those of its parts.
    """

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
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's outputs [n, m] in fp32 for hidden rows [n, hidden]."""

    @abstractmethod
    def most_probable(self, hidden: torch.Tensor) -> tuple[list[int], list[float]]:
        """Return the head's largest output for each of n hidden rows [n, hidden], and its value.

        Of equals the first; the value is no number where one of the row's outputs is none.
        """


class Decoder(Layers):
    """A causal decoder over token ids."""

    @abstractmethod
    def forward(
        self,
        token_ids: Sequence[int],
        cache: KeyValueCache,
        parents: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Feed n tokens, append their rows to the cache, return hidden rows [n, hidden].

        The rows are those before the final norm, in fp32. The caller sees to it that the cache
        has room. Without `parents` each row follows the one before. A cache with taps takes the
        rows' features as well.

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
            sources, places = [source for source, _ in moves], [place for _, place in moves]
            self._move(cache, sources, places)
            if cache.features is not None:
                cache.features[places] = cache.features[sources]
        cache.token_ids[start:] = [cache.token_ids[start + row] for row in rows]

    def mean_state(self, cache: KeyValueCache, first: int, end: int) -> torch.Tensor:
        """Return the mean [hidden] in fp32 of the states of positions, as the head reads them.

        The cache has the last layer as its last tap; there is at least one position.
        """
        assert cache.features is not None
        states = cache.features[first:end, -self.config.hidden_size :]
        return states.float().mean(dim=0)

    @abstractmethod
    def _move(self, cache: KeyValueCache, sources: list[int], places: list[int]) -> None:
        """Copy keys and values to other places; all are read before any is written."""


class FeatureDecoder(Layers):
    """The layers of a feature draft, after EAGLE (Li et al., 2024).

    For a context t_0, t_1, ... row i of its cache, at the rotary position i, takes the token
    t_(i+1) and a vector g_i, and predicts t_(i+2). Its input is `fuse.input` · (e, g_i), with e the
    token's embedding, normed as the target's first layer reads it. In a row that is fed, g_i is
    `fuse.features` times the target's features of position i, divided by its root mean square; in
    one that follows a proposal, which the target has not seen, it is what the head read to propose
    it: the row before, as it leaves the layers, normed.
    """

    def __init__(self, parts: DecoderParts, fuse: Fuse) -> None:
        super().__init__(parts)
        self.fuse = fuse

    @property
    def layer_bytes(self) -> int:
        """Fast memory of all layers and of the fuse, without embedding and head."""
        return super().layer_bytes + self.fuse.weight_bytes

    @abstractmethod
    def feed(
        self, token_ids: Sequence[int], features: torch.Tensor, cache: KeyValueCache
    ) -> torch.Tensor:
        """Feed n tokens that follow known features; return hidden rows [n, hidden] in fp32.

        `features` [positions, taps · hidden] are those of the target's cache. They and the cache's
        rows count from the context's first token.
        """

    @abstractmethod
    def follow(
        self,
        token_ids: Sequence[int],
        states: torch.Tensor,
        cache: KeyValueCache,
        parents: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Feed n proposed tokens; return hidden rows [n, hidden] in fp32.

        `states` [n, hidden]: for each token the hidden row that proposed it; `parents` are as in
        `Decoder.forward`.
        """

    @abstractmethod
    def roll(
        self,
        token_ids: Sequence[int],
        features: torch.Tensor,
        cache: KeyValueCache,
        count: int,
        least: float = 0.0,
        worth: float = 0.0,
    ) -> list[int]:
        """Feed n tokens as `feed` does; return the `count` most probable tokens after them.

        Fewer, or none: one is left out where all of them together would be less probable than
        `least`, and none is looked for where they would be less than `worth` if it were as probable
        as the one before. All are fed but the last where it ends the search, so that the cache
        grows by n + count - 1 rows at the most, and by n - 1 and one for each step of the search.
        """
