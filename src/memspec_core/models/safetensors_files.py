"""Weights in safetensors files: one file, or several with an index."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from memspec_core.errors import CheckpointError, is_out_of_memory
from memspec_core.models.pieces import require_content
from memspec_core.models.quantised import Int4Weight

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DTYPES = _FLOATS | {"U8": torch.uint8, "I32": torch.int32}
"""What a draft's file may hold."""


class SafetensorsFiles:
    """A `WeightSource` over safetensors files.

    Beside floating tensors it knows the project's own 4-bit form: `NAME.codes` [out, in / 2]
    (uint8, the even column in the low half), `NAME.scale` and `NAME.minimum` [out, in / group].
    """

    interleaved_rotary = False

    def __init__(self, files: list[Path]) -> None:
        self.where = ", ".join(map(str, files))
        self._where: dict[str, Path] = {}
        self._open: dict[Path, safe_open | _HeldFile] = {}
        for file in files:
            self._add(file, _opened(file))

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

    @classmethod
    def of_bytes(
        cls, file: Path, data: torch.Tensor, *, are_views: bool = False
    ) -> "SafetensorsFiles":
        """Open the bytes (uint8) that were read from a file; raises `CheckpointError`.

        `are_views`: its tensors keep the file's bytes, instead of being copies.
        """
        files = cls([])
        files._add(file, _HeldFile(file, data, are_views or data.is_pinned()))
        return files

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
        kind = self._open[self._where[name]].get_slice(self._stored(name)).get_dtype()
        if kind not in _FLOATS:
            raise CheckpointError(
                f"{self._where[name]}: tensor {name} has the type {kind}; "
                f"{', '.join(_FLOATS)} are supported."
            )
        return _FLOATS[kind]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, also where it is stored in 4-bit groups."""
        if not self.is_int4(name):
            return self._shape(name)
        outputs, pairs = self._shape(f"{name}.codes")
        return (outputs, 2 * pairs)

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
            self.raw(f"{name}.codes"),
            self.raw(f"{name}.scale").float(),
            self.raw(f"{name}.minimum").float(),
        )

    def raw(self, name: str) -> torch.Tensor:
        """Return a tensor as it lies in its file."""
        file = self._file_of(name)
        try:
            tensor: torch.Tensor = self._open[file].get_tensor(self._stored(name))
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
            elements = math.prod(self._open[file].get_slice(self._stored(name)).get_shape())
            total += elements * dtype.itemsize * (2 if name.endswith(".codes") else 1)
        return total

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._file_of(name)].get_slice(self._stored(name)).get_shape())

    def _file_of(self, name: str) -> Path:
        if name not in self._where:
            raise CheckpointError(f"{self.where} lacks the tensor {name}.")
        return self._where[name]

    def _stored(self, name: str) -> str:
        handle = self._open[self._where[name]]
        return name if name in handle.keys() else f"model.{name}"  # noqa: SIM118

    def _add(self, file: Path, handle: "safe_open | _HeldFile") -> None:
        self.where = self.where or str(file)
        self._open[file] = handle
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            self._where[name.removeprefix("model.")] = file


def _opened(file: Path) -> safe_open:
    require_content(file)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        if is_out_of_memory(error):
            raise
        raise _not_whole(file, error) from error


def _not_whole(file: Path, error: object) -> CheckpointError:
    return CheckpointError(
        f"{file} is truncated or not a safetensors file ({error}); copy the checkpoint again."
    )


class _HeldFile:
    """A file whose bytes are in memory already, to be asked like a `safe_open`.

    A mapped file would end the process where somebody truncates it.
    """

    def __init__(self, file: Path, data: torch.Tensor, are_views: bool) -> None:
        self._data = data
        self._are_views = are_views
        try:
            length = int.from_bytes(data[:8].numpy().tobytes(), "little")
            self._start = 8 + length
            header = json.loads(data[8 : self._start].numpy().tobytes())
            header.pop("__metadata__", None)
            self._slices = {name: _Slice(**fields) for name, fields in header.items()}
            if not all(part.fits(len(data) - self._start) for part in self._slices.values()):
                raise ValueError("its header does not fit its length")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _not_whole(file, error) from error

    def keys(self) -> list[str]:
        return list(self._slices)

    def get_slice(self, name: str) -> "_Slice":
        return self._slices[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, as a view where that is wanted and it lies at a fitting place."""
        part = self._slices[name]
        begin, end = (self._start + offset for offset in part.data_offsets)
        values = self._data[begin:end]
        if not self._are_views or begin % part.torch_dtype.itemsize:
            values = values.clone()
        return values.view(part.torch_dtype).view(part.shape)


@dataclass(frozen=True)
class _Slice:
    """Where a tensor lies in a file, in the words of its header."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def fits(self, length: int) -> bool:
        begin, end = self.data_offsets
        size = math.prod(self.shape) * self.torch_dtype.itemsize
        return 0 <= begin <= end <= length and end - begin == size

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return self.shape
