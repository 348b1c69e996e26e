"""Cached continuations as training examples for a draft's head."""

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from memspec_core.training.continuations import Continuation

_HEAD_BLOCK = 16


def frequent_tokens(continuations: Sequence[Continuation], count: int) -> torch.Tensor:
    """Return the most frequent tokens of the target's text [m], in ascending order.

    m is `count`, or what there is, cut to the multiple of 16 that the 4-bit kernel takes.
    """
    counts: Counter[int] = Counter()
    for continuation in continuations:
        counts.update(continuation.token_ids.tolist())
    kept = min(count, len(counts))
    kept -= kept % _HEAD_BLOCK if kept >= _HEAD_BLOCK else 0
    return torch.tensor(sorted(token for token, _ in counts.most_common(kept)))


class Example(TypedDict):
    """One continuation with the tokens that a draft reads; Trainer groups by their number."""

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
        """Return one continuation; its last token is predicted but never read."""
        continuation = self._continuations[index]
        read = np.concatenate((continuation.prompt_ids, continuation.token_ids[:-1]))
        return {"input_ids": read, "continuation": continuation}


class Collator:
    """Makes a padded batch of continuations, with the target's top tokens as head outputs."""

    def __init__(self, head_token_ids: torch.Tensor, vocabulary_size: int) -> None:
        self._output_of = np.full(vocabulary_size, -1, dtype=np.int64)
        self._output_of[head_token_ids.numpy()] = np.arange(len(head_token_ids))

    def __call__(self, batch: Sequence[Example]) -> dict[str, torch.Tensor]:
        """Return the arguments of `TruncatedDraft.forward`."""
        sequences = [example["input_ids"] for example in batch]
        continuations = [example["continuation"] for example in batch]
        length = max(map(len, sequences))
        input_ids = np.zeros((len(batch), length), dtype=np.int64)
        mask = np.zeros((len(batch), length), dtype=np.int64)
        rows = []
        for index, (continuation, sequence) in enumerate(
            zip(continuations, sequences, strict=True)
        ):
            input_ids[index, : len(sequence)] = sequence
            mask[index, : len(sequence)] = 1
            first = len(continuation.prompt_ids) - 1
            rows.append(index * length + np.arange(first, len(sequence)))
        top_index = self._output_of[np.concatenate([c.top_ids for c in continuations])]
        top_log = np.concatenate([c.top_log_probabilities for c in continuations]).astype(
            np.float32
        )
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(mask),
            "rows": torch.from_numpy(np.concatenate(rows)),
            "top_index": torch.from_numpy(top_index),
            "top_probability": torch.from_numpy(np.exp(top_log)),
        }
