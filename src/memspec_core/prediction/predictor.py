"""The prediction engine (Algorithm 1): scores for drafts, with or without what is observed."""

from dataclasses import dataclass

from memspec_core.prediction.context import PROMPT, Vector
from memspec_core.prediction.head import RankingHead, softmax
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
        self._head_after_prompt: RankingHead | None = None
        self._observed = ObservedAcceptance(head.plan.drafts, length) if observation else None

    @property
    def positions(self) -> int:
        """How many states count as recent."""
        return self._head.plan.positions

    def observe(self, draft: str, proposed: int, accepted: int) -> None:
        """See what became of a draft's proposals."""
        if self._observed is not None:
            self._observed.saw(draft, proposed, accepted)

    def scores(self, prompt: Vector, recent: Vector | None) -> dict[str, float]:
        """Score every draft at a scheduling point; see `foresee`."""
        return self.foresee(prompt, recent).scores

    def foresee(self, prompt: Vector, recent: Vector | None) -> Foresight:
        """Score every draft, and say what else may come.

        `prompt` [hidden] is that of the generation; where nothing is `recent` [hidden], it stands
        for it. Raises `PredictorError` for what does not fit.
        """
        drafts = self._head.plan.drafts
        probabilities = softmax(self.logits(prompt, recent))
        if self._observed is None:
            return Foresight(dict(zip(drafts, probabilities, strict=True)))
        self._observed.next_interval()
        scores = self._observed.scores(self._head.expected_acceptance(probabilities))
        return Foresight(scores, probabilities)

    def logits(self, prompt: Vector, recent: Vector | None) -> Vector:
        """Return what the probabilities [d] are the softmax of; see `foresee`."""
        if self._head_after_prompt is None:
            self._head_after_prompt = self._head.after(prompt)
        vector = prompt if recent is None or self._head.plan.inputs == PROMPT else recent
        return self._head_after_prompt.logits(vector)

    def tokens_with(self, draft: str) -> list[float]:
        """Return the tokens to expect of an iteration with a draft under each topic [k].

        Plain decoding's one token for a draft that the head does not know.
        """
        priors = self._head.priors.get(draft)
        if priors is None or self._observed is None:
            return [1.0] * len(self._head.priors)
        return self._observed.tokens(draft, priors)
