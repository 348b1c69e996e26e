"""Linear layers over dense weights and over 4-bit blocks."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """y = x Wᵀ + b for x [n, in]; the result [n, out] has the dtype of the weights' kernel."""

    kernel: str

    @property
    def weight_bytes(self) -> int:
        """Fast memory that the weights take."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to n rows."""
        ...


class DenseLinear:
    """A linear layer over a weight [out, in] of any floating dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = None if bias is None else bias.to(weight.dtype)
        self.kernel = f"torch {str(weight.dtype).removeprefix('torch.')}"

    @property
    def weight_bytes(self) -> int:
        """Fast memory that the weights take."""
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to n rows."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


@dataclass(frozen=True)
class Int4Weight:
    """A weight in 4-bit groups along its rows: w = code · scale + minimum.

    `codes` [out, in] are 0 .. 15 in uint8; `scale` and `minimum` [out, in / group] in fp32.
    GGUF Q4_0 and Q4_1 blocks are of this form with groups of 32, GPTQ weights with their own
    groups. `input_order` [in] (int64): column j of `codes` belongs to input `input_order[j]`;
    None where the columns lie in the order of the inputs.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    input_order: torch.Tensor | None = None

    @property
    def group_size(self) -> int:
        """Weights that share one scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantised(self) -> torch.Tensor:
        """Return the weight [out, in] in fp32, its columns in the order of the inputs."""
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, -1, self.group_size).float()
        weight = (grouped * self.scale[..., None] + self.minimum[..., None]).view(rows, columns)
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order, weight)

    def rows(self, order: torch.Tensor) -> "Int4Weight":
        """Return the weight with its rows in another order."""
        return Int4Weight(
            self.codes[order], self.scale[order], self.minimum[order], self.input_order
        )

    def stacks_with(self, other: "Int4Weight") -> bool:
        """Whether the two have the same groups over the same order of inputs."""
        if self.codes.shape[1] != other.codes.shape[1] or self.group_size != other.group_size:
            return False
        if self.input_order is None or other.input_order is None:
            return self.input_order is other.input_order
        return torch.equal(self.input_order, other.input_order)

    @staticmethod
    def stacked(weights: list["Int4Weight"]) -> "Int4Weight":
        """Stack weights along their output rows; each must stack with the first."""
        return Int4Weight(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scale for weight in weights]),
            torch.cat([weight.minimum for weight in weights]),
            weights[0].input_order,
        )


class Int4Linear:
    """A linear layer on torch's packed 4-bit kernel for CPUs; rows go through it in bf16.

    Scale and zero point are rounded to bf16, the form that the kernel takes.
    """

    kernel = "torch int4 (CPU)"
    GROUP_SIZES = (256, 128, 64, 32)
    _INNER_K_TILES = 2

    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None = None) -> None:
        zero = weight.minimum + 8 * weight.scale
        self._scale_and_zero = (
            torch.stack((weight.scale, zero), dim=-1).transpose(0, 1).contiguous().bfloat16()
        )
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            weight.codes.to(torch.int32), self._INNER_K_TILES
        )
        self._group_size = weight.group_size
        self._input_order = weight.input_order
        self._bias = None if bias is None else bias.bfloat16()

    @staticmethod
    def takes(weight: Int4Weight) -> bool:
        """Whether the kernel has this group size and shape."""
        out_features, in_features = weight.codes.shape
        return weight.group_size in Int4Linear.GROUP_SIZES and (
            out_features % 16 == 0 and in_features % weight.group_size == 0
        )

    @property
    def weight_bytes(self) -> int:
        """Fast memory that the weights take."""
        order_bytes = 0 if self._input_order is None else self._input_order.nbytes
        return int(self._packed.nbytes) + self._scale_and_zero.nbytes + order_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to n rows."""
        x = x.bfloat16()
        if self._input_order is not None:
            x = x.index_select(1, self._input_order)
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self._packed, self._group_size, self._scale_and_zero
        )
        return y if self._bias is None else y + self._bias
