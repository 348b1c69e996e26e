"""What decoding shows about drafts, on top of what was predicted.

For each draft d, with proposals taken one by one until the first wrong one:

    ease       = (c + sum of h) / (c + sum of prior · n)
    estimate_d = (s · ease · prior_d + h_d) / (s + n_d)
    score_d    = (1 - estimate_d^(length + 1)) / (1 - estimate_d)

prior_d is the acceptance that the predictor makes one expect here, s how many proposals that is
worth; n_d counts the proposals of d that were judged, h_d those that were right; at each scheduling
point both shrink to `discount` of what they were, since the topic moves on. The score is the
tokens that an iteration of `length` proposals is expected to give (Leviathan et al., 2023), the
target's own token included.

A draft that was not seen keeps its prior, but for the ease of the text: what is harder for the
drafts that ran than was expected of them is harder for the others too. Otherwise these would look
better only because they were not seen.
"""

from collections.abc import Iterable, Mapping, Sequence

PRIOR_STRENGTH = 64.0
"""Proposals that a prediction is worth; a draft that always runs comes to some 80 judged ones."""

COMMON_STRENGTH = 8.0
"""c: right proposals that the expected ease is worth."""

DISCOUNT = 0.9


class ObservedAcceptance:
    """Estimates each draft's acceptance within one generation."""

    def __init__(
        self,
        drafts: Iterable[str],
        length: int,
        prior_strength: float = PRIOR_STRENGTH,
        discount: float = DISCOUNT,
    ) -> None:
        self._length = length
        self._strength = prior_strength
        self._discount = discount
        self._right = dict.fromkeys(drafts, 0.0)
        self._judged = dict.fromkeys(self._right, 0.0)
        self._priors: Mapping[str, float] = {}
        self._common = [0.0, 0.0]  # right proposals, and those that were expected to be

    def saw(self, draft: str, proposed: int, accepted: int) -> None:
        """Count an iteration, or what a resident draft that did not run would have got right.

        The proposal after the last accepted one was judged too; those behind it were not.
        Names that are not among the drafts are no concern of this.
        """
        if draft in self._right:
            judged = min(accepted + 1, proposed)
            self._right[draft] += accepted
            self._judged[draft] += judged
            if draft in self._priors:
                self._common[0] += accepted
                self._common[1] += self._priors[draft] * judged

    def next_interval(self) -> None:
        """Let what was seen count less from here on."""
        for counts in (self._right, self._judged):
            for draft in counts:
                counts[draft] *= self._discount
        self._common = [value * self._discount for value in self._common]

    @property
    def ease(self) -> float:
        """How much more often proposals are right here than was expected."""
        right, expected = self._common
        return (COMMON_STRENGTH + right) / (COMMON_STRENGTH + expected)

    def estimate(self, draft: str, prior: float) -> float:
        """Return a draft's acceptance, between 0 and 1 as the prior is."""
        weighed = self._strength * min(1.0, self.ease * prior) + self._right[draft]
        total = self._strength + self._judged[draft]
        return weighed / total if total else min(1.0, self.ease * prior)

    def tokens(self, draft: str, priors: Sequence[float]) -> list[float]:
        """Return the tokens to expect of an iteration with a draft, for priors [k] of k topics."""
        return [expected_tokens(self.estimate(draft, prior), self._length) for prior in priors]

    def scores(self, priors: Mapping[str, float]) -> dict[str, float]:
        """Return the tokens to expect of an iteration with each draft, and keep the priors."""
        self._priors = priors
        return {
            draft: expected_tokens(self.estimate(draft, prior), self._length)
            for draft, prior in priors.items()
        }


def expected_tokens(acceptance: float, length: int) -> float:
    """Return the tokens an iteration of a chain gives, where each proposal is right as often."""
    return sum(acceptance**count for count in range(length + 1))
