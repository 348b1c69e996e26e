"""What a draft proposes, and what any draft must be able to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memspec_core.speculation.sampling import Sampler


@dataclass(frozen=True)
class Proposal:
    """Proposed tokens: a chain, or a tree where there are `parents`.

    `parents` [n]: for each token of a tree the place of the one that it follows, -1 for the
    context; parents come before their children, and no two children of one are the same token.
    `probabilities` [n, target vocabulary]: the distribution each token was drawn from; None where
    the draft had no choice: it decodes greedily, or looks its proposals up. `matched` says how
    sure a lookup is: how many tokens of the context's end it found earlier; 0 for models. `steps`
    that a draft took which stops by itself; 0 for others, which take one for each token.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: torch.Tensor | None = None
    matched: int = 0
    parents: tuple[int, ...] | None = None
    steps: int = 0

    def cut(self, length: int) -> "Proposal":
        """Return the first `length` tokens."""
        probabilities = None if self.probabilities is None else self.probabilities[:length]
        parents = None if self.parents is None else self.parents[:length]
        return Proposal(self.token_ids[:length], probabilities, self.matched, parents)


class Draft(Protocol):
    """What proposes: a resident model with a KV cache of its own, or a lookup.

    It is given the whole context each time and takes in only what it has not seen.
    """

    name: str
    kind: str

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        """Propose up to `length` tokens after the context; fewer, or none, where it cannot.

        The number is that of all tokens, of a tree's as well.
        """
        ...

    def read(self, context: Sequence[int]) -> None:
        """Take the context in ahead of the first proposal."""
        ...

    def known(self, context: Sequence[int]) -> int:
        """Return how many of the context's first tokens it has taken in."""
        ...

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens of the context."""
        ...
