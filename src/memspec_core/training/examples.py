"""Cached continuations as training examples, and how batches are made of them."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from memspec_core.training.continuations import Continuation

_HEAD_BLOCK = 16

DISTRIBUTION = "distribution"
TOKENS = "tokens"
"""What a draft is trained towards: see `fitting.FitPlan`."""

Batch = dict[str, torch.Tensor]


def head_tokens(
    continuations: Sequence[Continuation], count: int, vocabulary_size: int
) -> torch.Tensor:
    """Return the tokens that a draft's head covers [m], in ascending order.

    The most frequent of prompts and answers come first; then the lowest, since a tokenizer's
    vocabulary begins with the most frequent. m is `count`, or what there is, cut to the multiple of
    16 that the 4-bit kernel takes.
    """
    counts: Counter[int] = Counter()
    for continuation in continuations:
        counts.update(continuation.token_ids.tolist())
        counts.update(continuation.prompt_ids.tolist())
    kept = min(count, vocabulary_size)
    kept -= kept % _HEAD_BLOCK if kept >= _HEAD_BLOCK else 0
    ranked = dict.fromkeys([*(token for token, _ in counts.most_common()), *range(vocabulary_size)])
    return torch.tensor(sorted(islice(ranked, kept)))


class Example(TypedDict):
    """One continuation with its tokens; Trainer groups by their number."""

    input_ids: npt.NDArray[np.int32]
    continuation: Continuation


class Examples(torch.utils.data.Dataset[Example]):
    """A data set of continuations, as transformers' Trainer takes it."""

    def __init__(self, continuations: Sequence[Continuation]) -> None:
        self._continuations = continuations

    def __len__(self) -> int:
        """Return how many continuations there are."""
        return len(self._continuations)

    def __getitem__(self, index: int) -> Example:
        """Return one continuation."""
        continuation = self._continuations[index]
        tokens = np.concatenate((continuation.prompt_ids, continuation.token_ids))
        return {"input_ids": tokens, "continuation": continuation}


class Collator:
    """Makes batches of continuations, with the target's top tokens as outputs of a draft's head."""

    def __init__(
        self, head_token_ids: torch.Tensor, vocabulary_size: int, towards: str = DISTRIBUTION
    ) -> None:
        self._counted = 1 if towards == TOKENS else None
        self._output_of = np.full(vocabulary_size, -1, dtype=np.int64)
        self._output_of[head_token_ids.cpu().numpy()] = np.arange(len(head_token_ids))

    def __call__(self, batch: Sequence[Example]) -> Batch:
        """Return the arguments of the model's forward."""
        raise NotImplementedError

    def _top(self, batch: Sequence[Example]) -> Batch:
        continuations = [example["continuation"] for example in batch]
        top = slice(self._counted)
        logs = np.concatenate([c.top_log_probabilities[:, top] for c in continuations])
        index = self._output_of[np.concatenate([c.top_ids[:, top] for c in continuations])]
        return {
            "top_index": torch.from_numpy(index),
            "top_probability": torch.from_numpy(np.exp(logs.astype(np.float32))),
        }


class PaddedCollator(Collator):
    """Batches of `TruncatedDraft`: sequences side by side."""

    def __call__(self, batch: Sequence[Example]) -> Batch:
        """Return the arguments of `TruncatedDraft.forward`."""
        # The last token is predicted but never read.
        sequences = [example["input_ids"][:-1] for example in batch]
        length = max(map(len, sequences))
        input_ids = np.zeros((len(batch), length), dtype=np.int64)
        mask = np.zeros((len(batch), length), dtype=np.int64)
        rows = []
        for index, (example, sequence) in enumerate(zip(batch, sequences, strict=True)):
            input_ids[index, : len(sequence)] = sequence
            mask[index, : len(sequence)] = 1
            first = len(example["continuation"].prompt_ids) - 1
            rows.append(index * length + np.arange(first, len(sequence)))
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(mask),
            "rows": torch.from_numpy(np.concatenate(rows)),
            **self._top(batch),
        }


class PackedCollator(Collator):
    """Batches of `FeatureDraft`: sequences one after the other."""

    def __call__(self, batch: Sequence[Example]) -> Batch:
        """Return the arguments of `FeatureDraft.forward`."""
        features = [example["continuation"].features for example in batch]
        prompts = [len(example["continuation"].prompt_ids) for example in batch]
        tokens = np.concatenate([example["input_ids"] for example in batch]).astype(np.int64)
        return {
            "token_ids": torch.from_numpy(tokens),
            "features": torch.from_numpy(np.concatenate([f for f in features if f is not None])),
            "lengths": torch.tensor([len(example["input_ids"]) for example in batch]),
            "prompt_lengths": torch.tensor(prompts),
            **self._top(batch),
        }
