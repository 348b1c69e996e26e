"""Distillation: from a target and prompts to a draft folder, resumable at every step."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from memspec_core.errors import PromptFileError, SettingsError
from memspec_core.models.checkpoint import Checkpoint, open_checkpoint
from memspec_core.models.draft import Manifest
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.request import ChatMessage, GenerationRequest
from memspec_core.training.continuations import (
    Continuation,
    ContinuationPlan,
    read_continuations,
    write_continuations,
)
from memspec_core.training.examples import frequent_tokens
from memspec_core.training.export import Provenance, export_draft
from memspec_core.training.fitting import Fit, FitPlan, fit_draft
from memspec_core.training.prompts import Prompt, read_prompts, sha256_of_prompts
from memspec_core.training.reference import transformers_model
from memspec_core.training.truncated import TruncatedDraft

_LOG = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class DistilPlan:
    """What to make.

    `temperatures`: one pass over all prompts for each, 0 for greedy text. `layers` are those of
    the target that the draft starts from; `head_tokens` is how many tokens it can propose.
    """

    name: str
    target: str
    prompt_file: Path
    work_folder: Path
    output_folder: Path
    layers: tuple[int, ...]
    head_tokens: int = 16384
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_new_tokens: int = 192
    max_prompt_tokens: int = 512
    text_batch_size: int = 96
    fit: FitPlan = field(default_factory=FitPlan)


def distil(plan: DistilPlan, progress: Progress) -> tuple[Manifest, Fit]:
    """Make a draft; a second call with the same work folder goes on where the first stopped.

    Raises `PromptFileError`, `CheckpointError`, `CacheMismatchError` or `SettingsError`.
    """
    prompts = read_prompts(plan.prompt_file)
    checkpoint = open_checkpoint(plan.target)
    if not plan.layers or not all(0 <= i < checkpoint.config.layers for i in plan.layers):
        raise SettingsError(
            f"layers are {list(plan.layers)}; the target has 0 to {checkpoint.config.layers - 1}."
        )
    tokenizer = Tokenizer.of(checkpoint)
    continuations = _text(plan, prompts, checkpoint, tokenizer, progress)
    model = TruncatedDraft(
        _target_model(checkpoint, torch.float32),
        plan.layers,
        frequent_tokens(continuations, plan.head_tokens),
    )
    vocabulary_size = checkpoint.config.vocabulary_size
    fit = fit_draft(model, continuations, vocabulary_size, plan.fit, plan.work_folder / "fit")
    provenance = Provenance(
        name=plan.name,
        layers=plan.layers,
        context_tokens=checkpoint.config.context_tokens,
        target_sha256=checkpoint.sha256(),
        tokenizer_sha256=tokenizer.sha256(),
        card={
            "target": checkpoint.path.name,
            "license": "Apache-2.0",
            "prompt_sources": _sources(prompts),
            "text": {
                "temperatures": list(plan.temperatures),
                "max_new_tokens": plan.max_new_tokens,
                "continuations": len(continuations),
                "tokens": sum(len(c.token_ids) for c in continuations),
            },
            "training": asdict(plan.fit) | {k: _rounded(v) for k, v in asdict(fit).items()},
        },
    )
    return export_draft(model, provenance, plan.output_folder), fit


def _text(
    plan: DistilPlan,
    prompts: Sequence[Prompt],
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    progress: Progress,
) -> list[Continuation]:
    """Have the target continue the prompts, once for each temperature."""
    prompt_ids = [_prompt_ids(tokenizer, prompt) for prompt in prompts]
    fitting = [ids for ids in prompt_ids if len(ids) <= plan.max_prompt_tokens]
    if len(fitting) < len(prompt_ids):
        _LOG.warning(
            "%d prompts are longer than %d tokens and are left out",
            len(prompt_ids) - len(fitting),
            plan.max_prompt_tokens,
        )
    if not fitting:
        raise PromptFileError(f"{plan.prompt_file}: every prompt is too long.")
    model = _target_model(checkpoint, torch.bfloat16)
    continuations: list[Continuation] = []
    for index, temperature in enumerate(plan.temperatures):
        folder = plan.work_folder / f"text-{index}"
        text_plan = ContinuationPlan(
            target_sha256=checkpoint.sha256(),
            prompts_sha256=sha256_of_prompts(list(prompts)),
            temperature=temperature,
            seed=index,
            max_new_tokens=plan.max_new_tokens,
            max_prompt_tokens=plan.max_prompt_tokens,
            batch_size=plan.text_batch_size,
        )
        write_continuations(
            folder,
            text_plan,
            fitting,
            model=model,
            tokenizer=tokenizer.backend,
            progress=partial(progress, f"text at temperature {temperature:g}"),
        )
        continuations += read_continuations(folder)
    return continuations


def _prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    return tokenizer.prompt_ids(GenerationRequest(messages=(ChatMessage("user", prompt.text),)))


def _target_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    return transformers_model(checkpoint, dtype, "cuda" if torch.cuda.is_available() else "cpu")


def _sources(prompts: Sequence[Prompt]) -> list[dict[str, object]]:
    counts = Counter((prompt.source, prompt.license) for prompt in prompts)
    return [
        {"source": source, "license": license_, "prompts": count}
        for (source, license_), count in sorted(counts.items())
    ]


def _rounded(value: float) -> float:
    return round(value, 4)
