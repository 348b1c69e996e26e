"""A draft that is a small causal model of its own, proposing a chain of tokens."""

from collections.abc import Sequence

import torch

from memspec_core.models.decoder import Decoder
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.speculation.proposal import Proposal
from memspec_core.speculation.sampling import Sampler

_CATCH_UP_ROWS = 512


class IndependentDraft:
    """A causal draft (`kind` "independent") with its decoder and KV cache.

    `vocabulary_size` is the target's: tokens beyond it are never proposed.
    """

    kind = "independent"

    def __init__(
        self, name: str, decoder: Decoder, cache: KeyValueCache, vocabulary_size: int
    ) -> None:
        self.name = name
        self._decoder = decoder
        self._cache = cache
        self._vocabulary_size = vocabulary_size

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        """Propose up to `length` tokens after the context; none where the cache is full."""
        self._cache.keep_common(context[:-1])
        length = min(length, self._cache.capacity - len(context) + 1)
        if length <= 0:
            return Proposal()
        logits = self._catch_up(context)
        token_ids: list[int] = []
        probabilities: list[torch.Tensor] = []
        while True:
            if sampler.greedy:
                token_ids.append(self._token(int(logits.argmax())))
            else:
                chosen, full = self._draw(logits, sampler)
                token_ids.append(chosen)
                probabilities.append(full)
            if len(token_ids) == length:
                break
            logits = self._next_logits([token_ids[-1]])
        return Proposal(tuple(token_ids), torch.stack(probabilities) if probabilities else None)

    def read(self, context: Sequence[int]) -> None:
        """Feed all of the context but its last token, as far as there is room."""
        known = context[: min(len(context) - 1, self._cache.capacity)]
        self._cache.keep_common(known)
        self._feed(known)

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens of the context."""
        self._cache.truncate(length)

    def _catch_up(self, context: Sequence[int]) -> torch.Tensor:
        """Feed what the cache has not seen; return the logits after the context [m]."""
        self._feed(context[: len(context) - _CATCH_UP_ROWS])
        return self._next_logits(list(context[self._cache.length :]))

    def _feed(self, token_ids: Sequence[int]) -> None:
        """Feed what the cache has not seen of these tokens, with which it agrees so far."""
        for first in range(self._cache.length, len(token_ids), _CATCH_UP_ROWS):
            self._decoder.forward(list(token_ids[first : first + _CATCH_UP_ROWS]), self._cache)

    def _next_logits(self, token_ids: list[int]) -> torch.Tensor:
        hidden = self._decoder.forward(token_ids, self._cache)
        return self._logits(hidden[-1:])[0]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, m] of tokens that the target has too."""
        logits = self._decoder.logits(hidden)
        return (
            logits
            if self._decoder.head_token_ids is not None
            else (logits[:, : self._vocabulary_size])
        )

    def _token(self, index: int) -> int:
        ids = self._decoder.head_token_ids
        return index if ids is None else int(ids[index])

    def _draw(self, logits: torch.Tensor, sampler: Sampler) -> tuple[int, torch.Tensor]:
        """Draw a token; return it with its distribution over the target's vocabulary."""
        probabilities = sampler.distribution(logits[None])[0]
        chosen = self._token(sampler.draw(probabilities))
        full = probabilities.new_zeros(self._vocabulary_size)
        ids = self._decoder.head_token_ids
        if ids is None:
            full[: probabilities.shape[0]] = probabilities
        else:
            full[ids] = probabilities
        return chosen, full
