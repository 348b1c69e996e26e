"""The decoder forward of the Llama and Qwen2 families for one sequence.

One implementation for targets and drafts. The residual stream and the norms are in fp32; each
linear layer computes in the dtype of its own weights. Rotary pairs are interleaved (rows of the
query and key weights are put into that order at load), so that rotation is one complex product.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from memspec_core.models.configuration import DecoderConfig
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.linear import DenseLinear, Linear


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


class Decoder:
    """A causal decoder over token ids.

    `embedding` [vocabulary, hidden]; `head` maps normed hidden rows to logits. `head_token_ids`
    [m] names the tokens of the head's m outputs where it covers a part of the vocabulary only.
    """

    def __init__(
        self,
        config: DecoderConfig,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        head: Linear,
        head_token_ids: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.head_token_ids = head_token_ids
        self.device = embedding.device
        self._frequencies = torch.tensor(config.inverse_frequencies, device=self.device)

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
        tied = isinstance(self.head, DenseLinear) and (
            self.head.weight.data_ptr() == self.embedding.data_ptr()
        )
        head_bytes = 0 if tied else self.head.weight_bytes
        return self.layer_bytes + self.embedding.nbytes + head_bytes

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """Feed n tokens [n], append their rows to the cache, return hidden rows [n, hidden].

        The rows are those before the final norm, in fp32. The caller sees to it that the cache
        has room.
        """
        count, start = token_ids.shape[0], cache.length
        hidden = self.embedding[token_ids].float()
        rotation = self._rotation(start, count)
        mask = self._mask(start, count)
        for layer, rows in zip(self.layers, cache.layers, strict=True):
            normed = self._normed(hidden, layer.input_norm)
            hidden = hidden + self._attention(layer, normed, rows, start, rotation, mask)
            normed = self._normed(hidden, layer.post_norm)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        cache.length = start + count
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's outputs [n, m] in fp32 for hidden rows [n, hidden]."""
        return self.head(self._normed(hidden, self.norm)).float()

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.norm_epsilon)

    def _attention(
        self,
        layer: DecoderLayer,
        normed: torch.Tensor,
        rows: torch.Tensor,
        start: int,
        rotation: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from n normed rows to all rows up to their own; append theirs to the cache."""
        sizes = self.config
        count, end = normed.shape[0], start + normed.shape[0]
        qkv = layer.qkv(normed).float().view(count, -1, sizes.head_size // 2, 2)
        rotated = torch.view_as_real(torch.view_as_complex(qkv) * rotation).flatten(-2)
        queries, keys_and_values = rotated.split((sizes.heads, 2 * sizes.kv_heads), dim=1)
        rows[:, start:end].copy_(keys_and_values.transpose(0, 1))
        # The query heads that share a key head become rows of one head: a single batched
        # product over kv_heads, with no copy of the keys.
        group = sizes.heads // sizes.kv_heads
        folded = queries.view(count, sizes.kv_heads, group, sizes.head_size).transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            folded.reshape(1, sizes.kv_heads, count * group, sizes.head_size).to(rows.dtype),
            rows[None, : sizes.kv_heads, :end],
            rows[None, sizes.kv_heads :, :end],
            attn_mask=mask,
            scale=1.0,
        )
        unfolded = attended.view(sizes.kv_heads, count, group * sizes.head_size).transpose(0, 1)
        return layer.output(unfolded.reshape(count, sizes.heads * sizes.head_size))

    def _rotation(self, start: int, count: int) -> torch.Tensor:
        """Return factors [n, heads + 2 · kv_heads, head_size / 2] for queries, keys and values.

        Queries take the softmax scale along; values pass unchanged.
        """
        sizes = self.config
        positions = torch.arange(start, start + count, device=self.device)
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

    def _mask(self, start: int, count: int) -> torch.Tensor | None:
        """Return the causal mask [n · group, start + n], or None where all is visible."""
        if count == 1:
            return None
        visible = torch.ones(count, start + count, dtype=torch.bool, device=self.device)
        visible = visible.tril(diagonal=start)
        return visible.repeat_interleave(self.config.heads // self.config.kv_heads, dim=0)
