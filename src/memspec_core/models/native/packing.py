"""Laying weights out as the native step reads them: tiles of 16 outputs, blocks of 32 inputs.

The layout is described at the head of linear.h. Everything here is lossless, except that scales
and minima are rounded to fp16, which is how GGUF and GPTQ files store them.
"""

from dataclasses import dataclass
from types import ModuleType

import torch

from memspec_core.models.quantised import Int8Weight, Weight

TILE = 16
BLOCK = 32


@dataclass(frozen=True)
class Packed:
    """A weight [outputs, inputs] as it lies in memory: the name of its format, and its bytes.

    `values` in uint8; `input_order` as in `Int4Weight`.
    """

    format_name: str
    values: torch.Tensor
    outputs: int
    inputs: int
    group_size: int = BLOCK
    input_order: torch.Tensor | None = None


def fits(weight: Weight) -> bool:
    """Whether a weight can be laid out."""
    outputs, inputs = weight.shape
    if outputs % TILE or inputs % BLOCK:
        return False
    if isinstance(weight, torch.Tensor):
        return weight.dtype in (torch.bfloat16, torch.float16)
    return weight.group_size % BLOCK == 0


def pack(weight: Weight, library: ModuleType) -> Packed:
    """Lay a weight out; the library does it for one of 4 bits, since drafts are loaded often."""
    outputs, inputs = weight.shape
    if isinstance(weight, torch.Tensor):
        halves = weight.dtype is torch.float16
        values = (_inputs(weight) if halves else _pairs(weight)).view(torch.uint8).flatten()
        return Packed("fp16" if halves else "bf16", values, outputs, inputs)
    if isinstance(weight, Int8Weight):
        values = _in_groups(_halves(weight.scale), _codes8(weight.codes))
        return Packed("int8", values, outputs, inputs, weight.group_size)
    pairs, scale, minimum = weight.pairs, weight.scale, weight.minimum
    values = library.packed_pairs(pairs.contiguous(), scale.contiguous(), minimum.contiguous())
    return Packed("int4", values, outputs, inputs, weight.group_size, weight.input_order)


def _in_groups(headers: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Put each header [tiles, groups, bytes] before its blocks [tiles, blocks, bytes]."""
    return torch.cat((headers, blocks.reshape(*headers.shape[:2], -1)), dim=-1).flatten()


def _halves(values: torch.Tensor) -> torch.Tensor:
    """Lay values [out, groups] out as [tiles, groups, bytes], those of 16 outputs in fp16."""
    outputs, groups = values.shape
    return values.half().view(outputs // TILE, TILE, groups).mT.contiguous().view(torch.uint8)


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """Lay values [out, in] out as [tiles, blocks, values]: pairs of inputs, for 16 outputs each."""
    outputs, inputs = values.shape
    split = values.reshape(outputs // TILE, TILE, inputs // BLOCK, BLOCK // 2, 2)
    return split.permute(0, 2, 3, 1, 4).flatten(2).contiguous()


def _inputs(values: torch.Tensor) -> torch.Tensor:
    """Lay values [out, in] out as [tiles, blocks, values]: input by input, for 16 outputs each."""
    outputs, inputs = values.shape
    split = values.reshape(outputs // TILE, TILE, inputs // BLOCK, BLOCK)
    return split.permute(0, 2, 3, 1).flatten(2).contiguous()


def _codes8(codes: torch.Tensor) -> torch.Tensor:
    """Lay codes [out, in] out as [tiles, blocks, bytes]: four inputs in four bytes, plus 128.

    Four codes are moved as one word, which is several times faster than one by one.
    """
    outputs, inputs = codes.shape
    words = (codes.contiguous().view(torch.uint8) ^ 128).view(torch.int32)
    split = words.view(outputs // TILE, TILE, inputs // BLOCK, BLOCK // 4)
    return split.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)
