"""Weights in groups of few bits, and rounding into that form."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

GROUP_SIZE = 32
"""Weights that share a scale after rounding."""

ROUNDED_BITS = 5
"""Bits that a weight takes in memory: its code, and its share of scale and minimum."""

_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Int4Weight:
    """A weight in 4-bit groups along its rows: w = code · scale + minimum.

    `pairs` [out, in / 2] (uint8) hold two codes each, the even column in the low half; `scale` and
    `minimum` [out, in / group] in fp32. GGUF Q4_0 and Q4_1 blocks are of this form with groups of
    32, GPTQ weights with their own groups. `input_order` [in] (int64): column j belongs to input
    `input_order[j]`; None where the columns lie in the order of the inputs.
    """

    pairs: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    input_order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.pairs.shape[0], 2 * self.pairs.shape[1]

    @property
    def group_size(self) -> int:
        """Weights that share one scale."""
        return self.shape[1] // self.scale.shape[1]

    @property
    def codes(self) -> torch.Tensor:
        """The codes [out, in], 0 .. 15 in uint8."""
        return unpack_codes(self.pairs)

    def dequantised(self) -> torch.Tensor:
        """Return the weight [out, in] in fp32, its columns in the order of the inputs."""
        rows, columns = self.shape
        grouped = self.codes.view(rows, -1, self.group_size).float()
        weight = (grouped * self.scale[..., None] + self.minimum[..., None]).view(rows, columns)
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order, weight)

    def rows(self, order: torch.Tensor) -> "Int4Weight":
        """Return the weight with its rows in another order."""
        return Int4Weight(
            self.pairs[order], self.scale[order], self.minimum[order], self.input_order
        )

    def to(self, device: torch.device) -> "Int4Weight":
        """Return the weight on a device."""
        order = self.input_order
        return Int4Weight(
            self.pairs.to(device),
            self.scale.to(device),
            self.minimum.to(device),
            None if order is None else order.to(device),
        )

    def stacks_with(self, other: "Int4Weight") -> bool:
        """Whether the two have the same groups over the same order of inputs."""
        if self.shape[1] != other.shape[1] or self.group_size != other.group_size:
            return False
        if self.input_order is None or other.input_order is None:
            return self.input_order is other.input_order
        return torch.equal(self.input_order, other.input_order)

    @staticmethod
    def stacked(weights: list["Int4Weight"]) -> "Int4Weight":
        """Stack weights along their output rows; each must stack with the first."""
        if len(weights) == 1:
            return weights[0]
        return Int4Weight(
            torch.cat([weight.pairs for weight in weights]),
            torch.cat([weight.scale for weight in weights]),
            torch.cat([weight.minimum for weight in weights]),
            weights[0].input_order,
        )


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [out, in] of 0 .. 15 two to a byte, the even column in the low half.

    Two codes are taken as one word of two bytes, the low one first, which is several times faster
    than byte by byte.
    """
    both = codes.contiguous().view(torch.int16)
    return (both | (both >> 4)).to(torch.uint8)


def unpack_codes(pairs: torch.Tensor) -> torch.Tensor:
    """Undo `pack_codes`: [out, in / 2] to [out, in], both uint8."""
    both = pairs.to(torch.int16)
    return ((both & 0x0F) | ((both & 0xF0) << 4)).view(torch.uint8)


@dataclass(frozen=True)
class Int8Weight:
    """A weight in 8-bit groups along its rows: w = code · scale.

    `codes` [out, in] are -128 .. 127 in int8; `scale` [out, in / group] in fp32. GGUF Q8_0 blocks
    are of this form with groups of 32.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group_size(self) -> int:
        """Weights that share one scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantised(self) -> torch.Tensor:
        """Return the weight [out, in] in fp32."""
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, -1, self.group_size).float()
        return (grouped * self.scale[..., None]).view(rows, columns)

    def rows(self, order: torch.Tensor) -> "Int8Weight":
        """Return the weight with its rows in another order."""
        return Int8Weight(self.codes[order], self.scale[order])

    def to(self, device: torch.device) -> "Int8Weight":
        """Return the weight on a device."""
        return Int8Weight(self.codes.to(device), self.scale.to(device))

    @staticmethod
    def stacked(weights: list["Int8Weight"]) -> "Int8Weight":
        """Stack weights of one input size and group size along their output rows."""
        return Int8Weight(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scale for weight in weights]),
        )


Weight = torch.Tensor | Int4Weight | Int8Weight
"""A weight [out, in]: dense, or in groups."""


def round_to_int4(weight: torch.Tensor) -> Int4Weight:
    """Round a weight [out, in] to the nearest of 16 levels between each group's extremes.

    `scale` and `minimum` are representable in bf16, as drafts store them. Rows are rounded a few
    at a time, so that what lies between stays in the processor's cache.
    """
    rows, columns = weight.shape
    like = weight.detach()
    pairs = like.new_empty((rows, columns // 2), dtype=torch.uint8)
    scale = like.new_empty((rows, columns // GROUP_SIZE), dtype=torch.float32)
    minimum = torch.empty_like(scale)
    for part in range(0, rows, _ROWS_AT_ONCE):
        some = slice(part, part + _ROWS_AT_ONCE)
        grouped = like[some].float().reshape(-1, columns // GROUP_SIZE, GROUP_SIZE)
        minimum[some] = grouped.amin(dim=-1).bfloat16()
        above = grouped - minimum[some, :, None]
        span = grouped.amax(dim=-1) - minimum[some]
        scale[some] = (span / 15).clamp(min=1e-8).bfloat16()
        levels = above.div_(scale[some, :, None]).round_().clamp_(0, 15)
        pairs[some] = pack_codes(levels.view(-1, columns).to(torch.uint8))
    return Int4Weight(pairs, scale, minimum)


def rounded_where(takes: Callable[[Int4Weight], bool], weight: torch.Tensor) -> Weight:
    """Return a weight rounded to 4 bits where it can be and a kernel takes it, else in bf16."""
    if weight.shape[1] % GROUP_SIZE == 0 and takes(rounded := round_to_int4(weight)):
        return rounded
    return weight.bfloat16()


def round_to_int8(weight: torch.Tensor) -> Int8Weight:
    """Round a weight [out, in] to the nearest of 255 levels, symmetric about zero in each row."""
    rows = weight.detach().float()
    scale = (rows.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-8)
    codes = (rows / scale).round().clamp(-127, 127)
    return Int8Weight(codes.to(torch.int8), scale)
