"""Weights and sizes in a GGUF file; Q4_0, Q4_1 and Q8_0 blocks are kept as they are."""

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize

from memspec_core.errors import CheckpointError, is_out_of_memory
from memspec_core.models.configuration import (
    FAMILIES,
    DecoderConfig,
    default_inverse_frequencies,
)
from memspec_core.models.pieces import require_content
from memspec_core.models.quantised import Int4Weight, Int8Weight, pack_codes
from memspec_core.models.sources import EMBEDDING, HEAD

_PARTS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_LAYER_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_FOUR_BITS = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1)
_Parts = tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]
_BLOCK = 32
_LIST_HEADER_BYTES = 12
_LONGEST_LIST = 1024
"""No size of a model is a list of more."""

_FREQUENCY_FACTORS = "rope_freqs.weight"


class _Reader(GGUFReader):
    """Passes over long lists, which are the tokenizer's: it reads them for itself.

    They would take seconds, and a small array for each word, as long as the weights are needed.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> _Parts:
        if raw_type == GGUFValueType.ARRAY:
            kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
            size = self._list_bytes(orig_offs + _LIST_HEADER_BYTES, kind, count)
            if count > _LONGEST_LIST and size is not None:
                return _LIST_HEADER_BYTES + size, [], [], [GGUFValueType.ARRAY]
        whole: _Parts = super()._get_field_parts(orig_offs, raw_type)
        return whole

    def _list_bytes(self, start: int, kind: int, count: int) -> int | None:
        """Return the bytes of a list's items, None where they are lists or of another order."""
        if self.byte_order != "I" or sys.byteorder != "little":
            return None
        if kind != GGUFValueType.STRING:
            number = self.gguf_scalar_to_np.get(GGUFValueType(kind))
            return None if number is None else count * np.dtype(number).itemsize
        end, memory = start, memoryview(self.data)
        for _ in range(count):
            end += 8 + int.from_bytes(memory[end : end + 8], "little")
            if end > len(memory):
                raise ValueError("a list ends behind the file")
        return end - start


class GgufFile:
    """A `WeightSource` over one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        self._reader = _opened(path)
        self._tensors: dict[str, ReaderTensor] = {t.name: t for t in self._reader.tensors}
        self.family = str(self._field("general.architecture"))
        # llama.cpp stores the query and key rows of this family in interleaved order.
        self.interleaved_rotary = self.family == "llama"

    def config(self) -> DecoderConfig:
        """Return the sizes; raises `CheckpointError` for what is missing or unsupported."""
        if self.family not in FAMILIES:
            raise CheckpointError(
                f"{self.path} holds a model of the family '{self.family}'; "
                f"{' and '.join(FAMILIES)} checkpoints are supported."
            )
        heads = int(self._size("attention.head_count"))
        hidden = int(self._size("embedding_length"))
        head_size = int(self._size("attention.key_length", hidden // heads))
        return DecoderConfig(
            family=self.family,
            vocabulary_size=int(self._tensor(_gguf_name(EMBEDDING)).shape[1]),
            hidden_size=hidden,
            layers=int(self._size("block_count")),
            heads=heads,
            kv_heads=int(self._size("attention.head_count_kv", heads)),
            head_size=head_size,
            intermediate_size=int(self._size("feed_forward_length")),
            norm_epsilon=float(self._size("attention.layer_norm_rms_epsilon")),
            tied_head=_gguf_name(HEAD) not in self._tensors,
            context_tokens=int(self._size("context_length")),
            inverse_frequencies=self._frequencies(head_size),
        )

    def end_of_sequence_ids(self) -> set[int]:
        """Return the ids that the file itself names as the end of a sequence or a turn."""
        keys = ("eos_token_id", "eot_token_id")
        found = (self._field(f"tokenizer.ggml.{key}", None) for key in keys)
        return {int(token) for token in found if token is not None}

    def tensor_types(self) -> dict[str, int]:
        """Return how many tensors there are of each storage type."""
        counts: dict[str, int] = {}
        for tensor in self._tensors.values():
            name = tensor.tensor_type.name
            counts[name] = counts.get(name, 0) + 1
        return counts

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return _gguf_name(name) in self._tensors

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored; bf16 for one in blocks."""
        return _FLOATS.get(self._tensor(_gguf_name(name)).tensor_type, torch.bfloat16)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; a GGUF file has it in reverse."""
        return tuple(int(size) for size in self._tensor(_gguf_name(name)).shape[::-1])

    def is_int4(self, name: str) -> bool:
        """Whether a tensor is stored in Q4_0 or Q4_1 blocks."""
        return self._tensor(_gguf_name(name)).tensor_type in _FOUR_BITS

    def dense(self, name: str) -> torch.Tensor:
        """Return a tensor in fp32."""
        tensor = self._tensor(_gguf_name(name))
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} of type {tensor.tensor_type.name} "
                f"cannot be read: {error}."
            ) from error
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def int4(self, name: str) -> Int4Weight | None:
        """Return a tensor of Q4_0 or Q4_1 blocks as it is, or None."""
        tensor = self._tensor(_gguf_name(name))
        if tensor.tensor_type == GGMLQuantizationType.Q4_1:
            return _blocks(tensor.data, header_bytes=4)
        if tensor.tensor_type == GGMLQuantizationType.Q4_0:
            return _blocks(tensor.data, header_bytes=2)
        return None

    def int8(self, name: str) -> Int8Weight | None:
        """Return a tensor of Q8_0 blocks as it is, or None."""
        tensor = self._tensor(_gguf_name(name))
        if tensor.tensor_type != GGMLQuantizationType.Q8_0:
            return None
        rows = tensor.data.shape[0]
        blocks = np.array(tensor.data).reshape(rows, -1, 2 + _BLOCK)
        scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)[..., 0]
        codes = blocks[..., 2:].copy().view(np.int8).reshape(rows, -1)
        return Int8Weight(torch.from_numpy(codes), torch.from_numpy(np.ascontiguousarray(scale)))

    def memory_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the fast memory of all tensors in `dtype`, or as stored, without reading them."""
        total = 0
        for tensor in self._tensors.values():
            if dtype is None and tensor.tensor_type in _FOUR_BITS:
                total += int(tensor.n_elements) * 5 // 8
            else:
                kind = dtype or _FLOATS.get(tensor.tensor_type, torch.bfloat16)
                total += int(tensor.n_elements) * kind.itemsize
        return total

    def _frequencies(self, head_size: int) -> tuple[float, ...]:
        scaling = self._size("rope.scaling.type", "none")
        if scaling != "none":
            raise CheckpointError(
                f"{self.path} scales its rotary embedding by '{scaling}', which is not supported."
            )
        frequencies = default_inverse_frequencies(
            float(self._size("rope.freq_base", 10000.0)), head_size
        )
        if _FREQUENCY_FACTORS in self._tensors:
            factors = self._tensor(_FREQUENCY_FACTORS).data
            frequencies = frequencies / torch.from_numpy(np.array(factors, dtype=np.float32))
        return tuple(frequencies.tolist())

    def _tensor(self, gguf_name: str) -> ReaderTensor:
        if gguf_name not in self._tensors:
            raise CheckpointError(f"{self.path} lacks the tensor {gguf_name}.")
        return self._tensors[gguf_name]

    def _size(self, key: str, default: Any = ...) -> Any:
        return self._field(f"{self.family}.{key}", default)

    def _field(self, key: str, default: Any = ...) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is ...:
            raise CheckpointError(f"{self.path} lacks the key {key}; it may be truncated.")
        return default


def _opened(path: Path) -> _Reader:
    require_content(path)
    try:
        return _Reader(path)
    except Exception as error:  # the reader raises whatever numpy raises on broken bytes
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{path} is truncated or not a GGUF file ({error}); copy the checkpoint again."
        ) from error


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _PARTS:
        return f"{_PARTS[stem]}.{kind}"
    _, index, part = stem.split(".", 2)
    return f"blk.{index}.{_LAYER_PARTS[part]}.{kind}"


def _blocks(data: npt.NDArray[np.uint8], header_bytes: int) -> Int4Weight:
    """Take blocks of 32 weights apart: fp16 scale (and minimum), 16 bytes of codes.

    The low halves of the 16 bytes are the first 16 weights, the high halves the last.
    """
    rows = data.shape[0]
    blocks = np.array(data).reshape(rows, -1, header_bytes + _BLOCK // 2)
    header = blocks[..., :header_bytes].copy().view(np.float16).astype(np.float32)
    packed = blocks[..., header_bytes:]
    codes = np.concatenate((packed & 15, packed >> 4), axis=-1).reshape(rows, -1)
    scale = header[..., 0]
    minimum = header[..., 1] if header_bytes == 4 else -8.0 * scale
    scales = (torch.from_numpy(np.ascontiguousarray(part)) for part in (scale, minimum))
    return Int4Weight(pack_codes(torch.from_numpy(codes)), *scales)
