"""Feature drafts kept on disc as the native step has them in memory.

Laying a draft out, and rounding the rows of its head, takes a core longer than reading it from a
disc, and decoding loses that time. So the first load of a draft keeps what it made in the user's
cache folder, and a later one is little more than reading that file.

A file's name begins with the draft's folder, goes on with what the weights were made from, and ends
in the checksum of its bytes. What fits no longer is deleted when something is written.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from memspec_core.errors import CheckpointError
from memspec_core.files import whole_file
from memspec_core.models.configuration import DecoderConfig
from memspec_core.models.decoder import Decoder, DecoderLayer, DecoderParts, Fuse
from memspec_core.models.linear import Linear, Table
from memspec_core.models.native.backend import NativeBackend, NativeLinear
from memspec_core.models.native.library import NativeUnavailableError, cache_folder
from memspec_core.models.native.packing import Packed
from memspec_core.models.pieces import FileVersion, Pace, read_file
from memspec_core.models.safetensors_files import SafetensorsFiles

_VERSION = 1
"""Of the layouts that are made here; the native step's own are known by its name."""

_CONTENTS = "contents"
_LINE_BYTES = 64
"""Weights begin at a cache line, as the step reads them."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """Where the weights of one draft are kept, and what they are made from.

    `draft`: its folder; `origin`: everything that its weights in memory depend on, as text.
    """

    draft: Path
    origin: str
    backend: NativeBackend

    def read(
        self,
        config: DecoderConfig,
        target: Decoder,
        pace: Pace,
        verified: set[FileVersion],
    ) -> tuple[DecoderParts, Fuse] | None:
        """Read the parts of the draft, or return None where they are not kept.

        Embedding and the norm that goes with it are the target's. Each version of a file is checked
        once against its checksum, and is in `verified` then.
        """
        path = next(iter(self._files(f"{self._beginning}-*.safetensors")), None)
        if path is None:
            return None
        try:
            kept = _Kept(_checked(path, pace, verified), self.backend)
            return kept.parts(config, target.embedding), kept.fuse(target)
        except CheckpointError as error:
            _LOG.warning("A kept draft is left out and made anew: %s", error)
            path.unlink(missing_ok=True)
            return None

    def write(self, parts: DecoderParts, fuse: Fuse) -> None:
        """Keep the parts of the draft; where that cannot be, they are made anew each time."""
        content = _content(self.draft, _named(parts, fuse))
        name = f"{self._beginning}-{sha256(content).hexdigest()}.safetensors"
        try:
            folder().mkdir(parents=True, exist_ok=True)
            # Another process may be writing the same bytes: the checksum tells what came of that.
            with whole_file(folder() / name) as file:
                file.write(content)
        except (OSError, NativeUnavailableError) as error:
            _LOG.info("The draft in %s is not kept as it is in memory: %s", self.draft, error)
            return
        for path in self._files("*.safetensors"):
            if path.name != name and self._is_outdated(path):
                path.unlink(missing_ok=True)

    @property
    def _beginning(self) -> str:
        made_by = (_VERSION, self.backend.layout)
        return f"{_short(str(self.draft.resolve()))}-{_short(repr((self.origin, made_by)))}"

    def _is_outdated(self, path: Path) -> bool:
        """Whether a kept draft is this one made from something else, or its folder is gone."""
        if path.name.startswith(f"{_short(str(self.draft.resolve()))}-"):
            return True
        draft = _draft_of(path)
        return draft is None or not draft.is_dir()

    def _files(self, pattern: str) -> list[Path]:
        try:
            return sorted(folder().glob(pattern))
        except NativeUnavailableError:
            return []


class _Kept:
    """A kept draft's tensors; they are views of one piece of memory."""

    def __init__(self, files: SafetensorsFiles, backend: NativeBackend) -> None:
        self._files = files
        self._backend = backend
        try:
            self._contents = json.loads(files.raw(_CONTENTS).numpy().tobytes())
        except ValueError as error:
            raise CheckpointError(f"{files.where} has no table of contents.") from error

    def parts(self, config: DecoderConfig, embedding: Table) -> DecoderParts:
        layers = [
            DecoderLayer(
                input_norm=self._files.raw(f"{index}.input_norm"),
                qkv=self._linear(f"{index}.qkv"),
                output=self._linear(f"{index}.output"),
                post_norm=self._files.raw(f"{index}.post_norm"),
                gate_up=self._linear(f"{index}.gate_up"),
                down=self._linear(f"{index}.down"),
            )
            for index in range(config.layers)
        ]
        norm, head = self._files.raw("norm"), self._linear("head")
        ids = self._files.raw("head_token_ids").to(torch.int64)
        return DecoderParts(config, embedding, layers, norm, head, ids)

    def fuse(self, target: Decoder) -> Fuse:
        features, both = self._linear("fuse.features"), self._linear("fuse.input")
        return Fuse(features, both, target.layers[0].input_norm)

    def _linear(self, name: str) -> NativeLinear:
        try:
            shape = dict(self._contents[name])
            values = self._files.raw(f"{name}.values")[: shape.pop("value_bytes")]
            order = self._files.raw(f"{name}.order") if self._files.has(f"{name}.order") else None
            bias = self._files.raw(f"{name}.bias") if self._files.has(f"{name}.bias") else None
            return self._backend.laid_out(Packed(values=values, input_order=order, **shape), bias)
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{self._files.where}: {name} does not fit: {error}.") from error


def _named(parts: DecoderParts, fuse: Fuse) -> Iterator[tuple[str, torch.Tensor | Linear]]:
    for index, layer in enumerate(parts.layers):
        for field in fields(DecoderLayer):
            yield f"{index}.{field.name}", getattr(layer, field.name)
    assert parts.head_token_ids is not None, "a feature draft's head names its tokens"
    yield "norm", parts.norm
    yield "head", parts.head
    yield "head_token_ids", parts.head_token_ids.int()
    yield "fuse.features", fuse.features
    yield "fuse.input", fuse.input


def _content(draft: Path, named: Iterable[tuple[str, torch.Tensor | Linear]]) -> bytes:
    """Return a safetensors file's bytes, in which everything begins at a cache line."""
    tensors: dict[str, torch.Tensor] = {}
    contents: dict[str, dict[str, str | int]] = {}
    for name, part in named:
        if isinstance(part, torch.Tensor):
            tensors[name] = part
            continue
        assert isinstance(part, NativeLinear)
        contents[name], own = _linear_parts(part)
        tensors |= {f"{name}.{key}": tensor for key, tensor in own.items()}
    table = torch.frombuffer(bytearray(json.dumps(contents).encode()), dtype=torch.uint8)
    tensors[_CONTENTS] = table
    tensors = {name: _filled(tensor.contiguous()) for name, tensor in tensors.items()}
    name = json.dumps(str(draft.resolve()))  # blanks after it change nothing
    start = 8 + int.from_bytes(save(tensors, {"draft": name})[:8], "little")
    content: bytes = save(tensors, {"draft": name + " " * (-start % _LINE_BYTES)})
    return content


def _linear_parts(linear: NativeLinear) -> tuple[dict[str, str | int], dict[str, torch.Tensor]]:
    packed = linear.packed
    shape: dict[str, str | int] = {
        "format_name": packed.format_name,
        "outputs": packed.outputs,
        "inputs": packed.inputs,
        "group_size": packed.group_size,
        "value_bytes": packed.values.nbytes,
    }
    tensors = {"values": packed.values}
    if packed.input_order is not None:
        tensors["order"] = packed.input_order.int()
    if linear.bias is not None:
        tensors["bias"] = linear.bias
    return shape, tensors


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that ends where a cache line does; bytes are filled up with blanks."""
    missing = -tensor.nbytes % _LINE_BYTES
    if not missing:
        return tensor
    return torch.cat((tensor.flatten(), tensor.new_full((missing // tensor.itemsize,), ord(" "))))


def _checked(path: Path, pace: Pace, verified: set[FileVersion]) -> SafetensorsFiles:
    read = read_file(path, pace, verified.__contains__)
    if read.sha256 and read.sha256 != path.stem.rpartition("-")[2]:
        raise CheckpointError(f"{path} is damaged: its checksum differs from its name's.")
    verified.add(read.version)
    return SafetensorsFiles.of_bytes(path, read.data, are_views=True)


def _draft_of(path: Path) -> Path | None:
    """Return the folder of the draft that a file keeps; one that is unreadable keeps none."""
    try:
        with safe_open(path, framework="pt") as file:
            return Path(json.loads(file.metadata()["draft"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None


def folder() -> Path:
    """Return where drafts are kept; raises `NativeUnavailableError` where there is no place."""
    return cache_folder() / "drafts"


def _short(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
