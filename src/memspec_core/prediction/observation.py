"""What decoding shows about drafts, on top of what was predicted.

For each draft d, with proposals taken one by one until the first wrong one:

    estimate_d = (s · prior_d + h_d) / (s + n_d)
    score_d    = (1 - estimate_d^(length + 1)) / (1 - estimate_d)

prior_d is the acceptance that the predictor makes one expect here, s how many proposals that is
worth; n_d counts the proposals of d that were judged, h_d those that were right; at each scheduling
point both shrink to `discount` of what they were, since the topic moves on. The score is the
tokens that an iteration of `length` proposals is expected to give (Leviathan et al., 2023), the
target's own token included. A draft that was not seen keeps its prior.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.float64]
Priors = npt.NDArray[np.float32]

PRIOR_STRENGTH = 64.0
"""Proposals that a prediction is worth; a draft that always runs comes to some 80 judged ones."""

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

    def saw(self, draft: str, proposed: int, accepted: int) -> None:
        """Count an iteration, or what a resident draft that did not run would have got right.

        The proposal after the last accepted one was judged too; those behind it were not.
        Names that are not among the drafts are no concern of this.
        """
        if draft in self._right:
            self._right[draft] += accepted
            self._judged[draft] += min(accepted + 1, proposed)

    def next_interval(self) -> None:
        """Let what was seen count less from here on."""
        for counts in (self._right, self._judged):
            for draft in counts:
                counts[draft] *= self._discount

    def estimate(self, draft: str, prior: float) -> float:
        """Return a draft's acceptance, between 0 and 1 as the prior is."""
        weighed = self._strength * prior + self._right[draft]
        total = self._strength + self._judged[draft]
        return weighed / total if total else prior

    def tokens(self, draft: str, priors: Priors) -> Tokens:
        """Return the tokens to expect of an iteration with a draft, for priors [k] of k topics."""
        total = self._strength + self._judged[draft]
        right = self._strength * priors.astype(np.float64) + self._right[draft]
        estimates = right / total if total else priors.astype(np.float64)
        powers = estimates ** np.arange(self._length + 1)[:, None]
        expected: Tokens = powers.sum(axis=0)
        return expected

    def scores(self, priors: Mapping[str, float]) -> dict[str, float]:
        """Return the tokens to expect of an iteration with each draft."""
        return {
            draft: expected_tokens(self.estimate(draft, prior), self._length)
            for draft, prior in priors.items()
        }


def expected_tokens(acceptance: float, length: int) -> float:
    """Return the tokens an iteration of a chain gives, where each proposal is right as often."""
    return sum(acceptance**count for count in range(length + 1))
