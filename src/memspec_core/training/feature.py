"""A feature draft in training: decoder layers over the target's hidden states and embeddings.

After EAGLE (Li et al., 2024, 2025): the draft reads what the target computed anyway, and is trained
by rolling: each step reads the states that the draft itself gave in the step before.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from memspec_core.models.quantised import round_to_int4
from memspec_core.training.loss import Teaching, agreement_loss
from memspec_core.training.rounding import trained_at_4_bits

LATER_STEP_WEIGHT = 0.9
"""Weight of a step's loss, in that of the step before."""

UNREACHED_WEIGHT = 0.2
"""Weight of a position that decoding would not reach, since a proposal before it is refused."""


@dataclass
class _Seen:
    """Keys and values [n, kv_heads, head_size] of one sequence in one layer.

    `exact`: of the rows that read the target's states; `rolled`: one entry a later step, whose row
    i belongs to the path that begins at the i-th place of the answer.
    """

    exact: tuple[torch.Tensor, torch.Tensor]
    rolled: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class FeatureDraft(nn.Module):
    """The target's `layers` over its hidden states, with its embedding and some rows of its head.

    Linear weights are trained with the 4-bit rounding in the loop, under a head that is rounded as
    decoding rounds it. `steps`: how many tokens are proposed in training.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        layers: Sequence[int],
        taps: Sequence[int],
        head_token_ids: torch.Tensor,
        steps: int,
    ) -> None:
        super().__init__()
        source = target.get_decoder()
        hidden = target.config.hidden_size
        self.config = target.config
        self.steps = steps
        self._rotary = source.rotary_emb
        self.head_token_ids: torch.Tensor
        self.embedding: torch.Tensor
        self.embedding_norm: torch.Tensor
        self.head_rows: torch.Tensor
        self._freeze("head_token_ids", head_token_ids)
        self._freeze("embedding", source.embed_tokens.weight.detach().float())
        self._freeze("embedding_norm", source.layers[0].input_layernorm.weight.detach().float())
        head = target.get_output_embeddings().weight.detach()[head_token_ids]
        self._freeze("head_rows", round_to_int4(head.float()).dequantised())
        self.fuse_features = nn.Linear(len(taps) * hidden, hidden, bias=False)
        self.fuse_input = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(copy.deepcopy(source.layers[i]).float() for i in layers)
        self.layers.requires_grad_(True)
        self.norm = nn.Parameter(source.norm.weight.detach().float().clone())
        self._begin()
        trained_at_4_bits(self)

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        lengths: torch.Tensor,
        prompt_lengths: torch.Tensor,
        top_index: torch.Tensor,
        top_probability: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return the loss, and how many proposals in a row the target would accept on average.

        Sequences lie one after the other: `token_ids` [r], `features` [r, taps · hidden],
        `lengths` and `prompt_lengths` [s]. `top_index` and `top_probability` [n, k]: the target's
        top tokens, as outputs of the head (-1 where it does not cover them), at each of the n
        tokens of the answers.
        """
        answers = [n - p for n, p in zip(lengths.tolist(), prompt_lengths.tolist(), strict=True)]
        tokens = token_ids.split(lengths.tolist())
        starts = [p - 2 for p in prompt_lengths.tolist()]
        index, probability = top_index.split(answers), top_probability.split(answers)
        seen: list[list[_Seen]] = [[] for _ in self.layers]
        # In fp32, since CPUs do not concatenate fp16 where the rest is in bf16.
        states = self._exact(tokens, features.float().split(lengths.tolist()), seen)
        states = [state[start:] for state, start in zip(states, starts, strict=True)]
        reached = torch.ones(sum(answers), dtype=torch.bool, device=token_ids.device)
        loss, accepted = features.new_zeros((), dtype=torch.float32), 0.0
        for step in range(self.steps):
            if step:
                # The path of an answer's last place has no token left to propose.
                reached = torch.cat([r[:-1] for r in reached.split([len(s) for s in states])])
                states = [state[:-1] for state in states]
                if not len(reached):
                    break
                states = self._rolled(tokens, states, starts, step, seen)
            teaching = Teaching(
                torch.cat([part[step:] for part in index]),
                torch.cat([part[step:] for part in probability]),
            )
            weight = torch.where(reached, 1.0, UNREACHED_WEIGHT)
            logits = F.linear(self._normed(torch.cat(states)), self.head_rows).float()
            step_loss, agrees = agreement_loss(logits, teaching, weight)
            loss = loss + LATER_STEP_WEIGHT**step * step_loss
            reached = reached & agrees
            accepted += float(reached.sum()) / sum(answers)
        return {"loss": loss, "accepted": loss.new_tensor(accepted)}

    @torch.no_grad()
    def begin_with(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Begin with what a draft of as many layers or fewer has learned.

        The layers that it lacks begin as the identity, so that nothing of it is lost. Raises
        `RuntimeError` if the weights are not those of such a draft.
        """
        known = {name.split(".")[1] for name in weights if name.startswith("layers.")}
        added = {}
        for name, weight in self.state_dict().items():
            if name.startswith("layers.") and name.split(".")[1] not in known:
                writes = ".o_proj." in name or ".down_proj." in name
                added[name] = torch.zeros_like(weight) if writes else weight
        self.load_state_dict({**added, **weights})

    def _exact(
        self,
        tokens: Sequence[torch.Tensor],
        features: Sequence[torch.Tensor],
        seen: list[list[_Seen]],
    ) -> list[torch.Tensor]:
        """Return the states of rows that read the target's; row i proposes token i + 2."""
        counts = [len(ids) - 2 for ids in tokens]
        read = torch.cat([part[:count] for part, count in zip(features, counts, strict=True)])
        following = torch.cat([ids[1:-1] for ids in tokens])
        positions = torch.cat([torch.arange(count) for count in counts]).to(read.device)
        hidden = self._fused(following, _unit(self.fuse_features(read), self._epsilon))
        for layer, memory in zip(self.layers, seen, strict=True):
            queries, keys, values = self._projected(layer, hidden, positions)
            attended = []
            for q, k, v in zip(
                *(part.split(counts) for part in (queries, keys, values)), strict=True
            ):
                memory.append(_Seen((k, v)))
                attended.append(_attend(q, k, v))
            hidden = self._finished(layer, hidden, torch.cat(attended))
        return list(hidden.split(counts))

    def _rolled(
        self,
        tokens: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        starts: Sequence[int],
        step: int,
        seen: list[list[_Seen]],
    ) -> list[torch.Tensor]:
        """Return the states of rows that read the draft's own of the step before."""
        counts = [len(state) for state in states]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        following = torch.cat(
            [
                ids[start + step + 1 : end + step + 1]
                for ids, start, end in zip(tokens, starts, ends, strict=True)
            ]
        )
        places = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        positions = torch.cat(places).to(following.device) + step
        hidden = self._fused(following, self._normed(torch.cat(list(states))))
        for layer, memory in zip(self.layers, seen, strict=True):
            queries, keys, values = self._projected(layer, hidden, positions)
            attended = []
            parts = zip(
                memory,
                starts,
                *(part.split(counts) for part in (queries, keys, values)),
                strict=True,
            )
            for before, start, q, k, v in parts:
                before.rolled.append((k, v))
                attended.append(_attend_on_path(q, before, start))
            hidden = self._finished(layer, hidden, torch.cat(attended))
        return list(hidden.split(counts))

    def _fused(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embedded = _unit(self.embedding[token_ids], self._epsilon) * self.embedding_norm
        fused: torch.Tensor = self.fuse_input(torch.cat((embedded, states), dim=-1))
        return fused.float()

    def _projected(
        self, layer: Any, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated queries and keys, and values [n, heads, head_size]."""
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        queries, keys, values = (
            project(normed).unflatten(-1, (-1, attention.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cosines, sines = self._rotary(hidden[None], positions[None])
        turn = cosines[0, :, None], sines[0, :, None]
        return _rotated(queries, *turn), _rotated(keys, *turn), values

    def _finished(self, layer: Any, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = hidden + layer.self_attn.o_proj(attended.flatten(-2))
        after: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return after.float()

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return _unit(hidden, self._epsilon) * self.norm

    @property
    def _epsilon(self) -> float:
        return float(self.config.rms_norm_eps)

    def _freeze(self, name: str, value: torch.Tensor) -> None:
        self.register_buffer(name, value.clone(), persistent=False)

    @torch.no_grad()
    def _begin(self) -> None:
        """Begin near what the layers know: the embedding, and the target's newest state."""
        hidden = self.config.hidden_size
        for linear in (self.fuse_features, self.fuse_input):
            linear.weight.normal_(0.0, 0.01)
        self.fuse_features.weight[:, -hidden:].diagonal().add_(1.0)
        self.fuse_input.weight[:, :hidden].diagonal().add_(2.0)
        self.fuse_input.weight[:, hidden:].diagonal().add_(5.0)


def _unit(hidden: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return rows [n, hidden] of root mean square 1, in fp32."""
    return F.rms_norm(hidden.float(), hidden.shape[-1:], eps=epsilon)


def _rotated(rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn rows [n, heads, head_size], whose pairs are half a head apart."""
    low, high = rows.float().chunk(2, dim=-1)
    return (rows.float() * cosines + torch.cat((-high, low), dim=-1) * sines).to(rows.dtype)


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend causally within a sequence; returns [n, heads, head_size]."""
    q, k, v = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _attend_on_path(queries: torch.Tensor, seen: _Seen, start: int) -> torch.Tensor:
    """Attend from row i to the exact rows up to place `start` + i and to the path's own rows."""
    count, heads, size = queries.shape
    keys, values = (part[: start + count].transpose(0, 1) for part in seen.exact)
    groups = queries.transpose(0, 1).unflatten(0, (keys.shape[0], -1)) * size**-0.5
    scores = (groups @ keys.transpose(-1, -2)[:, None]).float()
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    scores = scores.masked_fill(hidden.triu(diagonal=start + 1), float("-inf"))
    path_keys, path_values = (
        torch.stack([part[which][:count].transpose(0, 1) for part in seen.rolled], dim=-2)
        for which in (0, 1)
    )  # [kv_heads, n, steps, head_size]
    path_scores = torch.einsum("kgnd,knsd->kgns", groups, path_keys).float()
    weights = torch.cat((scores, path_scores), dim=-1).softmax(dim=-1).to(values.dtype)
    on_exact, on_path = weights.split((start + count, len(seen.rolled)), dim=-1)
    attended: torch.Tensor = on_exact @ values[:, None]
    attended = attended + torch.einsum("kgns,knsd->kgnd", on_path, path_values)
    return attended.flatten(0, 1).transpose(0, 1).reshape(count, heads, size)
