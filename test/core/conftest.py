"""Checkpoints that the tests of the core share; nothing is downloaded."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from core.tiny import load_target, make_model, truncated
from memspec_core.models.checkpoint import Checkpoint, open_checkpoint
from memspec_core.models.native import layouts
from memspec_core.models.target import Target
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.training.export import Provenance, export_draft
from memspec_core.training.truncated import TruncatedDraft

settings.register_profile(
    "memspec",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("memspec")


@pytest.fixture(scope="session", autouse=True)
def lean_process() -> Iterator[None]:
    """Tiny matrices are slower on many threads, and collecting garbage on many old objects."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    transformers_logging.disable_progress_bar()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def layouts_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where drafts of tests are kept as they are in memory, instead of in the user's cache."""
    folder = tmp_path_factory.mktemp("layouts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "folder", lambda: folder)
        yield folder


@pytest.fixture(scope="session")
def embedded() -> Checkpoint:
    return open_checkpoint("default")


@pytest.fixture(scope="session")
def tokenizer(embedded: Checkpoint) -> Tokenizer:
    return Tokenizer.of(embedded)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> "Checkpoints":
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"), tokenizer)


class Checkpoints:
    """Writes checkpoint folders, each with the embedded target's tokenizer beside it."""

    def __init__(self, root: Path, tokenizer: Tokenizer) -> None:
        self._root = root
        self._tokenizer_folder = root / "tokenizer"
        tokenizer.backend.save_pretrained(self._tokenizer_folder)

    def save(self, name: str, model: PreTrainedModel, **how: object) -> Path:
        folder = self._root / name
        model.save_pretrained(folder, **how)
        self.add_tokenizer(folder)
        return folder

    def add_tokenizer(self, folder: Path) -> None:
        for file in self._tokenizer_folder.iterdir():
            shutil.copy(file, folder)


@pytest.fixture(scope="session")
def target_model() -> PreTrainedModel:
    return make_model("llama", seed=1)


@pytest.fixture(scope="session")
def target_folder(checkpoints: Checkpoints, target_model: PreTrainedModel) -> Path:
    return checkpoints.save("target", target_model)


@pytest.fixture(scope="session")
def draft_folders(checkpoints: Checkpoints, target_model: PreTrainedModel) -> dict[str, Path]:
    """Drafts: the target itself, its first layer, another random model, one of short context."""
    return {
        "itself": checkpoints.save("itself", target_model),
        "first_layer": checkpoints.save("first_layer", truncated(target_model, 1)),
        "other": checkpoints.save("other", make_model("qwen2", seed=2, num_hidden_layers=1)),
        "short": checkpoints.save("short", make_model("llama", seed=1, max_position_embeddings=24)),
    }


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return load_target(target_folder)


@pytest.fixture(scope="session")
def distilled(
    tmp_path_factory: pytest.TempPathFactory, target_model: PreTrainedModel, target: Target
) -> Path:
    """A draft folder as memspec distill writes it, untrained: the target's first layer."""
    folder = tmp_path_factory.mktemp("drafts") / "distilled"
    provenance = Provenance(
        name="distilled",
        kind="independent",
        layers=(0,),
        taps=(),
        context_tokens=256,
        target_sha256=target.checkpoint.sha256(),
        tokenizer_sha256=target.tokenizer.sha256(),
        card={
            "target": "target",
            "license": "Apache-2.0",
            "base": "",
            "prompt_sources": [{"source": "none", "license": "none", "prompts": 0}],
            "text": {"tokens": 0},
            "training": {"steps": 0},
        },
    )
    export_draft(TruncatedDraft(target_model, (0,), torch.arange(0, 49152, 3)), provenance, folder)
    return folder


@pytest.fixture
def parameters(target_folder: Path, draft_folders: dict[str, Path]) -> dict[str, object]:
    """The node's parameters for the target with its drafts, in a runtime that compares."""
    paths = {f"drafts.{name}.path": str(path) for name, path in draft_folders.items()}
    return {
        "target.path": str(target_folder),
        "drafts.names": list(draft_folders),
        "dtype": "fp32",
        "context_tokens": 256,
        "max_prompt_tokens": 200,
        "memory.floor_mib": 0,
        "memory.budget_mib": 2000,
        **paths,
    }
