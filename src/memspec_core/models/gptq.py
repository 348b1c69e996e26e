"""GPTQ checkpoints of 4 bits, as AutoGPTQ and GPTQModel write them; kept as they are stored."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memspec_core.errors import CheckpointError
from memspec_core.models.linear import Int4Linear
from memspec_core.models.quantised import Int4Weight, pack_codes, unpack_codes
from memspec_core.models.safetensors_files import SafetensorsFiles

QUANTIZE_CONFIG = "quantize_config.json"
WEIGHTS_PATTERN = "gptq_model-*.safetensors"
"""How AutoGPTQ names the file of the weights by itself."""

_METHOD = "gptq"
_BITS = 4
_CODES_PER_WORD = 8
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_ONE_IN_EACH_CODE = 0x11111111
_PACKED, _ZEROS, _SCALES, _GROUPS = "qweight", "qzeros", "scales", "g_idx"
_PARTS = (_PACKED, _ZEROS, _SCALES, _GROUPS)
_ADVICE = "use a 4-bit GPTQ, an unquantised or a GGUF checkpoint"


@dataclass(frozen=True)
class GptqFormat:
    """How the layers of a checkpoint are quantised.

    `group_size`: inputs that share a scale, None where the whole row does. `act_order`: inputs
    were quantised in the order of their activations, so that a group's inputs lie scattered.
    `zero_offset`: what the stored zero points are too small by.
    """

    group_size: int | None
    act_order: bool
    zero_offset: int

    @classmethod
    def parse(cls, fields: Mapping[str, Any], where: Path) -> "GptqFormat":
        """Read a quantisation config; raises `CheckpointError` for what is not supported."""
        _require_method(fields, where)
        name = str(fields.get("checkpoint_format") or fields.get("format") or _METHOD)
        name = "marlin" if fields.get("is_marlin_format") else name
        if name not in _ZERO_OFFSETS:
            raise CheckpointError(
                f"{where} has the checkpoint format '{name}'; "
                f"{' and '.join(_ZERO_OFFSETS)} are supported: {_ADVICE}."
            )
        if fields.get("bits") != _BITS:
            raise CheckpointError(
                f"{where} is quantised to {fields.get('bits')} bits; {_BITS} are supported: "
                f"{_ADVICE}."
            )
        if fields.get("pack_dtype", "int32") != "int32":
            raise CheckpointError(
                f"{where} is packed in words of {fields['pack_dtype']}; int32 is supported: "
                f"{_ADVICE}."
            )
        size = fields.get("group_size")
        if type(size) is not int or (size < 1 and size != -1):
            raise CheckpointError(
                f"{where} has the group size {size!r}; a number above 0, or -1 for whole rows, "
                "is needed: check the file."
            )
        _refuse_exceptions(fields.get("dynamic"), size, where)
        return cls(
            group_size=None if size == -1 else size,
            act_order=bool(fields.get("desc_act", False)),
            zero_offset=_ZERO_OFFSETS[name],
        )

    def groups(self, in_features: int) -> int:
        """Return how many groups a row of `in_features` weights has; the last may be short."""
        return 1 if self.group_size is None else -(-in_features // self.group_size)

    def in_order(self, in_features: int) -> torch.Tensor:
        """Return the group of each input where they lie in order."""
        return torch.arange(in_features) // (self.group_size or in_features)


class GptqFiles:
    """A `WeightSource` over safetensors files in which linears are packed by GPTQ.

    A packed linear NAME has `NAME.qweight` [in / 8, out], `NAME.qzeros` [groups, out / 8],
    `NAME.scales` [groups, out] and perhaps `NAME.g_idx` [in], the group of each input; eight
    codes lie in an int32, the first in its lowest bits. Everything else is dense.
    Raises `CheckpointError` where these do not fit together.
    """

    interleaved_rotary = False

    def __init__(self, files: SafetensorsFiles, layout: GptqFormat) -> None:
        self.where = files.where
        self._files = files
        self._layout = layout
        self._packed = [
            name.removesuffix(_PACKED) for name in files.names() if name.endswith(f".{_PACKED}")
        ]
        if not self._packed:
            raise CheckpointError(
                f"{self.where} holds no tensor of GPTQ (NAME.{_PACKED}), although the checkpoint's "
                "config says so; copy the checkpoint again."
            )
        for stem in self._packed:
            self._check(stem)

    def description(self) -> str:
        """Return the storage type in words, with the number of linears that have it."""
        size = self._layout.group_size
        parts = [_METHOD, "int4", "whole rows" if size is None else f"group {size}"]
        parts += ["act-order"] if self._layout.act_order else []
        return f"{' '.join(parts)} x{len(self._packed)}"

    def names(self) -> list[str]:
        """Return the names of all tensors as they are when dense."""
        parts = {stem + part for stem in self._packed for part in _PARTS}
        dense = [name for name in self._files.names() if name not in parts]
        return [f"{stem}weight" for stem in self._packed] + dense

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, dense or packed."""
        return self.is_int4(name) or self._files.has(name)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored; bf16 for a packed one."""
        return torch.bfloat16 if self.is_int4(name) else self._files.stored_dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, [out, in] for a packed one."""
        return self._packed_shape(_stem(name)) if self.is_int4(name) else self._files.shape(name)

    def is_int4(self, name: str) -> bool:
        """Whether a tensor is packed."""
        return name.endswith(".weight") and self._files.has(_stem(name) + _PACKED)

    def dense(self, name: str) -> torch.Tensor:
        """Return a tensor in a floating dtype."""
        packed = self.int4(name)
        return self._files.dense(name) if packed is None else packed.dequantised()

    def int4(self, name: str) -> Int4Weight | None:
        """Return a packed tensor as it is, or None where it is dense.

        Its groups are the largest that a kernel has and that lie within those of the file; the
        scale is repeated where they are smaller.
        """
        if not self.is_int4(name):
            return None
        stem = _stem(name)
        order, group_of_column = _columns_by_group(self._group_of_input(stem))
        size = _uniform_group_size(group_of_column)
        group = group_of_column[::size]
        scale = self._files.raw(stem + _SCALES).float()[group].T
        zero = (self._codes(stem + _ZEROS, self._layout.zero_offset).float()[group]).T
        codes = self._codes(stem + _PACKED, transposed=True)
        return Int4Weight(
            pack_codes(codes if order is None else codes[:, order]),
            scale.contiguous(),
            (-zero * scale).contiguous(),
            order,
        )

    def int8(self, name: str) -> None:
        """Return None: nothing lies here in 8-bit groups."""
        return

    def memory_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the fast memory of all tensors in `dtype`, or as stored, without reading them."""
        total = 0
        for name in self.names():
            if self.is_int4(name):
                total += self._packed_bytes(_stem(name), dtype)
            else:
                itemsize = (dtype or self._files.stored_dtype(name)).itemsize
                total += math.prod(self._files.shape(name)) * itemsize
        return total

    def _packed_bytes(self, stem: str, dtype: torch.dtype | None) -> int:
        rows, columns = self._packed_shape(stem)
        # As a reader lays it out: two codes to a byte, scale and zero point in bf16.
        size = math.gcd(self._layout.group_size or columns, columns)
        size = next((kernel for kernel in Int4Linear.GROUP_SIZES if size % kernel == 0), 0)
        if dtype is not None or not size or rows % 16:
            return rows * columns * (dtype or torch.bfloat16).itemsize
        ordered = self._layout.act_order and self._layout.groups(columns) > 1
        order_bytes = 8 * columns if ordered else 0
        return rows * columns // 2 + 4 * rows * (columns // size) + order_bytes

    def _packed_shape(self, stem: str) -> tuple[int, int]:
        words, rows = self._files.shape(stem + _PACKED)
        return (rows, words * _CODES_PER_WORD)

    def _check(self, stem: str) -> None:
        """Check the tensors of a packed linear by their shapes, which are not read for that."""
        if len(self._files.shape(stem + _PACKED)) != 2:
            raise CheckpointError(f"{self.where}: tensor {stem}{_PACKED} is not a matrix.")
        rows, columns = self._packed_shape(stem)
        groups = self._layout.groups(columns)
        self._require_shape(stem + _ZEROS, (groups, rows // _CODES_PER_WORD))
        self._require_shape(stem + _SCALES, (groups, rows))
        if self._files.has(stem + _GROUPS):
            self._require_shape(stem + _GROUPS, (columns,))
        elif self._layout.act_order:
            raise CheckpointError(
                f"{self.where} lacks the tensor {stem}{_GROUPS}, which a checkpoint with "
                "desc_act needs; copy the checkpoint again."
            )

    def _require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if not self._files.has(name):
            raise CheckpointError(
                f"{self.where} lacks the tensor {name} beside its {_PACKED}; copy the checkpoint "
                "again."
            )
        found = self._files.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self.where}: tensor {name} is {found}, but its {_PACKED} and group size need "
                f"{shape}; check group_size, or copy the checkpoint again."
            )

    def _group_of_input(self, stem: str) -> torch.Tensor:
        """Return the group of each input [in], int64."""
        _, columns = self._packed_shape(stem)
        if not self._files.has(stem + _GROUPS):
            return self._layout.in_order(columns)
        groups = self._files.raw(stem + _GROUPS).long()
        if int(groups.min()) < 0 or int(groups.max()) >= self._layout.groups(columns):
            raise CheckpointError(
                f"{self.where}: tensor {stem}{_GROUPS} names groups that do not exist; copy the "
                "checkpoint again."
            )
        return groups

    def _codes(self, name: str, offset: int = 0, *, transposed: bool = False) -> torch.Tensor:
        """Return the codes of a packed tensor in uint8, eight columns for each word."""
        words = self._files.raw(name)
        if words.dtype is not torch.int32:
            raise CheckpointError(
                f"{self.where}: tensor {name} has the type {words.dtype}, but torch.int32 is "
                f"needed: {_ADVICE}."
            )
        # The writers take the offset from whole words, and a zero point of 0 borrows from the
        # next one; adding to whole words gives that back.
        words = words + offset * _ONE_IN_EACH_CODE
        return unpack_codes((words.T if transposed else words).contiguous().view(torch.uint8))


def quantisation_config(folder: Path, config: object) -> tuple[Path, dict[str, Any]] | None:
    """Return what a folder says of its quantisation and the file that says it, or None.

    `config` is the folder's config.json as transformers reads it. Raises `CheckpointError` if
    the separate file that older writers use cannot be read.
    """
    fields: object = getattr(config, "quantization_config", None)
    file = folder / ("config.json" if fields is not None else QUANTIZE_CONFIG)
    if fields is None:
        if not file.exists():
            return None
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from error
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{file} describes the quantisation by {fields!r}, which is no JSON object; copy the "
            "checkpoint again."
        )
    if file.name == QUANTIZE_CONFIG and not {"quant_method", "method"} & fields.keys():
        return file, {"quant_method": _METHOD} | fields  # older writers had this method only
    return file, fields


def _require_method(fields: Mapping[str, Any], where: Path) -> None:
    method = fields.get("quant_method", fields.get("method"))
    if method != _METHOD:
        raise CheckpointError(
            f"{where} says that the weights are quantised by {method}; {_ADVICE}."
        )


def _refuse_exceptions(rules: object, group_size: int, where: Path) -> None:
    """Refuse rules by which some layers have other bits or groups; layers left out are fine."""
    for pattern, changes in rules.items() if isinstance(rules, dict) else ():
        if str(pattern).startswith("-:") or not isinstance(changes, dict):
            continue
        if (changes.get("bits", _BITS), changes.get("group_size", group_size)) != (
            _BITS,
            group_size,
        ):
            raise CheckpointError(
                f"{where} quantises the layers '{pattern}' in another way than the rest, which "
                f"is not supported: {_ADVICE}."
            )


def _stem(name: str) -> str:
    return name.removesuffix("weight")


def _columns_by_group(groups: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the order that sorts inputs by group, None if they are sorted, and the groups."""
    if bool((groups[1:] >= groups[:-1]).all()):
        return None, groups
    order = torch.argsort(groups, stable=True)
    return order, groups[order]


def _uniform_group_size(group_of_column: torch.Tensor) -> int:
    """Return the largest block, of a kernel's sizes if possible, that never spans two groups."""
    columns = group_of_column.shape[0]
    for size in (*Int4Linear.GROUP_SIZES, 16, 8, 4, 2):
        if columns % size == 0:
            blocks = group_of_column.view(-1, size)
            if bool((blocks == blocks[:, :1]).all()):
                return size
    return 1
