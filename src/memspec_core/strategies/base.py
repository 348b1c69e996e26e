"""What a strategy sees and what it gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from memspec_core.iteration import Iteration
from memspec_core.prediction.context import Vector


@dataclass(frozen=True)
class Context:
    """x at a scheduling point: the prompt, and from the second on the recent generated tokens.

    `place`: tokens of the answer so far. `prompt_state` [hidden] is the mean of the target's states
    at the prompt's end, `recent_state` [hidden] that of the recent tokens without the newest, as
    `prediction.context` has them; None where there are none, or the strategy reads none.
    """

    prompt_ids: Sequence[int]
    recent_ids: Sequence[int] = ()
    place: int = 0
    prompt_state: Vector | None = None
    recent_state: Vector | None = None


@dataclass(frozen=True)
class Outlook:
    """What may come: topic k with a probability, and the tokens an iteration with each draft then.

    `probabilities` [k]; `tokens_with` returns those of a draft [k].
    """

    probabilities: Sequence[float]
    tokens_with: Callable[[str], Sequence[float]]

    def gain(self, draft: str, beside: str) -> float:
        """Return the tokens an iteration that a draft adds where it is the better of two."""
        topics = zip(
            self.probabilities, self.tokens_with(draft), self.tokens_with(beside), strict=True
        )
        return sum(probability * max(0.0, own - other) for probability, own, other in topics)


@dataclass(frozen=True)
class Ranking:
    """R: drafts by falling score; drafts that the strategy does not want are left out.

    With an `outlook` the scores are the tokens that an iteration is expected to yield, and may be
    weighed against costs.
    """

    scores: Mapping[str, float]
    outlook: Outlook | None = None

    @cached_property
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
    with the next best draft, or plainly. `waits`: where the best draft is not resident, decoding
    stops until it is. `prepares`: how many of the best drafts are loaded ahead; None for as many as
    there may be (K). `reads_states`: over how many recent positions it reads the target's states,
    0 for none.
    """

    name: str
    insists: bool
    waits: bool
    prepares: int | None
    reads_states: int

    def rank(self, context: Context) -> Ranking:
        """Rank the candidate drafts for a context."""
        ...

    def observe(self, iteration: Iteration) -> None:
        """See what an iteration did."""
        ...
