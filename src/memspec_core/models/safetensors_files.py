"""Weights in safetensors files: one file, or several with an index."""

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from memspec_core.errors import CheckpointError
from memspec_core.models.quantised import Int4Weight

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class SafetensorsFiles:
    """A `WeightSource` over safetensors files.

    Beside floating tensors it knows the project's own 4-bit form: `NAME.codes` [out, in / 2]
    (uint8, the even column in the low half), `NAME.scale` and `NAME.minimum` [out, in / group].
    """

    interleaved_rotary = False

    def __init__(self, files: list[Path]) -> None:
        self.where = ", ".join(map(str, files))
        self._where: dict[str, Path] = {}
        self._open: dict[Path, safe_open] = {}
        for file in files:
            handle = self._opened(file)
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                self._where[name.removeprefix("model.")] = file

    @classmethod
    def of_folder(cls, folder: Path, single: str = SINGLE) -> "SafetensorsFiles":
        """Open the weights of a checkpoint folder: the file `single`, or those of its index."""
        index = folder / f"{single}.index.json"
        if not index.exists():
            return cls([folder / single])
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error}.") from error
        return cls([folder / name for name in names])

    def names(self) -> list[str]:
        """Return the names of all tensors as they lie in the files, without `model.`."""
        return list(self._where)

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, dense or in 4-bit groups."""
        return name in self._where or f"{name}.codes" in self._where

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored; bf16 for one in 4-bit groups."""
        if name not in self._where:
            return torch.bfloat16
        kind = self._opened(self._where[name]).get_slice(self._stored(name)).get_dtype()
        if kind not in _FLOATS:
            raise CheckpointError(
                f"{self._where[name]}: tensor {name} has the type {kind}; "
                f"{', '.join(_FLOATS)} are supported."
            )
        return _FLOATS[kind]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, also where it is stored in 4-bit groups."""
        if name in self._where:
            return tuple(self._opened(self._where[name]).get_slice(self._stored(name)).get_shape())
        packed = self.raw(f"{name}.codes") if self.has(name) else self.raw(name)
        return (packed.shape[0], 2 * packed.shape[1])

    def is_int4(self, name: str) -> bool:
        """Whether a tensor is stored in 4-bit groups."""
        return f"{name}.codes" in self._where

    def dense(self, name: str) -> torch.Tensor:
        """Return a tensor in a floating dtype."""
        packed = self.int4(name)
        return self.raw(name) if packed is None else packed.dequantised()

    def int4(self, name: str) -> Int4Weight | None:
        """Return a tensor in 4-bit groups, or None where it is dense."""
        if not self.is_int4(name):
            return None
        return Int4Weight(
            unpack_codes(self.raw(f"{name}.codes")),
            self.raw(f"{name}.scale").float(),
            self.raw(f"{name}.minimum").float(),
        )

    def raw(self, name: str) -> torch.Tensor:
        """Return a tensor as it lies in its file."""
        if name not in self._where:
            raise CheckpointError(f"{self.where} lacks the tensor {name}.")
        file = self._where[name]
        try:
            tensor: torch.Tensor = self._opened(file).get_tensor(self._stored(name))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}.") from error
        return tensor

    def int8(self, name: str) -> None:
        """Return None: nothing lies here in 8-bit groups."""
        return

    def memory_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the fast memory of all tensors in `dtype`, or as stored, without reading them."""
        if dtype is None:
            return sum(file.stat().st_size for file in self._open)
        total = 0
        for name, file in self._where.items():
            elements = math.prod(self._opened(file).get_slice(self._stored(name)).get_shape())
            total += elements * dtype.itemsize * (2 if name.endswith(".codes") else 1)
        return total

    def _stored(self, name: str) -> str:
        handle = self._opened(self._where[name])
        return name if name in handle.keys() else f"model.{name}"  # noqa: SIM118

    def _opened(self, file: Path) -> safe_open:
        if file not in self._open:
            try:
                if file.stat().st_size == 0:
                    raise CheckpointError(f"{file} is empty; copy the checkpoint again.")
                self._open[file] = safe_open(file, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(f"{file} is missing.") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{file} is truncated or not a safetensors file ({error}); "
                    "copy the checkpoint again."
                ) from error
        return self._open[file]


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [out, in] of 0 .. 15 two to a byte, the even column in the low half."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_codes`: [out, in / 2] to [out, in], both uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
