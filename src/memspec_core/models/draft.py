"""Draft checkpoints: the project's own folders with a manifest, or any full checkpoint."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from memspec_core.errors import CheckpointError
from memspec_core.models.backend import Backend, TorchBackend, choose_backend
from memspec_core.models.checkpoint import Checkpoint, open_checkpoint
from memspec_core.models.configuration import DecoderConfig
from memspec_core.models.cuda_int4 import int4_kernel
from memspec_core.models.decoder import Decoder, DecoderParts, FeatureDecoder, Fuse
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.linear import DenseLinear, Linear, Table
from memspec_core.models.native.backend import NativeBackend
from memspec_core.models.native.layouts import Layout
from memspec_core.models.pieces import (
    FileVersion,
    Pace,
    at_once,
    forget,
    read_ahead,
    read_file,
    reading,
)
from memspec_core.models.places import brought_along, model_places
from memspec_core.models.quantised import GROUP_SIZE
from memspec_core.models.safetensors_files import SafetensorsFiles
from memspec_core.models.sources import FINAL_NORM, HEAD
from memspec_core.models.target import Target, TargetPlan
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.models.weights import ROUNDED_BITS, WeightReader, planned_bytes
from memspec_core.settings import DEFAULT

MANIFEST = "manifest.json"
WEIGHTS = "draft.safetensors"
HEAD_TOKENS = "head.token_ids"
FORMAT_VERSION = 1
INDEPENDENT = "independent"
"""A causal model of its own."""

FEATURE = "feature"
"""Layers over the target's own hidden states; see `FeatureDecoder`."""

FUSE_FEATURES = "fuse.features.weight"
FUSE_INPUT = "fuse.input.weight"

HEAD_TILE = 16
"""The 4-bit kernels take heads of multiples of this many tokens."""


@dataclass(frozen=True)
class Manifest:
    """What a draft folder says about itself.

    `layers`: the target's layers that the draft's were cut from, in order; `head_tokens`: how
    many tokens its head covers; `weights_sha256`: of the weights' file;
    `tokenizer_sha256`: of the target's token map; `card`: everything else, for people; `taps`:
    the target's layers after which a feature draft takes its hidden states.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    hidden_size: int
    head_tokens: int
    context_tokens: int
    weights_sha256: str
    target_sha256: str
    tokenizer_sha256: str
    card: dict[str, Any]
    taps: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return the text of manifest.json."""
        fields = {"format_version": FORMAT_VERSION} | self.__dict__
        return json.dumps(fields, indent=2) + "\n"


@dataclass(frozen=True)
class DraftPlan:
    """A draft that has been looked at but not read, with the fast memory that it will take.

    `transient_bytes`: beside `weight_bytes` and `kv_bytes`, while it is loaded. `error`: why it
    can be no draft of its target; it takes nothing then, and its loads fail.
    """

    name: str
    path: Path
    kind: str
    weight_bytes: int
    kv_bytes: int
    manifest: Manifest | None
    backend: Backend
    transient_bytes: int = 0
    error: str = ""
    _verified: set[FileVersion] = field(default_factory=set, compare=False, repr=False)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers that a feature draft needs the hidden states of, else none."""
        return () if self.manifest is None else self.manifest.taps

    def load(self, target: Target, pace: Pace = at_once) -> tuple[Decoder, KeyValueCache]:
        """Bring an independent draft into memory, for this target; raises `CheckpointError`."""
        if self.error:
            raise CheckpointError(self.error)
        if self.manifest is None:
            decoder = _load_full(self.path, target, pace)
        else:
            _require_tokens(self.path, self.manifest, target)
            source = self._weights(self.manifest, target, pace)
            with target.backend.lending():
                _, parts = self._shared_parts(self.manifest, target, source)
                decoder = self.backend.decoder(parts)
        return decoder, self._new_cache(decoder.config, target)

    def load_feature(
        self, target: Target, pace: Pace = at_once
    ) -> tuple[FeatureDecoder, KeyValueCache]:
        """Bring a feature draft into memory, for this target; raises `CheckpointError`."""
        assert self.manifest is not None
        if target.cache.taps != self.taps:
            raise CheckpointError(
                f"The draft in {self.path} needs the target's hidden states after the layers "
                f"{list(self.taps)}, but those after {list(target.cache.taps)} are kept."
            )
        parts, fuse = self._feature_parts(self.manifest, target, pace)
        decoder = self.backend.feature_decoder(parts, fuse)
        return decoder, self._new_cache(decoder.config, target)

    def _feature_parts(
        self, manifest: Manifest, target: Target, pace: Pace
    ) -> tuple[DecoderParts, Fuse]:
        """Take the parts from where they are kept as they are in memory, or make and keep them."""
        _require_tokens(self.path, manifest, target)
        layout = self._layout(manifest, target)
        if layout is not None:
            config = _truncated_config(target.decoder.config, manifest, self.path)
            kept = layout.read(config, target.decoder, pace, self._verified)
            if kept is not None:
                return kept
        source = self._weights(manifest, target, pace)
        with target.backend.lending():
            reader, parts = self._shared_parts(manifest, target, source)
            fuse = self._fuse(reader, target.decoder)
        if layout is not None:
            layout.write(parts, fuse)
        return parts, fuse

    def _layout(self, manifest: Manifest, target: Target) -> Layout | None:
        """Return where the weights may be kept as they are in memory, None where nowhere."""
        if not isinstance(self.backend, NativeBackend):
            return None
        version = FileVersion.of(_weights_file(self.path))
        made_from = (manifest.weights_sha256, manifest.layers, version.size, version.mtime_ns)
        rows_from = (manifest.target_sha256, target.decoder.head.kernel)
        return Layout(self.path, repr((made_from, rows_from)), self.backend)

    def _fuse(self, reader: WeightReader, decoder: Decoder) -> Fuse:
        hidden = decoder.config.hidden_size
        reader.require_shape(FUSE_FEATURES, (hidden, len(self.taps) * hidden))
        reader.require_shape(FUSE_INPUT, (hidden, 2 * hidden))
        features, both = reader.linear(FUSE_FEATURES), reader.linear(FUSE_INPUT)
        return Fuse(features, both, decoder.layers[0].input_norm)

    def _shared_parts(
        self, manifest: Manifest, target: Target, source: SafetensorsFiles
    ) -> tuple[WeightReader, DecoderParts]:
        """Make the parts of such a draft; return their reader as well."""
        device = target.decoder.device
        # Distilled weights keep the order of the target's rows as transformers has them.
        reader = WeightReader(source, "stored", device, self.backend)
        config = _truncated_config(target.decoder.config, manifest, self.path)
        ids = source.raw(HEAD_TOKENS).to(device, torch.int64)
        return reader, DecoderParts(
            config,
            target.decoder.embedding,
            [reader.layer(config, index) for index in range(config.layers)],
            reader.norm(FINAL_NORM),
            _head(target, ids, self.backend),
            ids,
        )

    def _weights(self, manifest: Manifest, target: Target, pace: Pace) -> SafetensorsFiles:
        """Read the weights' file; its checksum is verified once for each version of the file."""
        file, pinned = self.path / WEIGHTS, target.decoder.device.type == "cuda"
        read = read_file(file, pace, self._verified.__contains__, pinned=pinned)
        if read.sha256 and read.sha256 != manifest.weights_sha256:
            raise CheckpointError(
                f"{file} is truncated or corrupt, or another draft's (its checksum differs from "
                "the manifest's); copy the draft again."
            )
        self._verified.add(read.version)
        return SafetensorsFiles.of_bytes(file, read.data)

    def _new_cache(self, config: DecoderConfig, target: Target) -> KeyValueCache:
        capacity = min(target.context_tokens, config.context_tokens)
        device = target.decoder.device
        return KeyValueCache(config, capacity, self.backend.cache_dtype(device), device)


def draft_folder(name: str, path: str) -> Path:
    """Return the folder of a draft; "default" is the one that the project brings along."""
    if path != DEFAULT:
        return Path(path).expanduser()
    found = brought_along(name)
    if found is None:
        places = ", ".join(map(str, model_places()))
        raise CheckpointError(
            f"The project brings no draft '{name}' along (looked in {places}); set "
            f"drafts.{name}.path to its folder."
        )
    return found


def is_there(name: str, path: str) -> bool:
    """Whether something is where a draft should be; also where it may not be looked at."""
    try:
        return draft_folder(name, path).exists()
    except PermissionError:
        return True
    except (CheckpointError, OSError):
        return False


def plan_draft(name: str, path: str, target: TargetPlan | Target) -> DraftPlan:
    """Look at a draft without reading its weights; raises `CheckpointError`."""
    folder = draft_folder(name, path)
    with reading(folder):
        if not folder.exists():
            raise CheckpointError(f"There is no draft at {folder}; check drafts.{name}.path.")
        return _plan(name, folder, target)


def failed_plan(
    name: str, path: str, target: TargetPlan | Target, error: CheckpointError
) -> DraftPlan:
    """Return the plan of a draft that is there, but cannot be one of this target."""
    return DraftPlan(
        name=name,
        path=draft_folder(name, path),
        kind="",
        weight_bytes=0,
        kv_bytes=0,
        manifest=None,
        backend=target.backend,
        error=str(error),
    )


def _plan(name: str, folder: Path, target: TargetPlan | Target) -> DraftPlan:
    sizes = target.checkpoint.config
    if not (folder / MANIFEST).exists():
        checkpoint = open_checkpoint(folder)
        backend = _backend_of(checkpoint, target)
        return DraftPlan(
            name=name,
            path=folder,
            kind=INDEPENDENT,
            weight_bytes=planned_bytes(
                checkpoint.weights, checkpoint.config, "stored", _device(target)
            ),
            kv_bytes=_kv_bytes(checkpoint.config, target, backend),
            manifest=None,
            backend=backend,
            transient_bytes=_scratch_bytes(
                checkpoint.config, backend, checkpoint.config.vocabulary_size
            ),
        )
    manifest = read_manifest(folder)
    config = _truncated_config(sizes, manifest, folder)
    if manifest.kind == FEATURE:
        _require_this_target(folder, manifest, target.checkpoint)
    backend = (
        target.backend
        if manifest.head_tokens % HEAD_TILE == 0
        else TorchBackend(target.backend.threads)
    )
    file = _weights_file(folder)
    file_bytes = file.stat().st_size
    return DraftPlan(
        name=name,
        path=folder,
        kind=manifest.kind,
        weight_bytes=_layer_bytes(file, _device(target)) + _head_bytes(manifest, _device(target)),
        kv_bytes=_kv_bytes(config, target, backend),
        manifest=manifest,
        backend=backend,
        transient_bytes=file_bytes
        + _scratch_bytes(config, backend, 0 if backend.cuts_in_place else manifest.head_tokens),
    )


def shared_taps(drafts: Iterable[DraftPlan]) -> tuple[int, ...]:
    """Return the target's layers that all feature drafts take their hidden states after.

    Raises `CheckpointError` where two of them differ: the target keeps those of one choice.
    """
    tapping = [draft for draft in drafts if draft.taps]
    for draft in tapping[1:]:
        if draft.taps != tapping[0].taps:
            raise CheckpointError(
                f"The drafts '{tapping[0].name}' and '{draft.name}' need the target's hidden "
                f"states after different layers, {list(tapping[0].taps)} and {list(draft.taps)}; "
                "use one of the two."
            )
    return tapping[0].taps if tapping else ()


def read_manifest(folder: Path) -> Manifest:
    """Read a draft folder's manifest; raises `CheckpointError`."""
    path = folder / MANIFEST
    try:
        with reading(path):
            fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields.pop("format_version")
        fields |= {name: tuple(fields.get(name, ())) for name in ("layers", "taps")}
        manifest = Manifest(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a draft's manifest: {error!r}.") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {version}; {FORMAT_VERSION} is supported.")
    if manifest.kind not in (INDEPENDENT, FEATURE):
        raise CheckpointError(f"{path}: drafts of kind '{manifest.kind}' are not supported.")
    if bool(manifest.taps) != (manifest.kind == FEATURE):
        raise CheckpointError(
            f"{path}: a draft of kind '{manifest.kind}' with the taps {list(manifest.taps)}; "
            f"drafts of kind '{FEATURE}' have some, others none."
        )
    return manifest


def weights_are_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether the weights' file is the one that the manifest was written for."""
    found = sha256(_weights_file(folder).read_bytes()).hexdigest()
    return found == manifest.weights_sha256


def _kv_bytes(config: DecoderConfig, target: TargetPlan | Target, backend: Backend) -> int:
    capacity = min(target.context_tokens, config.context_tokens)
    return KeyValueCache.bytes_for(config, capacity, backend.cache_dtype(_device(target)))


def _scratch_bytes(config: DecoderConfig, backend: Backend, table_rows: int) -> int:
    """Return what making the largest layer takes for a while, a table of so many rows included."""
    hidden = config.hidden_size
    return backend.scratch_bytes * hidden * max(2 * config.intermediate_size, table_rows)


def _device(target: TargetPlan | Target) -> torch.device:
    return target.device if isinstance(target, TargetPlan) else target.decoder.device


def _weights_file(folder: Path) -> Path:
    file = folder / WEIGHTS
    if not file.exists():
        raise CheckpointError(f"{file} is missing; copy the draft again.")
    return file


def _truncated_config(sizes: DecoderConfig, manifest: Manifest, folder: Path) -> DecoderConfig:
    if manifest.hidden_size != sizes.hidden_size:
        raise CheckpointError(
            f"The draft in {folder} was made for a target of hidden size "
            f"{manifest.hidden_size}, not {sizes.hidden_size}; make one with memspec distill."
        )
    fields = sizes.__dict__ | {
        "layers": len(manifest.layers),
        "context_tokens": manifest.context_tokens,
    }
    return DecoderConfig(**fields)


def _require_tokens(folder: Path, manifest: Manifest, target: Target) -> None:
    """Raise `CheckpointError` where a draft was made for another tokenizer."""
    if manifest.tokenizer_sha256 != target.tokenizer.sha256():
        raise CheckpointError(
            f"The draft in {folder} was made for another tokenizer than that of "
            f"{target.checkpoint.path}; make one with memspec distill."
        )


def _require_this_target(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` where a feature draft was made for other hidden states."""
    if manifest.target_sha256 != checkpoint.sha256():
        raise CheckpointError(
            f"The draft in {folder} was made for another target than {checkpoint.path}, whose "
            "hidden states differ; make one with memspec distill."
        )
    layers, taps = checkpoint.config.layers, manifest.taps
    if len(set(taps)) < len(taps) or not all(tap in range(layers) for tap in taps):
        raise CheckpointError(
            f"{folder / MANIFEST}: the taps {list(taps)} are not different layers of "
            f"{checkpoint.path}, which has {layers}."
        )


def _head(target: Target, ids: torch.Tensor, backend: Backend) -> Linear:
    """Return the draft's head over some rows of the target's, at 4 bits where a kernel is.

    Rounding cost the general draft 1.6 points of agreement (0.483 to 0.467) and saves two thirds
    of what its step reads.
    """
    head = target.decoder.head
    if not isinstance(head, Table):
        head = DenseLinear(target.checkpoint.weights.dense(HEAD).to(target.decoder.device))
    return backend.cut(head, ids)


def _layer_bytes(file: Path, device: torch.device) -> int:
    """Return what the tensors of a draft's file take: 4 bits become bf16 where no kernel is."""
    if int4_kernel(device) is not None:
        return file.stat().st_size
    return SafetensorsFiles([file]).memory_bytes(torch.bfloat16)


def _head_bytes(manifest: Manifest, device: torch.device) -> int:
    weights = manifest.head_tokens * manifest.hidden_size
    fits = manifest.head_tokens % HEAD_TILE == 0 and manifest.hidden_size % GROUP_SIZE == 0
    four_bits = fits and int4_kernel(device) is not None
    return weights * ROUNDED_BITS["int4"] // 8 if four_bits else weights * 2


def _load_full(path: Path, target: Target, pace: Pace) -> Decoder:
    checkpoint = _checked(open_checkpoint(path), target)
    files = checkpoint.weight_files()
    for file in files:
        read_ahead(file, pace)
    device = target.decoder.device
    plan = TargetPlan(
        checkpoint=checkpoint,
        dtype="stored",
        device=device,
        backend=_backend_of(checkpoint, target),
        context_tokens=1,
        weight_bytes=0,
        kv_bytes=0,
    )
    decoder = plan.load().decoder
    for file in files:
        forget(file)
    return decoder


def _backend_of(checkpoint: Checkpoint, target: TargetPlan | Target) -> Backend:
    return choose_backend(
        checkpoint.weights, checkpoint.config, "stored", _device(target), target.backend.threads
    )


def _checked(checkpoint: Checkpoint, target: Target) -> Checkpoint:
    target.tokenizer.require_same_tokens(Tokenizer.of(checkpoint))
    return checkpoint
