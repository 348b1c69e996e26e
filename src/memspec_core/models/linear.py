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
    GGUF Q4_0 and Q4_1 blocks are of this form with groups of 32.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    @property
    def group_size(self) -> int:
        """Weights that share one scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantised(self) -> torch.Tensor:
        """Return the weight [out, in] in fp32."""
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, -1, self.group_size).float()
        return (grouped * self.scale[..., None] + self.minimum[..., None]).view(rows, columns)

    def rows(self, order: torch.Tensor) -> "Int4Weight":
        """Return the weight with its rows in another order."""
        return Int4Weight(self.codes[order], self.scale[order], self.minimum[order])

    @staticmethod
    def stacked(weights: list["Int4Weight"]) -> "Int4Weight":
        """Stack weights of one input size along their output rows."""
        return Int4Weight(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scale for weight in weights]),
            torch.cat([weight.minimum for weight in weights]),
        )


class Int4Linear:
    """A linear layer on torch's packed 4-bit kernel for CPUs; rows go through it in bf16.

    Scale and zero point are rounded to bf16, the form that the kernel takes.
    """

    kernel = "torch int4 (CPU)"
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
        self._bias = None if bias is None else bias.bfloat16()

    @staticmethod
    def takes(weight: Int4Weight) -> bool:
        """Whether the kernel has this group size and shape."""
        out_features, in_features = weight.codes.shape
        return weight.group_size in (32, 64, 128, 256) and (
            out_features % 16 == 0 and in_features % weight.group_size == 0
        )

    @property
    def weight_bytes(self) -> int:
        """Fast memory that the weights take."""
        return int(self._packed.nbytes) + self._scale_and_zero.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to n rows."""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16(), self._packed, self._group_size, self._scale_and_zero
        )
        return y if self._bias is None else y + self._bias
