"""What a draft proposes, and what any draft must be able to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memspec_core.speculation.sampling import Sampler


@dataclass(frozen=True)
class Proposal:
    """A chain of proposed tokens.

    `probabilities` [n, target vocabulary]: the distribution each token was drawn from; None if
    greedy.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: torch.Tensor | None = None


class Draft(Protocol):
    """A resident draft model with a KV cache of its own.

    It is given the whole context each time and feeds itself only what it has not seen.
    """

    name: str
    kind: str

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        """Propose up to `length` tokens after the context; fewer where its own context ends."""
        ...

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens of the context."""
        ...
