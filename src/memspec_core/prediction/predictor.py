"""The prediction engine (Algorithm 1): scores for drafts, with or without what is observed."""

from dataclasses import dataclass

from memspec_core.prediction.context import Vector
from memspec_core.prediction.head import RankingHead
from memspec_core.prediction.observation import ObservedAcceptance


@dataclass(frozen=True)
class Foresight:
    """Scores of the drafts; with observation also what may come.

    `topics` [k]: the probability of the topic of each draft.
    """

    scores: dict[str, float]
    topics: list[float] | None = None


class Predictor:
    """Scores drafts at the scheduling points of one generation.

    Without `observation`, the paper's form: the head's probabilities. With it, the tokens an
    iteration of `length` proposals is expected to give; see `observation`.
    """

    def __init__(self, head: RankingHead, *, observation: bool, length: int) -> None:
        self._head = head
        self._observed = ObservedAcceptance(head.plan.drafts, length) if observation else None

    def observe(self, draft: str, proposed: int, accepted: int) -> None:
        """See what became of a draft's proposals."""
        if self._observed is not None:
            self._observed.saw(draft, proposed, accepted)

    def scores(self, vector: Vector) -> dict[str, float]:
        """Score every draft at a scheduling point; raises `PredictorError` for a wrong input."""
        return self.foresee(vector).scores

    def foresee(self, vector: Vector) -> Foresight:
        """Score every draft, and say what else may come; raises as `scores` does."""
        drafts = self._head.plan.drafts
        probabilities = self._head.probabilities(vector)
        if self._observed is None:
            return Foresight(dict(zip(drafts, probabilities, strict=True)))
        self._observed.next_interval()
        scores = self._observed.scores(self._head.expected_acceptance(probabilities))
        return Foresight(scores, probabilities)

    def tokens_with(self, draft: str) -> list[float]:
        """Return the tokens to expect of an iteration with a draft under each topic [k].

        Plain decoding's one token for a draft that the head does not know.
        """
        priors = self._head.priors.get(draft)
        if priors is None or self._observed is None:
            return [1.0] * len(self._head.priors)
        return self._observed.tokens(draft, priors)
