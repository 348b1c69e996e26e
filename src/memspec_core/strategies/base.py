"""What a strategy sees and what it gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from memspec_core.iteration import Iteration


@dataclass(frozen=True)
class Context:
    """x at a scheduling point: the prompt, and from the second on the recent generated tokens."""

    prompt_ids: Sequence[int]
    recent_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Ranking:
    """R: drafts by falling score; drafts that the strategy does not want are left out."""

    scores: Mapping[str, float]

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the drafts, the best first; equal scores keep their order."""
        return tuple(sorted(self.scores, key=lambda name: -self.scores[name]))

    @property
    def best(self) -> str | None:
        """The draft that the strategy wants to run."""
        return next(iter(self.order), None)


class Strategy(Protocol):
    """Ranks drafts at each scheduling point of one generation.

    `insists`: a first draft that cannot be loaded ends the generation; otherwise it decodes on
    with the next best draft, or plainly.
    """

    name: str
    insists: bool

    def rank(self, context: Context) -> Ranking:
        """Rank the candidate drafts for a context."""
        ...

    def observe(self, iteration: Iteration) -> None:
        """See what an iteration did."""
        ...
