"""A draft over the target's own hidden states, after EAGLE (Li et al., 2024)."""

from collections.abc import Sequence

import torch

from memspec_core.models.decoder import FeatureDecoder
from memspec_core.models.draft import FEATURE
from memspec_core.models.kv_cache import KeyValueCache, common_length
from memspec_core.speculation.model_draft import CATCH_UP_ROWS, ModelDraft
from memspec_core.speculation.proposal import Proposal
from memspec_core.speculation.sampling import Sampler
from memspec_core.speculation.tree import TreeShaped


class FeatureDraft(ModelDraft):
    """A draft (`kind` "feature") that starts from what the target's cache holds of the context.

    Its row i takes the context's token i + 1 and the target's features of position i: see
    `FeatureDecoder`. Between calls its cache holds rows with exact features only. Where the target
    has not been fed all of the context but its newest token, nothing is proposed.
    """

    kind = FEATURE
    stops = True
    """Whether it can leave out what is too unlikely."""

    def __init__(
        self,
        name: str,
        decoder: FeatureDecoder,
        cache: KeyValueCache,
        vocabulary_size: int,
        target_cache: KeyValueCache,
    ) -> None:
        if target_cache.features is None:
            raise ValueError("the target's cache keeps no features")
        super().__init__(name, decoder, cache, vocabulary_size)
        self._decoder = decoder
        self._target_cache = target_cache
        self._features = target_cache.features
        self._first_token: int | None = None

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        """Propose up to `length` tokens after the context; none where it cannot."""
        if sampler.greedy:
            return self.propose_likely(context, length, 0.0, 0.0)
        try:
            return super().propose(context, length, sampler)
        finally:
            self._forget_proposals(context)

    def propose_likely(
        self, context: Sequence[int], length: int, least: float, worth: float
    ) -> Proposal:
        """Propose greedily; `least` and `worth` are those of `FeatureDecoder.roll`."""
        length = min(length, self._room(context))
        if length <= 0:
            return Proposal()
        unseen = self._fed_but_last_rows(context)
        try:
            found = self._decoder.roll(unseen, self._features, self._cache, length, least, worth)
            return Proposal(tuple(found), steps=self._cache.length - len(context) + 2)
        finally:
            self._forget_proposals(context)

    def read(self, context: Sequence[int]) -> None:
        """Feed all of the context but its last token, as far as there are features and room."""
        known = self._known_features(context)
        self._keep_common(context[:-1])
        self._feed(context[1 : min(len(context) - 1, known + 1, self._cache.capacity + 1)])

    def known(self, context: Sequence[int]) -> int:
        """Return how many of the context's first tokens its rows are of, the first one included."""
        if not self._cache.length or not context or context[0] != self._first_token:
            return 0
        return 1 + common_length(self._cache.token_ids, context[1:])

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens of the context."""
        self._cache.truncate(max(0, length - 1))

    def _forget_proposals(self, context: Sequence[int]) -> None:
        """Forget rows that come from the draft's own states, not from the target's."""
        self._cache.truncate(max(0, len(context) - 1))

    def _room(self, context: Sequence[int]) -> int:
        self._keep_common(context[:-1])
        known = self._known_features(context)
        if known == 0 or known < len(context) - 1:
            return 0
        return self._cache.capacity - len(context) + 2

    def _catch_up(self, context: Sequence[int]) -> torch.Tensor:
        unseen = self._fed_but_last_rows(context)
        return self._decoder.feed(unseen, self._features, self._cache)[-1:]

    def _follow(
        self, token_ids: list[int], states: torch.Tensor, parents: Sequence[int] | None = None
    ) -> torch.Tensor:
        return self._decoder.follow(token_ids, states, self._cache, parents)

    def _known_features(self, context: Sequence[int]) -> int:
        """Return for how many of the context's tokens but the newest there are features."""
        return common_length(self._target_cache.token_ids, context[:-1])

    def _keep_common(self, known: Sequence[int]) -> None:
        """Forget the rows that are not of a context which begins with these tokens."""
        first = known[0] if known else None
        if first != self._first_token:  # which no row holds, but on which all of them depend
            self._cache.truncate(0)
            self._first_token = first
        self._cache.keep_common(known[1:])

    def _fed_but_last_rows(self, context: Sequence[int]) -> Sequence[int]:
        """Feed all but the last pass of the context; return the tokens of that."""
        self._feed(context[1 : max(1, len(context) - CATCH_UP_ROWS)])
        return context[self._cache.length + 1 :]

    def _feed_part(self, token_ids: Sequence[int]) -> None:
        self._decoder.feed(token_ids, self._features, self._cache)


class FeatureTreeDraft(TreeShaped, FeatureDraft):
    """A feature draft that proposes trees; each row starts from its parent's."""

    stops = False
