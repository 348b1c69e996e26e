"""The target's own text, with what the target thought at each token of it.

A draft is trained on what the target says *as deployed*: its answers come from the runtime's own
decoding, and its probabilities and hidden states from the runtime's own forward. All is cached in
shards, each file written whole or not at all, so that a run that was cut goes on where it stopped.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from memspec_core.files import claim_folder, whole_file
from memspec_core.models.target import Target
from memspec_core.training.answers import Answering

TOP_LOGITS = 16
PROMPTS_A_SHARD = 32


@dataclass(frozen=True)
class ContinuationPlan:
    """What the cached text is made from; a folder serves one plan only.

    `taps`: the target's layers whose states are kept (see `KeyValueCache`); none for drafts that do
    not read them. `most_prompts`: how many are continued, 0 for all.
    """

    target_sha256: str
    prompts_sha256: str
    taps: tuple[int, ...]
    temperature: float
    seed: int
    max_new_tokens: int
    most_prompts: int


@dataclass(frozen=True)
class Continuation:
    """One prompt with the target's answer.

    `prompt_ids` [p], `token_ids` [n] (without the end-of-sequence token), `top_ids` and
    `top_log_probabilities` [n, TOP_LOGITS]: the target's own distribution at temperature 1 for each
    of the n tokens. `features` [p + n, taps · hidden]: its states, where they were kept.
    """

    prompt_ids: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_log_probabilities: npt.NDArray[np.float16]
    features: npt.NDArray[np.float16] | None = None


def write_continuations(
    folder: Path,
    plan: ContinuationPlan,
    prompts: Sequence[Sequence[int]],
    target: Target,
    progress: Callable[[int, int], None],
) -> None:
    """Continue tokenised prompts with the target and cache text and thoughts in `folder`.

    `target` keeps the states of the plan's taps. The prompts are shuffled, so that any part of the
    text is of all their sources. `progress(done, total)` counts shards. Raises
    `CacheMismatchError` if the folder holds the text of another plan.
    """
    _claim(folder, plan)
    order = np.random.default_rng(plan.seed).permutation(len(prompts))
    order = order[: plan.most_prompts or None]
    shards = [order[i : i + PROMPTS_A_SHARD] for i in range(0, len(order), PROMPTS_A_SHARD)]
    answering = Answering(target, plan.max_new_tokens, plan.temperature)
    for index, places in enumerate(shards):
        text = folder / f"text-{index:05d}.npz"
        if not text.exists():
            chosen = [prompts[place] for place in places]
            seeds = [plan.seed + int(place) for place in places]
            _write_text(text, chosen, answering.answers(chosen, seeds))
        if not _thoughts(text).exists():
            _write_thoughts(text, plan, target)
        progress(index + 1, len(shards))


def read_continuations(folder: Path) -> Iterator[Continuation]:
    """Read every cached continuation of a folder in a fixed order; states stay on the disc."""
    for text in sorted(folder.glob("text-*.npz")):
        if not _thoughts(text).exists():
            continue
        prompts, answers = _read_text(text)
        with np.load(_thoughts(text), allow_pickle=False) as arrays:
            ends = np.cumsum([len(answer) for answer in answers])[:-1]
            top_ids = np.split(arrays["top_ids"], ends)
            top_logs = np.split(arrays["top_log_probabilities"], ends)
        lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
        features: Sequence[npt.NDArray[np.float16] | None] = [None] * len(prompts)
        if _features(text).exists():
            features = np.split(np.load(_features(text), mmap_mode="r"), np.cumsum(lengths)[:-1])
        for row in zip(prompts, answers, top_ids, top_logs, features, strict=True):
            yield Continuation(*row)


def _claim(folder: Path, plan: ContinuationPlan) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "plan.json"
    wanted = json.loads(json.dumps(asdict(plan)))
    found = json.loads(record.read_text()) if record.exists() else None
    claim_folder(record, "text", wanted, found)


def _write_text(
    path: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> None:
    with whole_file(path) as file:
        np.savez(
            file,
            prompt_ends=np.cumsum([len(ids) for ids in prompts]),
            token_ends=np.cumsum([len(ids) for ids in answers]),
            prompt_ids=np.concatenate([np.asarray(ids, np.int32) for ids in prompts]),
            token_ids=np.concatenate([np.asarray(ids, np.int32) for ids in answers]),
        )


def _read_text(
    path: Path,
) -> tuple[list[npt.NDArray[np.int32]], list[npt.NDArray[np.int32]]]:
    with np.load(path, allow_pickle=False) as arrays:
        prompts = np.split(arrays["prompt_ids"], arrays["prompt_ends"][:-1])
        answers = np.split(arrays["token_ids"], arrays["token_ends"][:-1])
    return prompts, answers


def _write_thoughts(text: Path, plan: ContinuationPlan, target: Target) -> None:
    """Write the states first: where the top logits are, the shard is complete."""
    thoughts = [_thought(target, p, a) for p, a in zip(*_read_text(text), strict=True)]
    top_ids, top_logs, features = zip(*thoughts, strict=True)
    if plan.taps:
        with whole_file(_features(text)) as file:
            np.save(file, np.concatenate(features))
    with whole_file(_thoughts(text)) as file:
        np.savez(
            file, top_ids=np.concatenate(top_ids), top_log_probabilities=np.concatenate(top_logs)
        )


@torch.inference_mode()
def _thought(
    target: Target, prompt: npt.NDArray[np.int32], answer: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Return the top logits at each token of the answer, and the states of all tokens."""
    cache, decoder = target.cache, target.decoder
    token_ids = [*prompt.tolist(), *answer.tolist()]
    hidden = target.read(token_ids)
    logits = decoder.logits(hidden[len(prompt) - 1 : -1])
    top = logits.topk(TOP_LOGITS, dim=-1)
    logs = top.values - logits.logsumexp(dim=-1, keepdim=True)
    features = torch.empty(0) if cache.features is None else cache.features[: len(token_ids)]
    return (
        top.indices.to(torch.int32).cpu().numpy(),
        logs.to(torch.float16).cpu().numpy(),
        features.to(torch.float16).cpu().numpy().copy(),
    )


def _thoughts(text: Path) -> Path:
    return text.with_name(text.name.replace("text-", "top-"))


def _features(text: Path) -> Path:
    return text.with_name(text.name.replace("text-", "features-")).with_suffix(".npy")
