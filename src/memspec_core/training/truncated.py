"""An independent draft in training: some of the target's layers under its embedding and head."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel, PreTrainedModel

from memspec_core.models.quantised import round_to_int4
from memspec_core.training.loss import Teaching, agreement_loss
from memspec_core.training.rounding import trained_at_4_bits


class TruncatedDraft(nn.Module):
    """The target's `layers` with its embedding and the rows `head_token_ids` of its head, frozen.

    Linear weights are trained with the 4-bit rounding in the loop, under a head that is rounded as
    decoding rounds it.
    """

    def __init__(
        self, target: PreTrainedModel, layers: Sequence[int], head_token_ids: torch.Tensor
    ) -> None:
        super().__init__()
        config = type(target.config)(**target.config.to_dict())
        config.num_hidden_layers = len(layers)
        self.body = AutoModel.from_config(config, attn_implementation="sdpa").float()
        self._copy_layers(target, layers)
        self.head_token_ids: torch.Tensor
        self.register_buffer("head_token_ids", head_token_ids, persistent=False)
        head = target.get_output_embeddings().weight.detach()[head_token_ids]
        self.head_rows: torch.Tensor
        self.register_buffer(
            "head_rows", round_to_int4(head.float()).dequantised(), persistent=False
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        rows: torch.Tensor,
        top_index: torch.Tensor,
        top_probability: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return the loss, and the share of places at which the target would accept the proposal.

        `input_ids` and `attention_mask` [batch, length]; `rows` [n]: positions, in the flattened
        batch, that predict a token of the target's text; `top_index` [n, k]: the target's top
        tokens there as outputs of the head, -1 for those it does not cover;
        `top_probability` [n, k]. The loss is the cross entropy with the target's distribution
        over its top tokens that the head covers.
        """
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = F.linear(hidden.flatten(0, 1)[rows], self.head_rows.to(hidden.dtype)).float()
        loss, agrees = agreement_loss(logits, Teaching(top_index, top_probability))
        return {"loss": loss, "accepted": agrees.float().mean()}

    def begin_with(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Begin with what a draft of the same layers has learned, or raise `RuntimeError`."""
        self.load_state_dict(weights)

    def _copy_layers(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        source = target.get_decoder()
        self.body.embed_tokens.weight.data.copy_(source.embed_tokens.weight.data)
        self.body.embed_tokens.weight.requires_grad_(False)
        self.body.norm.load_state_dict(source.norm.state_dict())
        for layer, index in zip(self.body.layers, layers, strict=True):
            layer.load_state_dict(source.layers[index].state_dict())
        trained_at_4_bits(self.body.layers)
