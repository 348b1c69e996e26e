"""GPTQModel's kernels for 4-bit weights on GPUs: where it is installed and the switch is set.

They are left off by default. GPTQModel compiles its kernels with nvcc when the first layer asks for
one, which takes minutes and memory that a robot may not have; to import it took 260 MiB that no
ledger knows of; and it writes to standard output. Torch's own kernel, which serves the same
weights, reads them again for every 16 rows: what these may save is time on long prompts.
"""

import functools
import importlib
import logging
import os
from typing import Any

import torch

from memspec_core.models.cuda_int4 import require_right
from memspec_core.models.linear import Linear
from memspec_core.models.quantised import Int4Weight, pack_codes

SWITCH = "MEMSPEC_GPTQMODEL"
"""The variable of the environment that asks for these kernels, with the value 1."""

_LOG = logging.getLogger(__name__)

_KINDS = ("MarlinLinear", "MacheteLinear", "SwordfishLinear")
"""The kernels that multiply packed weights with rows in bf16.

Others dequantise the whole weight in every call, or take rows in fp16, in which the activations of
some models overflow.
"""

_MOST_IN_GROUP = 128
_ONE_IN_EACH_CODE = 0x11111111


class GptqModelLinear:
    """A linear layer on a kernel of GPTQModel; rows go through it in bf16."""

    def __init__(
        self, module: Any, input_order: torch.Tensor | None, bias: torch.Tensor | None
    ) -> None:
        self._module = module
        self._input_order = input_order
        self._bias = None if bias is None else bias.bfloat16()
        self.kernel = f"GPTQModel {type(module).__name__}"

    @property
    def weight_bytes(self) -> int:
        """Fast memory that the weights take."""
        order_bytes = 0 if self._input_order is None else self._input_order.nbytes
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return sum((int(tensor.nbytes) for tensor in tensors), start=order_bytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to n rows."""
        x = x.bfloat16()
        if self._input_order is not None:
            x = x.index_select(1, self._input_order)
        y: torch.Tensor = self._module(x)
        return y if self._bias is None else y + self._bias


def gptq_linear(weight: Int4Weight, bias: torch.Tensor | None) -> Linear | None:
    """Return a layer on one of GPTQModel's kernels for GPUs, or None where torch is to compute it.

    It is None unless the switch is set, the weight has whole zero points, as GPTQ's have, and the
    kernel, tried once for each shape, computes what it should.
    """
    if os.environ.get(SWITCH) != "1" or weight.scale.device.type != "cuda":
        return None
    try:
        linear = made_by_gptqmodel(weight, bias, "auto", _KINDS)
    except Exception as error:  # it is not there, lacks a compiler, or whatever else it says
        _say(f"GPTQModel computes no weights of one shape or kind: {error}")
        return None
    _say(f"Weights of 4 bits are computed by {linear.kernel}")
    return linear


def made_by_gptqmodel(
    weight: Int4Weight, bias: torch.Tensor | None, backend: str, kinds: tuple[str, ...]
) -> GptqModelLinear:
    """Make a layer by GPTQModel's choice of a kernel, and try it; raises what goes wrong.

    `backend` is its word for a kernel, or "auto"; `kinds` are the classes that are accepted.
    """
    zeros = whole_zero_points(weight)
    group_size = min(weight.group_size, _MOST_IN_GROUP)
    kind = _chosen(group_size, bool((zeros == 8).all()), weight.scale.device, backend)
    if kind.__name__ not in kinds:
        raise ValueError(f"{kind.__name__} is its choice, which is none of {', '.join(kinds)}")
    module = _module(kind, weight, zeros, group_size)
    shape = (kind.__name__, weight.shape, group_size, weight.scale.device)
    if shape not in _RIGHT:
        require_right(GptqModelLinear(module, weight.input_order, None), weight)
        _RIGHT.add(shape)
    return GptqModelLinear(module, weight.input_order, bias)


_RIGHT: set[object] = set()
"""Kernels, shapes and devices for which a layer was tried."""


def whole_zero_points(weight: Int4Weight) -> torch.Tensor:
    """Return the codes [out, groups] (uint8) that stand for 0; raises `ValueError` where none does.

    GPTQ's groups have them, and so have Q4_0 blocks; others need not.
    """
    zeros = (-weight.minimum / weight.scale).nan_to_num(8.0).round()
    wrong = (zeros * weight.scale + weight.minimum).abs() > 0.01 * weight.scale.abs()
    if bool(wrong.any()) or float(zeros.min()) < 0 or float(zeros.max()) > 15:
        raise ValueError("their zero points are no codes")
    return zeros.to(torch.uint8)


@functools.cache
def _chosen(group_size: int, symmetric: bool, device: torch.device, backend: str) -> Any:
    """Return the class that GPTQModel takes for such weights on a device."""
    importer = importlib.import_module("gptqmodel.utils.importer")
    return importer.hf_select_quant_linear_v2(
        bits=4,
        group_size=group_size,
        desc_act=False,  # the columns lie in the order of their groups here
        sym=symmetric,
        format="gptq",
        quant_method="gptq",
        dtype=torch.bfloat16,
        pack=False,
        device_map={"": str(device)},
        backend=backend,
    )


def _module(kind: Any, weight: Int4Weight, zeros: torch.Tensor, group_size: int) -> Any:
    """Return a module of GPTQModel's with a weight in it, ready to compute."""
    out_features, in_features = weight.shape
    repeats = weight.group_size // group_size
    words = pack_codes(zeros.repeat_interleave(repeats, dim=1).T.contiguous()).view(torch.int32)
    tensors = {
        "qweight": weight.pairs.view(torch.int32).T.contiguous(),
        "qzeros": words if kind.REQUIRES_FORMAT_V2 else words - _ONE_IN_EACH_CODE,
        "scales": weight.scale.repeat_interleave(repeats, dim=1).T.contiguous().bfloat16(),
        "g_idx": torch.arange(in_features, device=weight.scale.device).int() // group_size,
    }
    with torch.device(weight.scale.device):
        module = kind(
            bits=4,
            group_size=group_size,
            desc_act=False,
            sym=bool((zeros == 8).all()),
            in_features=in_features,
            out_features=out_features,
            bias=False,
            pack_dtype=torch.int32,
            dtype=torch.bfloat16,
            register_buffers=True,
        )
    for name, tensor in tensors.items():
        place = getattr(module, name)
        if place.shape != tensor.shape:
            raise ValueError(f"{kind.__name__} has {name} {place.shape}, not {tensor.shape}")
        place.data = tensor
    if kind.REQUIRES_FORMAT_V2:
        module.qzero_format(2)
    module.post_init()
    return module.eval()


@functools.cache
def _say(message: str) -> None:
    """Log a line, once."""
    _LOG.info("%s", message)
