"""Where weights come from, under one set of names."""

from typing import Protocol

import torch

from memspec_core.models.configuration import DecoderConfig
from memspec_core.models.quantised import Int4Weight, Int8Weight

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
HEAD = "lm_head.weight"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtypes that a user may ask for in which every tensor is dense."""


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

    def int8(self, name: str) -> Int8Weight | None:
        """Return a tensor that is stored in 8-bit groups as it is, or None."""
        ...

    def memory_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the fast memory of all tensors in `dtype`, or as stored, without reading them."""
        ...


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


def matrix_names(config: DecoderConfig) -> list[str]:
    """Return the names of all layers' matrices."""
    shapes = layer_shapes(config)
    parts = [part for part, shape in shapes.items() if len(shape) == 2]
    return [f"layers.{index}.{part}" for index in range(config.layers) for part in parts]
