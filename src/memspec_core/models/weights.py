"""How the tensors of a source become the layers of a decoder."""

import math
from collections.abc import Sequence

import torch

from memspec_core.errors import CheckpointError
from memspec_core.models.backend import Backend
from memspec_core.models.configuration import DecoderConfig
from memspec_core.models.cuda_int4 import int4_kernel
from memspec_core.models.decoder import DecoderLayer
from memspec_core.models.linear import Linear, Table
from memspec_core.models.quantised import (
    GROUP_SIZE,
    Int4Weight,
    Int8Weight,
    Weight,
    round_to_int4,
    round_to_int8,
)
from memspec_core.models.sources import DTYPES, WeightSource, layer_shapes, matrix_names

ROUNDED_BITS = {"int4": 5, "int8": 8}
"""The dtypes that round dense layers when they are loaded, and the bits of a weight then."""


class WeightReader:
    """Turns the tensors of a source into layers in the dtype that was asked for.

    `dtype` is "stored" (groups of 4 and 8 bits stay as they are where the backend has a kernel;
    everything else is computed in the dtype in which it is stored), "fp32", "bf16", or "int4" or
    "int8" (the layers' dense matrices are rounded; everything else as stored).
    """

    def __init__(
        self, source: WeightSource, dtype: str, device: torch.device, backend: Backend
    ) -> None:
        self._source = source
        self._dtype = DTYPES.get(dtype)
        self._rounding = dtype if dtype in ROUNDED_BITS else None
        self._device = device
        self._backend = backend

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, dense, in the dtype that was asked for."""
        dtype = self._dtype or self._source.stored_dtype(name)
        return self._source.dense(name).to(self._device, dtype)

    def norm(self, name: str) -> torch.Tensor:
        """Return a norm's weight in fp32, a copy of what the source may have mapped from a file.

        A view would fault, and end the process, where somebody truncates that file later.
        """
        return self._source.dense(name).to(self._device, torch.float32, copy=True)

    def table(self, name: str) -> Table:
        """Return an embedding [vocabulary, hidden]."""
        packed = self._source.int8(name) if self._dtype is None else None
        if packed is not None and self._backend.takes(packed):
            return self._backend.table(packed.to(self._device))
        return self._backend.table(self.tensor(name))

    def linear(self, *names: str, order: torch.Tensor | None = None) -> Linear:
        """Return one layer over the tensors stacked along their outputs, rows in `order`."""
        weight = self._in_groups(names) or self._dense(names)
        if order is not None:
            weight = weight[order] if isinstance(weight, torch.Tensor) else weight.rows(order)
        return self._backend.linear(weight, self._bias(names, order))

    def layer(self, config: DecoderConfig, index: int) -> DecoderLayer:
        """Return the decoder layer `index`; raises `CheckpointError` if its sizes differ."""
        prefix = f"layers.{index}."
        for name, shape in layer_shapes(config).items():
            self.require_shape(prefix + name, shape)
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        order = None if self._source.interleaved_rotary else interleaving_order(config)
        return DecoderLayer(
            input_norm=self.norm(f"{prefix}input_layernorm.weight"),
            qkv=self.linear(*(f"{attention}{p}_proj.weight" for p in "qkv"), order=order),
            output=self.linear(f"{attention}o_proj.weight"),
            post_norm=self.norm(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.linear(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
            down=self.linear(f"{mlp}down_proj.weight"),
        )

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `CheckpointError` where a tensor has another shape or is not there."""
        found = self._source.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self._source.where}: tensor {name} is {found}, but the sizes say {shape}."
            )

    def _bias(self, names: Sequence[str], order: torch.Tensor | None) -> torch.Tensor | None:
        biases = [name.removesuffix("weight") + "bias" for name in names]
        if not all(map(self._source.has, biases)):
            return None
        bias = torch.cat([self._source.dense(name).to(self._device).float() for name in biases])
        return bias if order is None else bias[order]

    def _dense(self, names: Sequence[str]) -> torch.Tensor:
        parts = [self.tensor(name) for name in names]
        if len({part.dtype for part in parts}) > 1:  # else they would meet in fp32
            parts = [part.bfloat16() for part in parts]
        return torch.cat(parts)

    def _in_groups(self, names: Sequence[str]) -> Int4Weight | Int8Weight | None:
        """Return the tensors stacked in groups, or None where they cannot all be so."""
        if self._dtype is not None or int4_kernel(self._device) is None:
            return None
        stacked = _stacked([self._part_in_groups(name) for name in names])
        if stacked is None:
            return None
        there = stacked.to(self._device)
        return there if self._backend.takes(there) else None

    def _part_in_groups(self, name: str) -> Int4Weight | Int8Weight | None:
        if self._rounding is None or not is_rounded(self._source, name):
            return self._source.int4(name) or self._source.int8(name)
        dense = self._source.dense(name)
        return round_to_int4(dense) if self._rounding == "int4" else round_to_int8(dense)


def _stacked(parts: Sequence[Weight | None]) -> Int4Weight | Int8Weight | None:
    four_bits = [part for part in parts if isinstance(part, Int4Weight)]
    eight_bits = [part for part in parts if isinstance(part, Int8Weight)]
    if len(four_bits) == len(parts) and all(map(four_bits[0].stacks_with, four_bits)):
        return Int4Weight.stacked(four_bits)
    if len(eight_bits) == len(parts) and len({part.group_size for part in eight_bits}) == 1:
        return Int8Weight.stacked(eight_bits)
    return None


def planned_bytes(
    source: WeightSource, config: DecoderConfig, dtype: str, device: torch.device
) -> int:
    """Return the fast memory that a `WeightReader`'s layers will take, without reading them."""
    total = source.memory_bytes(DTYPES.get(dtype))
    if dtype in ROUNDED_BITS:
        return total - _saved_by_rounding(source, config, ROUNDED_BITS[dtype])
    if dtype not in DTYPES and int4_kernel(device) is None:  # 4 bits become bf16 there
        return max(total, source.memory_bytes(torch.bfloat16))
    return total


def _saved_by_rounding(source: WeightSource, config: DecoderConfig, bits: int) -> int:
    saved = 0
    for name in matrix_names(config):
        if source.has(name) and is_rounded(source, name):
            stored_bits = 8 * source.stored_dtype(name).itemsize
            saved += math.prod(source.shape(name)) * (stored_bits - bits) // 8
    return saved


def is_rounded(source: WeightSource, name: str) -> bool:
    """Whether "int4" and "int8" round a tensor: a layer's matrix that is not in 4 bits already."""
    if not name.startswith("layers.") or source.is_int4(name):
        return False
    shape = source.shape(name)
    return len(shape) == 2 and shape[0] % 16 == 0 and shape[1] % GROUP_SIZE == 0


def interleaving_order(config: DecoderConfig) -> torch.Tensor:
    """Return the rows of stacked q, k, v such that rotary pairs of q and k lie side by side.

    Checkpoints of transformers pair row i of a head with row i + d/2; here pairs are (2i, 2i+1).
    Dot products of queries and keys do not depend on the order.
    """
    half = config.head_size // 2
    within = torch.arange(config.head_size).view(2, half).T.reshape(-1)
    rotated = (config.heads + config.kv_heads) * config.head_size
    starts = torch.arange(0, rotated, config.head_size)[:, None]
    values = torch.arange(rotated, rotated + config.kv_heads * config.head_size)
    return torch.cat(((starts + within).reshape(-1), values))
