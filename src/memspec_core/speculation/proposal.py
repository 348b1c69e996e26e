"""What a draft proposes, and what any draft must be able to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memspec_core.speculation.sampling import Sampler


@dataclass(frozen=True)
class Proposal:
    """A chain of proposed tokens.

    `probabilities` [n, target vocabulary]: the distribution each token was drawn from; None where
    the draft had no choice: it decodes greedily, or looks its proposals up. `matched` says how
    sure a lookup is: how many tokens of the context's end it found earlier; 0 for models.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: torch.Tensor | None = None
    matched: int = 0

    def cut(self, length: int) -> "Proposal":
        """Return the first `length` tokens."""
        probabilities = None if self.probabilities is None else self.probabilities[:length]
        return Proposal(self.token_ids[:length], probabilities, self.matched)


class Draft(Protocol):
    """What proposes: a resident model with a KV cache of its own, or a lookup.

    It is given the whole context each time and takes in only what it has not seen.
    """

    name: str
    kind: str

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        """Propose up to `length` tokens after the context; fewer, or none, where it cannot."""
        ...

    def read(self, context: Sequence[int]) -> None:
        """Take the context in ahead of the first proposal."""
        ...

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens of the context."""
        ...
