"""Training a draft with transformers' Trainer: checkpoints, resume, progress, several devices."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from memspec_core.training.continuations import Continuation
from memspec_core.training.examples import DISTRIBUTION, Collator, Examples

_HELD_OUT_SHARE = 0.03
_LOOKS = 8
"""How often held-out text is looked at while a draft is trained."""


@dataclass(frozen=True)
class FitPlan:
    """How long and how fast to train, and towards what.

    `batch_size` on each device. `towards`: `DISTRIBUTION`, the target's over its top tokens, or
    `TOKENS`, the most probable of these alone.
    """

    epochs: float = 4.0
    batch_size: int = 8
    learning_rate: float = 8e-4
    seed: int = 0
    towards: str = DISTRIBUTION


@dataclass(frozen=True)
class Fit:
    """What training gave.

    `accepted`: proposals in a row that the target would accept, on average over held-out text of
    the training prompts; of an independent draft only the first counts. `curve`: the same after
    some steps each.
    """

    steps: int
    seconds: float
    loss: float
    accepted: float
    curve: tuple[tuple[int, float], ...]


class _Progress(TrainerCallback):
    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._reported = float("-inf")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        if now - self._reported >= 1.0 or state.global_step == state.max_steps:
            self._reported = now
            self._report(state.global_step, state.max_steps)


def fit_draft(
    model: nn.Module,
    collator: Collator,
    continuations: Sequence[Continuation],
    plan: FitPlan,
    folder: Path,
    progress: Callable[[int, int], None],
) -> Fit:
    """Train a draft; checkpoints go to `folder`, from which a run that was cut goes on.

    `progress(done, total)` counts steps.
    """
    training, held_out = _split(continuations)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=plan.epochs,
        per_device_train_batch_size=plan.batch_size,
        per_device_eval_batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.05},
        warmup_steps=50,
        adam_beta2=0.95,
        train_sampling_strategy="group_by_length",
        weight_decay=0.01,
        max_grad_norm=1.0,
        bf16=True,
        seed=plan.seed,
        save_steps=100,
        save_total_limit=2,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=1 / _LOOKS,
        remove_unused_columns=False,
        label_names=["top_index"],
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_num_workers=0,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Examples(training),
        eval_dataset=Examples(held_out),
        data_collator=collator,
        compute_metrics=_mean_accepted,
        callbacks=[_Progress(progress)],
    )
    last = get_last_checkpoint(str(folder)) if folder.exists() else None
    trained = trainer.train(resume_from_checkpoint=last)
    figures = trainer.evaluate()
    return Fit(
        steps=trained.global_step,
        seconds=float(trained.metrics["train_runtime"]),
        loss=float(figures["eval_loss"]),
        accepted=float(figures["eval_accepted"]),
        curve=_curve(trainer.state.log_history),
    )


def _curve(history: Sequence[Mapping[str, float]]) -> tuple[tuple[int, float], ...]:
    """Return what was accepted after which steps; the last look is taken twice and counts once."""
    looks = [entry for entry in history if "eval_accepted" in entry]
    return tuple(sorted({int(look["step"]): look["eval_accepted"] for look in looks}.items()))


def _split(
    continuations: Sequence[Continuation],
) -> tuple[list[Continuation], list[Continuation]]:
    """Hold out all continuations of some prompts, so that no held-out prompt is trained on."""
    prompts = sorted({c.prompt_ids.tobytes() for c in continuations})
    every = max(2, round(1 / _HELD_OUT_SHARE))
    held_out = set(prompts[::every])
    training = [c for c in continuations if c.prompt_ids.tobytes() not in held_out]
    return training, [c for c in continuations if c.prompt_ids.tobytes() in held_out]


def _mean_accepted(prediction: Any) -> dict[str, float]:
    return {"accepted": float(prediction.predictions.mean())}
