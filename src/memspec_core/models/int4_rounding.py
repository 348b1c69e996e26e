"""Rounding weights to 4-bit groups, the form in which drafts are stored."""

import torch

from memspec_core.models.linear import Int4Weight

GROUP_SIZE = 32
ROUNDED_BITS = 5
"""Bits that a weight takes in memory: its code, and its share of scale and minimum in bf16."""


def round_to_int4(weight: torch.Tensor) -> Int4Weight:
    """Round a weight [out, in] to the nearest of 16 levels between each group's extremes.

    `scale` and `minimum` are representable in bf16, as they are stored.
    """
    rows, columns = weight.shape
    grouped = weight.detach().float().view(rows, columns // GROUP_SIZE, GROUP_SIZE)
    minimum = grouped.amin(dim=-1).bfloat16().float()
    span = grouped.amax(dim=-1) - minimum
    scale = (span / 15).clamp(min=1e-8).bfloat16().float()
    codes = ((grouped - minimum[..., None]) / scale[..., None]).round().clamp(0, 15)
    return Int4Weight(codes.to(torch.uint8).view(rows, columns), scale, minimum)
