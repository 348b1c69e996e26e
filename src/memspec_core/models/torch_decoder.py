"""The decoder forward in torch: the reference, and what runs where the native step does not.

The residual stream and the norms are in fp32; each linear layer computes in the dtype of its own
weights. Rotary pairs are interleaved (rows of the query and key weights are put into that order
at load), so that rotation is one complex product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from memspec_core.models.decoder import (
    Decoder,
    DecoderLayer,
    DecoderParts,
    FeatureDecoder,
    Layers,
)
from memspec_core.models.kv_cache import KeyValueCache


class Window(Protocol):
    """The places of a cache that a pass writes its rows to, and those that it may see: up to `end`.

    A place is a position in the order of the tokens, along a tensor's dimension `dim`.
    """

    @property
    def end(self) -> int:
        """The first place that no row sees."""
        ...

    def write(self, rows: torch.Tensor, new: torch.Tensor, dim: int) -> None:
        """Put new rows in their places."""
        ...


@dataclass(frozen=True)
class _Newest:
    """The window of `count` rows after the first `start`: all that are there, and no more."""

    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    def write(self, rows: torch.Tensor, new: torch.Tensor, dim: int) -> None:
        rows.narrow(dim, self.start, self.count).copy_(new)


class _TorchLayers(Layers):
    """Layers that are torch's operations, on any device."""

    def __init__(self, parts: DecoderParts) -> None:
        super().__init__(parts)
        self._frequencies = torch.tensor(self.config.inverse_frequencies, device=self.device)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits; see `Layers.logits`."""
        return self.head(self._normed(hidden, self.norm)).float()

    def most_probable(self, hidden: torch.Tensor) -> tuple[list[int], list[float]]:
        """Return the largest outputs and their values; see `Layers.most_probable`."""
        values, outputs = self.logits(hidden).max(dim=-1)
        return outputs.tolist(), values.tolist()

    def _embedded(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the embeddings [n, hidden] of tokens."""
        return self.embedding.rows(torch.tensor(token_ids, device=self.device)).float()

    def _through_layers(
        self, hidden: torch.Tensor, cache: KeyValueCache, parents: Sequence[int] | None
    ) -> torch.Tensor:
        """Run n rows through all layers; the caller notes their tokens in the cache."""
        count, start = hidden.shape[0], cache.length
        positions, visible = placed(start, count, parents)
        alone = count == 1 and parents is None  # and sees everything
        mask = None if alone else self._folded(visible.to(self.device))
        rotation = self._rotation(positions.to(self.device))
        return self._pass(hidden, cache, _Newest(start, count), rotation, mask)

    def _pass(
        self,
        hidden: torch.Tensor,
        cache: KeyValueCache,
        window: Window,
        rotation: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        for index, (layer, rows) in enumerate(zip(self.layers, cache.layers, strict=True)):
            normed = self._normed(hidden, layer.input_norm)
            hidden = hidden + self._attention(layer, normed, rows, window, rotation, mask)
            normed = self._normed(hidden, layer.post_norm)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
            self._tap(index, hidden, cache, window)
        return hidden

    def _tap(self, index: int, hidden: torch.Tensor, cache: KeyValueCache, window: Window) -> None:
        """Note the rows' features after a layer that is tapped."""
        if cache.features is None or index not in cache.taps:
            return
        following = self.layers[index + 1 : index + 2]
        normed = self._normed(hidden, following[0].input_norm if following else self.norm)
        features = cache.features.unflatten(1, (len(cache.taps), -1))
        window.write(features[:, cache.taps.index(index)], normed, 0)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return F.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.norm_epsilon)

    def _attention(
        self,
        layer: DecoderLayer,
        normed: torch.Tensor,
        rows: torch.Tensor,
        window: Window,
        rotation: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from n normed rows to all rows up to their own; write theirs to the cache."""
        sizes = self.config
        count = normed.shape[0]
        qkv = layer.qkv(normed).float().view(count, -1, sizes.head_size // 2, 2)
        rotated = torch.view_as_real(torch.view_as_complex(qkv) * rotation).flatten(-2)
        queries, keys_and_values = rotated.split((sizes.heads, 2 * sizes.kv_heads), dim=1)
        window.write(rows, keys_and_values.transpose(0, 1), 1)
        # The query heads that share a key head become rows of one head: a single batched
        # product over kv_heads, with no copy of the keys.
        group = sizes.heads // sizes.kv_heads
        folded = queries.view(count, sizes.kv_heads, group, sizes.head_size).transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            folded.reshape(1, sizes.kv_heads, count * group, sizes.head_size).to(rows.dtype),
            rows[None, : sizes.kv_heads, : window.end],
            rows[None, sizes.kv_heads :, : window.end],
            attn_mask=mask,
            scale=1.0,
        )
        unfolded = attended.view(sizes.kv_heads, count, group * sizes.head_size).transpose(0, 1)
        return layer.output(unfolded.reshape(count, sizes.heads * sizes.head_size))

    def _rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """Return factors [n, heads + 2 · kv_heads, head_size / 2] for queries, keys and values.

        Queries take the softmax scale along; values pass unchanged.
        """
        sizes = self.config
        angles = positions[:, None].float() * self._frequencies
        turn = torch.polar(torch.full_like(angles, sizes.rotary_scale), angles)[:, None]
        return torch.cat(
            (
                (turn * sizes.head_size**-0.5).expand(-1, sizes.heads, -1),
                turn.expand(-1, sizes.kv_heads, -1),
                torch.ones_like(turn).expand(-1, sizes.kv_heads, -1),
            ),
            dim=1,
        )

    def _folded(self, visible: torch.Tensor) -> torch.Tensor:
        """Return what each of the folded query rows sees [n · group, start + n]."""
        return visible.repeat_interleave(self.config.heads // self.config.kv_heads, dim=0)


class TorchDecoder(_TorchLayers, Decoder):
    """A decoder whose layers are torch's operations, on any device."""

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        cache: KeyValueCache,
        parents: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Feed n tokens; see `Decoder.forward`."""
        hidden = self._through_layers(self._embedded(token_ids), cache, parents)
        cache.token_ids.extend(token_ids)
        return hidden

    @torch.inference_mode()
    def _move(self, cache: KeyValueCache, sources: list[int], places: list[int]) -> None:
        cache.rows[:, :, places] = cache.rows[:, :, sources]


class TorchFeatureDecoder(FeatureDecoder, _TorchLayers):
    """The layers of a feature draft as torch's operations, on any device."""

    @torch.inference_mode()
    def feed(
        self, token_ids: Sequence[int], features: torch.Tensor, cache: KeyValueCache
    ) -> torch.Tensor:
        """Feed n tokens that follow known features; see `FeatureDecoder.feed`."""
        known = features[cache.length : cache.length + len(token_ids)]
        thought = self._normed(self.fuse.features(known.float()).float())
        return self._fused(token_ids, thought, cache, None)

    @torch.inference_mode()
    def follow(
        self,
        token_ids: Sequence[int],
        states: torch.Tensor,
        cache: KeyValueCache,
        parents: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Feed n proposed tokens; see `FeatureDecoder.follow`."""
        return self._fused(token_ids, self._normed(states, self.norm), cache, parents)

    def _fused(
        self,
        token_ids: Sequence[int],
        thought: torch.Tensor,
        cache: KeyValueCache,
        parents: Sequence[int] | None,
    ) -> torch.Tensor:
        embedded = self._normed(self._embedded(token_ids), self.fuse.embedding_norm)
        fused = self.fuse.input(torch.cat((embedded, thought), dim=-1)).float()
        hidden = self._through_layers(fused, cache, parents)
        cache.token_ids.extend(token_ids)
        return hidden

    def roll(
        self,
        token_ids: Sequence[int],
        features: torch.Tensor,
        cache: KeyValueCache,
        count: int,
        least: float = 0.0,
        worth: float = 0.0,
    ) -> list[int]:
        """Feed n tokens and propose `count` or fewer; see `FeatureDecoder.roll`."""
        state = self.feed(token_ids, features, cache)[-1:]
        proposed: list[int] = []
        probability = 1.0
        while True:
            probabilities = self.logits(state).float().softmax(dim=-1)
            index = int(probabilities.argmax())
            own = float(probabilities[0, index])
            probability *= own
            if probability < least:
                return proposed
            ids = self.head_token_ids
            proposed.append(index if ids is None else int(ids[index]))
            if len(proposed) == count or probability * own < worth:
                return proposed
            state = self.follow(proposed[-1:], state, cache)


def placed(
    start: int, count: int, parents: Sequence[int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotary positions of n new rows, and which rows of the cache [start + n] each sees.

    See `Decoder.forward` for `parents`.
    """
    if parents is None:
        return torch.arange(start, start + count), _causal(start, count)
    visible = _by_ancestry(start, count, parents)
    return visible.sum(dim=1) - 1, visible


def _causal(start: int, count: int) -> torch.Tensor:
    """Return which rows of the cache [start + n] each of n new rows sees, as a chain."""
    return torch.ones(count, start + count, dtype=torch.bool).tril(diagonal=start)


def _by_ancestry(start: int, count: int, parents: Sequence[int]) -> torch.Tensor:
    """Return the same of n rows of a tree; see `Decoder.forward` for `parents`."""
    context, end = start + count - len(parents), start + count
    if context < 0 or count > len(parents):
        raise ValueError(f"a tree of {len(parents)} rows cannot end with {count} of {end} rows")
    visible = torch.zeros(len(parents), end, dtype=torch.bool)
    visible[:, :context] = True
    for row, parent in enumerate(parents):
        if not -1 <= parent < row:
            raise ValueError(f"row {row} has the parent {parent}")
        if parent >= 0:
            visible[row] = visible[parent]
        visible[row, context + row] = True
    return visible[-count:]
