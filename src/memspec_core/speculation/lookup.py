"""A draft without weights: what followed the same tokens earlier in the context."""

from collections.abc import Sequence

from memspec_core.models.kv_cache import common_length
from memspec_core.request import LOOKUP
from memspec_core.speculation.proposal import Proposal
from memspec_core.speculation.sampling import Sampler

MANY_TOKENS = 32
"""New tokens that are indexed at once, as those of a prompt."""


class NgramLookup:
    """Proposes what followed the latest earlier occurrence of the context's last tokens.

    Prompt lookup decoding (Saxena, 2023; Yang et al., "Inference with Reference", 2023). The
    longest n-gram from `longest` down to `shortest` tokens that occurred before wins; where none
    did, nothing is proposed. There is nothing to load, and each token is indexed once.

    Proposing one token at a time on answers of the embedded target (2,600 tokens, six domains),
    24 % were accepted where one token matched, 56 % for two, 70 % for three, 85 % for four or
    more, and 88 % for eight or more: hence the sizes.
    """

    name = LOOKUP
    kind = LOOKUP

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens cannot be looked up")
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        # Where the latest occurrence of each n-gram ends, if a token follows it there; and for
        # each token behind those that were indexed at once, which entries it replaced, so that
        # rolling back brings them back.
        self._latest: dict[tuple[int, ...], int] = {}
        self._at_once = 0
        self._replaced: list[tuple[int | None, ...]] = []

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        """Propose up to `length` tokens after the context; none where nothing matches.

        They are certain whatever the sampler, so that they come without probabilities.
        """
        self._catch_up(context)
        if length <= 0:
            return Proposal()
        for ngram in self._ngrams():
            end = self._latest.get(ngram)
            if end is not None:
                return Proposal(tuple(self._tokens[end : end + length]), matched=len(ngram))
        return Proposal()

    def read(self, context: Sequence[int]) -> None:
        """Take in the context."""
        self._catch_up(context)

    def known(self, context: Sequence[int]) -> int:
        """Return how many of the context's first tokens are taken in."""
        return common_length(self._tokens, context)

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens of the context."""
        if length < self._at_once:
            self._index(self._tokens[:length])
        while len(self._tokens) > length:
            self._tokens.pop()
            for ngram, earlier in zip(self._ngrams(), self._replaced.pop(), strict=True):
                if earlier is None:
                    del self._latest[ngram]
                else:
                    self._latest[ngram] = earlier

    def _catch_up(self, context: Sequence[int]) -> None:
        """Take in what is new; a context that goes on differently is unlearned to the fork."""
        known = self.known(context)
        if known < self._at_once or len(context) - known > MANY_TOKENS:
            self._index(context)
            return
        self.rollback(known)
        for token in context[known:]:
            self._append(token)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Take in these tokens alone, all at once, which takes a third of one after the other."""
        self._tokens, self._replaced, self._latest = list(token_ids), [], {}
        self._at_once = len(self._tokens)
        for size in self._sizes:
            ngrams = zip(*(self._tokens[first:] for first in range(size)), strict=False)
            ends = range(size, self._at_once)
            self._latest.update(zip(ngrams, ends, strict=False))

    def _append(self, token: int) -> None:
        ngrams = self._ngrams()
        self._replaced.append(tuple(self._latest.get(ngram) for ngram in ngrams))
        self._latest.update(dict.fromkeys(ngrams, len(self._tokens)))
        self._tokens.append(token)

    def _ngrams(self) -> list[tuple[int, ...]]:
        """Return the n-grams that the tokens end with, the longest first."""
        tokens = self._tokens
        return [tuple(tokens[-size:]) for size in self._sizes if size <= len(tokens)]
