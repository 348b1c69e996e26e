"""Training with the 4-bit rounding in the loop, so that a draft is trained as it is stored."""

import torch
from torch import nn
from torch.nn.utils import parametrize

from memspec_core.models.quantised import round_to_int4


class RoundedToInt4(nn.Module):
    """A parametrization: the forward sees the rounded weight, the gradient passes straight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight as it will be stored."""
        return weight + (round_to_int4(weight).dequantised() - weight).detach()


def trained_at_4_bits(model: nn.Module) -> None:
    """Round the weights of all linear layers of a model in its forward."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            parametrize.register_parametrization(module, "weight", RoundedToInt4())
