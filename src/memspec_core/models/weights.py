"""Where weights come from, under one set of names, and how they become linear layers."""

import math
from typing import Protocol

import torch

from memspec_core.errors import CheckpointError
from memspec_core.models.configuration import DecoderConfig
from memspec_core.models.decoder import DecoderLayer
from memspec_core.models.int4_rounding import GROUP_SIZE, ROUNDED_BITS, round_to_int4
from memspec_core.models.linear import DenseLinear, Int4Linear, Int4Weight, Linear

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
HEAD = "lm_head.weight"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDED = "int4"


class WeightSource(Protocol):
    """Tensors by the names that transformers uses, without the prefix `model.`.

    `interleaved_rotary`: the query and key rows are already in the order of interleaved pairs.
    `where` names the file or folder. Reading raises `CheckpointError`, which names the file and
    the tensor.
    """

    where: str
    interleaved_rotary: bool

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        ...

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the floating dtype in which a tensor is computed when taken as stored."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it is when dense."""
        ...

    def is_int4(self, name: str) -> bool:
        """Whether a tensor is stored in 4-bit groups."""
        ...

    def dense(self, name: str) -> torch.Tensor:
        """Return a tensor in a floating dtype, dequantised where it is stored in blocks."""
        ...

    def int4(self, name: str) -> Int4Weight | None:
        """Return a tensor that is stored in 4-bit groups as it is, or None."""
        ...

    def memory_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the fast memory of all tensors in `dtype`, or as stored, without reading them."""
        ...


class WeightReader:
    """Turns the tensors of a source into layers in the dtype that was asked for.

    `dtype` is "stored" (4-bit groups stay 4 bits where a kernel has them; everything else is
    computed in the dtype in which it is stored), "fp32", "bf16", or "int4" (the layers' linears
    are rounded to 4 bits, except for those that are stored in 4 bits; the rest as stored).
    """

    def __init__(self, source: WeightSource, dtype: str, device: torch.device) -> None:
        self._source = source
        self._dtype = DTYPES.get(dtype)
        self._rounds = dtype == ROUNDED
        self._device = device

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, dense, in the dtype that was asked for."""
        dtype = self._dtype or self._source.stored_dtype(name)
        return self._source.dense(name).to(self._device, dtype)

    def norm(self, name: str) -> torch.Tensor:
        """Return a norm's weight in fp32."""
        return self._source.dense(name).to(self._device, torch.float32)

    def linear(self, *names: str, order: torch.Tensor | None = None) -> Linear:
        """Return one layer over the tensors stacked along their outputs, rows in `order`."""
        bias = self._bias(names, order)
        packed = self._int4(names, order)
        if packed is not None:
            return Int4Linear(packed, bias)
        parts = [self.tensor(name) for name in names]
        if len({part.dtype for part in parts}) > 1:  # else they would meet in fp32
            parts = [part.bfloat16() for part in parts]
        weight = torch.cat(parts)
        return DenseLinear(weight if order is None else weight[order], bias)

    def layer(self, config: DecoderConfig, index: int) -> DecoderLayer:
        """Return the decoder layer `index`; raises `CheckpointError` if its sizes differ."""
        prefix = f"layers.{index}."
        for name, shape in layer_shapes(config).items():
            self._require_shape(prefix + name, shape)
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

    def _require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._source.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self._source.where}: tensor {name} is {found}, but the sizes say {shape}."
            )

    def _bias(self, names: tuple[str, ...], order: torch.Tensor | None) -> torch.Tensor | None:
        biases = [name.removesuffix("weight") + "bias" for name in names]
        if not all(map(self._source.has, biases)):
            return None
        bias = torch.cat([self._source.dense(name).to(self._device).float() for name in biases])
        return bias if order is None else bias[order]

    def _int4(self, names: tuple[str, ...], order: torch.Tensor | None) -> Int4Weight | None:
        if self._dtype is not None or self._device.type != "cpu":
            return None
        parts = [part for name in names if (part := self._int4_part(name)) is not None]
        if len(parts) < len(names) or not all(map(parts[0].stacks_with, parts)):
            return None
        stacked = Int4Weight.stacked(parts)
        if not Int4Linear.takes(stacked):
            return None
        return stacked if order is None else stacked.rows(order)

    def _int4_part(self, name: str) -> Int4Weight | None:
        if not self._rounds or not _is_rounded(self._source, name):
            return self._source.int4(name)
        return round_to_int4(self._source.dense(name))


def planned_bytes(
    source: WeightSource, config: DecoderConfig, dtype: str, device: torch.device
) -> int:
    """Return the fast memory that a `WeightReader`'s layers will take, without reading them."""
    total = source.memory_bytes(DTYPES.get(dtype))
    if dtype == ROUNDED:
        return total - _saved_by_rounding(source, config)
    if dtype not in DTYPES and device.type != "cpu":  # 4 bits become bf16 there
        return max(total, source.memory_bytes(torch.bfloat16))
    return total


def _saved_by_rounding(source: WeightSource, config: DecoderConfig) -> int:
    saved = 0
    for index in range(config.layers):
        for part in layer_shapes(config):
            name = f"layers.{index}.{part}"
            if source.has(name) and _is_rounded(source, name):
                stored_bits = 8 * source.stored_dtype(name).itemsize
                saved += math.prod(source.shape(name)) * (stored_bits - ROUNDED_BITS) // 8
    return saved


def _is_rounded(source: WeightSource, name: str) -> bool:
    """Whether `dtype: int4` rounds a tensor: a layer's matrix that is not in 4 bits already."""
    if not name.startswith("layers.") or source.is_int4(name):
        return False
    shape = source.shape(name)
    return len(shape) == 2 and shape[0] % 16 == 0 and shape[1] % GROUP_SIZE == 0


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights by their names within the layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


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
