"""Distillation: from a target and prompts to a draft folder, resumable at every step."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint

from memspec_core.errors import PromptFileError, SettingsError
from memspec_core.models.checkpoint import Checkpoint, open_checkpoint
from memspec_core.models.draft import FEATURE, INDEPENDENT, Manifest, read_manifest
from memspec_core.models.target import Target, plan_target
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.request import ChatMessage, GenerationRequest
from memspec_core.training.continuations import (
    Continuation,
    ContinuationPlan,
    read_continuations,
    write_continuations,
)
from memspec_core.training.examples import Collator, PackedCollator, PaddedCollator, head_tokens
from memspec_core.training.export import Provenance, export_draft
from memspec_core.training.feature import FeatureDraft
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

    `layers`: those of the target that the draft starts from; the layers it reads, if it is of kind
    "feature", are after each third of the target. `steps`: how many tokens such a draft proposes in
    training. `head_tokens`: how many tokens it can propose. `base`: the name of a draft, made with
    the same work folder, whose trained weights it starts from instead; a feature draft may have
    more layers than its base. `temperatures`: one pass
    over all prompts for each, 0 for greedy text; `most_prompts` of each file, 0 for all.
    """

    name: str
    target: str
    prompt_files: tuple[Path, ...]
    work_folder: Path
    output_folder: Path
    layers: tuple[int, ...]
    kind: str = FEATURE
    steps: int = 3
    base: str = ""
    head_tokens: int = 12288
    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 192
    max_prompt_tokens: int = 512
    most_prompts: int = 0
    skip_broken_lines: bool = False
    fit: FitPlan = field(default_factory=FitPlan)


def distil(plan: DistilPlan, progress: Progress) -> tuple[Manifest, Fit]:
    """Make a draft; a second call with the same work folder goes on where the first stopped.

    Started by `accelerate launch`, the training is spread over its processes, each of which returns
    the same.

    Raises `PromptFileError`, `CheckpointError`, `CacheMismatchError` or `SettingsError`.
    """
    prompts = {
        file: read_prompts(file, skip_broken=plan.skip_broken_lines) for file in plan.prompt_files
    }
    checkpoint = open_checkpoint(plan.target)
    _check(plan, checkpoint)
    processes = _processes()
    if not processes.is_main_process:
        progress = _silent
    target = _deployed(plan, checkpoint)
    with processes.main_process_first():  # the others find the text in the work folder
        continuations = [
            continuation
            for file in plan.prompt_files
            for continuation in _text(plan, file, prompts[file], target, progress)
        ]
    taps = target.cache.taps
    tokenizer_sha256 = target.tokenizer.sha256()
    del target  # training needs the memory
    model, collator = _model(plan, checkpoint, taps, continuations)
    fit = fit_draft(
        model,
        collator,
        continuations,
        plan.fit,
        plan.work_folder / f"fit-{plan.name}",
        partial(progress, f"training {plan.name}"),
    )
    provenance = Provenance(
        name=plan.name,
        kind=plan.kind,
        layers=plan.layers,
        taps=taps,
        context_tokens=checkpoint.config.context_tokens,
        target_sha256=checkpoint.sha256(),
        tokenizer_sha256=tokenizer_sha256,
        card={
            "target": checkpoint.path.name,
            "license": "Apache-2.0",
            "base": plan.base,
            "prompt_sources": _sources([p for found in prompts.values() for p in found]),
            "text": {
                "temperatures": list(plan.temperatures),
                "max_new_tokens": plan.max_new_tokens,
                "continuations": len(continuations),
                "tokens": sum(len(c.token_ids) for c in continuations),
            },
            "training": asdict(plan.fit) | _figures(fit),
        },
    )
    with processes.main_process_first():
        if processes.is_main_process:
            export_draft(model, provenance, plan.output_folder)
        return read_manifest(plan.output_folder), fit


def _check(plan: DistilPlan, checkpoint: Checkpoint) -> None:
    if plan.kind not in (FEATURE, INDEPENDENT):
        raise SettingsError(f"kind is '{plan.kind}'; use {FEATURE} or {INDEPENDENT}.")
    if not plan.layers or not all(0 <= i < checkpoint.config.layers for i in plan.layers):
        raise SettingsError(
            f"layers are {list(plan.layers)}; the target has 0 to {checkpoint.config.layers - 1}."
        )
    if plan.base and _trained(plan, plan.base) is None:
        raise SettingsError(
            f"There is no trained draft '{plan.base}' in {plan.work_folder}; make it first."
        )


def taps_of(layers: int) -> tuple[int, ...]:
    """Return the layers whose states a feature draft reads: the last of each third."""
    return tuple(sorted({max(0, layers * third // 3 - 1) for third in (1, 2, 3)}))


def _deployed(plan: DistilPlan, checkpoint: Checkpoint) -> Target:
    taps = taps_of(checkpoint.config.layers) if plan.kind == FEATURE else ()
    return (
        plan_target(
            plan.target,
            dtype="stored",
            device=_device(),
            context_tokens=plan.max_prompt_tokens + plan.max_new_tokens,
        )
        .with_taps(taps)
        .load()
    )


def _text(
    plan: DistilPlan,
    file: Path,
    prompts: Sequence[Prompt],
    target: Target,
    progress: Progress,
) -> list[Continuation]:
    """Have the target continue the prompts of a file, once for each temperature."""
    prompt_ids = [_prompt_ids(target.tokenizer, prompt) for prompt in prompts]
    fitting = [ids for ids in prompt_ids if len(ids) <= plan.max_prompt_tokens]
    if len(fitting) < len(prompt_ids):
        _LOG.warning(
            "%s: %d prompts are longer than %d tokens and are left out",
            file,
            len(prompt_ids) - len(fitting),
            plan.max_prompt_tokens,
        )
    if not fitting:
        raise PromptFileError(f"{file}: every prompt is too long.")
    prompts_sha256 = sha256_of_prompts(list(prompts))
    continuations: list[Continuation] = []
    for index, temperature in enumerate(plan.temperatures):
        folder = plan.work_folder / f"text-{prompts_sha256[:12]}-{temperature:g}"
        text_plan = ContinuationPlan(
            target_sha256=target.checkpoint.sha256(),
            prompts_sha256=prompts_sha256,
            taps=target.cache.taps,
            temperature=temperature,
            seed=index,
            max_new_tokens=plan.max_new_tokens,
            most_prompts=plan.most_prompts,
        )
        what = f"text of {file.parent.name}/{file.name} at temperature {temperature:g}"
        write_continuations(folder, text_plan, fitting, target, partial(progress, what))
        continuations += [c for c in read_continuations(folder) if len(c.token_ids)]
    return continuations


def _model(
    plan: DistilPlan,
    checkpoint: Checkpoint,
    taps: tuple[int, ...],
    continuations: Sequence[Continuation],
) -> tuple[TruncatedDraft | FeatureDraft, Collator]:
    target = transformers_model(checkpoint, torch.float32, _device())
    vocabulary_size = checkpoint.config.vocabulary_size
    covered = head_tokens(continuations, plan.head_tokens, vocabulary_size)
    model: TruncatedDraft | FeatureDraft
    if plan.kind == FEATURE:
        model = FeatureDraft(target, plan.layers, taps, covered, plan.steps)
    else:
        model = TruncatedDraft(target, plan.layers, covered)
    if plan.base:
        _begin_with(model, plan)
    collator = PackedCollator if plan.kind == FEATURE else PaddedCollator
    return model, collator(covered, vocabulary_size, plan.fit.towards)


def _begin_with(model: TruncatedDraft | FeatureDraft, plan: DistilPlan) -> None:
    weights = load_file(Path(str(_trained(plan, plan.base))) / "model.safetensors")
    try:
        model.begin_with(weights)
    except RuntimeError as error:
        raise SettingsError(
            f"The draft '{plan.base}' has another kind or other layers than '{plan.name}'."
        ) from error


def _trained(plan: DistilPlan, name: str) -> str | None:
    folder = plan.work_folder / f"fit-{name}"
    return get_last_checkpoint(str(folder)) if folder.exists() else None


def _figures(fit: Fit) -> dict[str, object]:
    curve = [[steps, round(accepted, 4)] for steps, accepted in fit.curve]
    rounded = {name: round(value, 4) for name, value in asdict(fit).items() if name != "curve"}
    return rounded | {"accepted_after_steps": curve}


def _silent(what: str, done: int, total: int) -> None:
    """Report nothing: the main process does."""


def _processes() -> PartialState:
    """Return what knows of the processes that train together; one alone where none was launched."""
    return PartialState(cpu=not torch.cuda.is_available())


def _device() -> torch.device:
    device: torch.device = _processes().device
    return device


def _prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    return tokenizer.prompt_ids(GenerationRequest(messages=(ChatMessage("user", prompt.text),)))


def _sources(prompts: Sequence[Prompt]) -> list[dict[str, object]]:
    counts = Counter((prompt.source, prompt.license) for prompt in prompts)
    return [
        {"source": source, "license": license_, "prompts": count}
        for (source, license_), count in sorted(counts.items())
    ]
