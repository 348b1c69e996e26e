"""What a draft is trained for: proposing the tokens that the target finds most probable."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Teaching:
    """The target's top tokens at n places.

    `top_index` [n, k]: as outputs of the draft's head, -1 where that does not cover them;
    `top_probability` [n, k].
    """

    top_index: torch.Tensor
    top_probability: torch.Tensor


def agreement_loss(
    logits: torch.Tensor, teaching: Teaching, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross entropy, and where [n] the draft's best token is the target's.

    `logits` [n, m]. The cross entropy is that with the target's distribution over those of its top
    tokens that the head covers; places without any do not count, the others by their `weight` [n].
    """
    index = teaching.top_index
    share = torch.where(index >= 0, teaching.top_probability, 0.0)
    mass = share.sum(dim=-1, keepdim=True)
    share = share / mass.clamp(min=1e-6)
    log_probabilities = logits.log_softmax(dim=-1).gather(1, index.clamp(min=0))
    counted = mass[:, 0] > 0
    per_place = -(share * log_probabilities).sum(dim=-1) * counted
    if weight is not None:
        per_place = per_place * weight
    return per_place.sum() / counted.sum().clamp(min=1), logits.argmax(dim=-1) == index[:, 0]
