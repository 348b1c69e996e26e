"""Torch's packed 4-bit kernel for NVIDIA GPUs, and which kernel a device has for 4-bit weights."""

import functools
import logging

import torch

from memspec_core.models.linear import Int4Linear, Linear
from memspec_core.models.quantised import Int4Weight, pack_codes

_LOG = logging.getLogger(__name__)

_OLDEST = (8, 0)
"""The compute capability that the kernel's tensor-core instructions need (an Orin has 8.7)."""

_ROUNDING = 0.03
"""What bf16 may put a product off by, as a share of the largest; a wrong order gives about 1."""


SHAPES = ((1280, 256), (512, 128), (576, 64), (192, 32), (96, 32))
"""Columns and group sizes that the kernel is tried on: each group, and 8, 4 and 2 tiles at once."""


class CudaInt4Linear(Int4Linear):
    """A linear layer on torch's packed 4-bit kernel for GPUs; rows go through it in bf16.

    The kernel (aten/src/ATen/native/cuda/int4mm.cu) takes codes two to a byte, the even column in
    the high half, and computes (code - 8) · scale + zero, as the one for CPUs does. Its weights are
    read once for each 16 rows.
    """

    kernel = "torch int4 (CUDA)"
    _TILE_COLUMNS = 16

    def _pack(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return the codes of pairs [out, in / 2] as the kernel takes them."""
        packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack(
            high_first(pairs), _inner_tiles(2 * pairs.shape[1] // self._TILE_COLUMNS)
        )
        return packed

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ for rows x in bf16, in the order of the columns."""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm(
            x.contiguous(), self._packed, self._group_size, self._scale_and_zero
        )
        return y


def high_first(pairs: torch.Tensor) -> torch.Tensor:
    """Return pairs of codes (uint8) with the even column in the high half of each byte."""
    return ((pairs << 4) | (pairs >> 4)).contiguous()


def _inner_tiles(tiles: int) -> int:
    """Return how many tiles of columns lie together: the most that the kernel has and that fit."""
    return next(count for count in (8, 4, 2) if tiles % count == 0)


def int4_kernel(device: torch.device) -> type[Int4Linear] | None:
    """Return what computes 4-bit weights on a device; None where they must be dequantised."""
    if device.type == "cpu":
        return Int4Linear
    return CudaInt4Linear if device.type == "cuda" and not int4_fault(device) else None


@functools.cache
def int4_fault(device: torch.device) -> str:
    """Try the kernel for GPUs on small weights, once for each; return what is wrong, or nothing."""
    try:
        _require_int4_kernel(device)
    except Exception as error:  # a wheel without this GPU's code raises whatever CUDA says
        _LOG.info("4-bit weights are computed in bf16 on %s: %s", device, error)
        return f"{error}"
    return ""


def require_right(linear: Linear, weight: Int4Weight) -> None:
    """Raise `RuntimeError` where a layer over a weight computes other values than the weight's."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(17, weight.shape[1], generator=generator)  # one more than a tile's
    found = linear(rows.to(weight.scale.device)).float().cpu()
    expected = rows.bfloat16().float() @ weight.dequantised().cpu().T
    error, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not error <= _ROUNDING * largest:
        raise RuntimeError(
            f"the kernel '{linear.kernel}' is off by {error:.3g} where values are up to "
            f"{largest:.3g} (groups of {weight.group_size})"
        )


def _require_int4_kernel(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        found, needed = (".".join(map(str, version)) for version in (capability, _OLDEST))
        raise RuntimeError(f"the kernel needs compute capability {needed}, this GPU has {found}")
    for columns, group_size in SHAPES:
        weight = _small_weight(columns, group_size).to(device)
        require_right(CudaInt4Linear(weight), weight)


def _small_weight(columns: int, group_size: int) -> Int4Weight:
    generator = torch.Generator().manual_seed(columns + group_size)
    groups = (32, columns // group_size)
    return Int4Weight(
        pack_codes(torch.randint(0, 16, (32, columns), dtype=torch.uint8, generator=generator)),
        0.1 + torch.rand(groups, generator=generator),
        -16 * torch.rand(groups, generator=generator),
        torch.randperm(columns, generator=generator),
    )
