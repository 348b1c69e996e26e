"""The target's own text: continuations of prompts with the target's top logits at each token.

A draft is trained on what the target says *as deployed*: a quantised checkpoint continues the
prompts with its quantised weights. The text is cached in shards, each written whole or not at
all, so that a run that was cut goes on where it stopped.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from memspec_core.errors import CacheMismatchError
from memspec_core.models.checkpoint import id_set

TOP_LOGITS = 16


@dataclass(frozen=True)
class ContinuationPlan:
    """What the cached text is made from; a folder serves one plan only."""

    target_sha256: str
    prompts_sha256: str
    temperature: float
    seed: int
    max_new_tokens: int
    max_prompt_tokens: int
    batch_size: int


@dataclass(frozen=True)
class Continuation:
    """One prompt with the target's answer.

    `prompt_ids` [p], `token_ids` [n] (with the end-of-sequence token where the target gave it),
    `top_ids` [n, TOP_LOGITS] and `top_log_probabilities` [n, TOP_LOGITS]: the target's own
    distribution at temperature 1 for each of the n tokens.
    """

    prompt_ids: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_log_probabilities: npt.NDArray[np.float16]


class _TopLogits(LogitsProcessor):
    """Records the top of the raw distribution at every step of `generate`."""

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []
        self.log_probabilities: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        logits = scores.float()
        top = logits.topk(TOP_LOGITS, dim=-1)
        self.ids.append(top.indices.to(torch.int32))
        self.log_probabilities.append(top.values - logits.logsumexp(-1, keepdim=True))
        return scores


def write_continuations(
    folder: Path,
    plan: ContinuationPlan,
    prompts: list[list[int]],
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int, int], None],
) -> None:
    """Continue tokenised prompts with the target and cache the text in `folder`.

    `progress(done, total)` counts shards. Raises `CacheMismatchError` if the folder holds the
    text of another plan.
    """
    _claim(folder, plan)
    kept = [ids for ids in prompts if len(ids) <= plan.max_prompt_tokens]
    batches = _batches(kept, plan.batch_size)
    for index, batch in enumerate(batches):
        shard = folder / f"shard-{index:05d}.npz"
        if not shard.exists():
            torch.manual_seed(plan.seed + index)
            _write_shard(shard, _continue(batch, plan, model, tokenizer))
        progress(index + 1, len(batches))


def read_continuations(folder: Path) -> Iterator[Continuation]:
    """Read every cached continuation of a folder in a fixed order."""
    for shard in sorted(folder.glob("shard-*.npz")):
        with np.load(shard, allow_pickle=False) as arrays:
            prompt_ends, token_ends = arrays["prompt_ends"], arrays["token_ends"]
            prompt_ids = np.split(arrays["prompt_ids"], prompt_ends[:-1])
            per_token = (arrays["token_ids"], arrays["top_ids"], arrays["top_log_probabilities"])
            token_ids, top_ids, top_logs = (np.split(a, token_ends[:-1]) for a in per_token)
        for row in zip(prompt_ids, token_ids, top_ids, top_logs, strict=True):
            yield Continuation(*row)


def _claim(folder: Path, plan: ContinuationPlan) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "plan.json"
    wanted = asdict(plan)
    if record.exists():
        found = json.loads(record.read_text())
        if found != wanted:
            differing = sorted(key for key in wanted if found.get(key) != wanted[key])
            raise CacheMismatchError(
                f"The text in {folder} was made with another {', '.join(differing)}; "
                "choose another cache folder or delete this one."
            )
    else:
        with _whole_file(record) as file:
            file.write(json.dumps(wanted, indent=1).encode())


def _batches(prompts: list[list[int]], batch_size: int) -> list[list[list[int]]]:
    """Prompts of like length share a batch, since padding is work for nothing."""
    ordered = sorted(prompts, key=len)
    return [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]


def _continue(
    batch: list[list[int]],
    plan: ContinuationPlan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Continuation]:
    padded = tokenizer.pad({"input_ids": batch}, padding_side="left", return_tensors="pt")
    top = _TopLogits()
    sampling: dict[str, Any] = {"do_sample": False}
    if plan.temperature > 0:
        sampling = {"do_sample": True, "temperature": plan.temperature, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        output = model.generate(
            input_ids=padded["input_ids"].to(model.device),
            attention_mask=padded["attention_mask"].to(model.device),
            max_new_tokens=plan.max_new_tokens,
            logits_processor=LogitsProcessorList([top]),
            pad_token_id=tokenizer.pad_token_id,
            **sampling,
        )
    generated = output[:, padded["input_ids"].shape[1] :].cpu().numpy().astype(np.int32)
    ends = sorted(id_set(model.generation_config.eos_token_id))
    top_ids = torch.stack(top.ids, dim=1).cpu().numpy()
    top_logs = torch.stack(top.log_probabilities, dim=1).to(torch.float16).cpu().numpy()
    rows = []
    for row, prompt in enumerate(batch):
        stops = np.flatnonzero(np.isin(generated[row], ends))
        length = int(stops[0]) + 1 if stops.size else generated.shape[1]
        rows.append(
            Continuation(
                np.asarray(prompt, dtype=np.int32),
                generated[row, :length],
                top_ids[row, :length],
                top_logs[row, :length],
            )
        )
    return rows


def _write_shard(path: Path, rows: list[Continuation]) -> None:
    with _whole_file(path) as file:
        np.savez(
            file,
            prompt_ends=np.cumsum([len(row.prompt_ids) for row in rows]),
            token_ends=np.cumsum([len(row.token_ids) for row in rows]),
            prompt_ids=np.concatenate([row.prompt_ids for row in rows]),
            token_ids=np.concatenate([row.token_ids for row in rows]),
            top_ids=np.concatenate([row.top_ids for row in rows]),
            top_log_probabilities=np.concatenate([row.top_log_probabilities for row in rows]),
        )


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that is there under its name only once it is complete."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
