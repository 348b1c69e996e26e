"""Linear layers of torch: over dense weights and over groups of 4 and 8 bits."""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from memspec_core.models.quantised import Int4Weight, Int8Weight


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


@runtime_checkable
class Table(Linear, Protocol):
    """A linear layer that also gives its weight's rows: an embedding, or a head to cut from."""

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows [n, in] of the weight, in a floating dtype, for indices [n] (int64)."""
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

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows [n, in] of the weight."""
        return self.weight[indices]


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
        self._packed = self._pack(weight.pairs)
        self._group_size = weight.group_size
        self._input_order = weight.input_order
        self._bias = None if bias is None else bias.bfloat16()

    @staticmethod
    def takes(weight: Int4Weight) -> bool:
        """Whether the kernel has this group size and shape."""
        out_features, in_features = weight.shape
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
        y = self._product(x)
        return y if self._bias is None else y + self._bias

    def _pack(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return the codes of pairs [out, in / 2] as the kernel takes them."""
        packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            _words(pairs), self._INNER_K_TILES
        )
        return packed

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ for rows x in bf16, in the order of the columns."""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self._packed, self._group_size, self._scale_and_zero
        )
        return y


def _words(pairs: torch.Tensor) -> torch.Tensor:
    """Return the codes of pairs [out, in / 2] as int32 [out, in], and nothing large beside them."""
    words = pairs.new_empty((pairs.shape[0], 2 * pairs.shape[1]), dtype=torch.int32)
    words[:, 0::2] = pairs & 0x0F
    words[:, 1::2] = pairs >> 4
    return words


class Int8Linear:
    """A linear layer on torch's 8-bit kernel for CPUs, one scale a row; it computes in bf16."""

    kernel = "torch int8 (CPU)"

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None = None) -> None:
        self._codes = weight.codes.contiguous()
        self._scale = weight.scale[:, 0].bfloat16()
        self._bias = None if bias is None else bias.bfloat16()

    @staticmethod
    def takes(weight: Int8Weight) -> bool:
        """Whether the kernel has this group size and shape."""
        out_features, in_features = weight.shape
        return weight.group_size == in_features and out_features % 16 == 0 == in_features % 16

    @property
    def weight_bytes(self) -> int:
        """Fast memory that the weights take."""
        return self._codes.nbytes + self._scale.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to n rows."""
        y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x.bfloat16(), self._codes, self._scale)
        return y if self._bias is None else y + self._bias
