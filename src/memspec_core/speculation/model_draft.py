"""What drafts with weights of their own have in common: rows in a cache, and choices from logits.

The newest hidden row leads to the next token, and that token to the next row: how, tells a kind of
draft from another.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from memspec_core.models.decoder import Layers
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.speculation.proposal import Proposal
from memspec_core.speculation.sampling import Sampler

CATCH_UP_ROWS = 512
"""Rows of the context in one pass."""


class ModelDraft(ABC):
    """A draft that proposes chains from a model with a KV cache.

    `vocabulary_size` is the target's: tokens beyond it are never proposed.
    """

    def __init__(
        self, name: str, layers: Layers, cache: KeyValueCache, vocabulary_size: int
    ) -> None:
        self.name = name
        self._layers = layers
        self._cache = cache
        self._vocabulary_size = vocabulary_size

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        """Propose up to `length` tokens after the context; none where it cannot."""
        length = min(length, self._room(context))
        if length <= 0:
            return Proposal()
        token_ids: list[int] = []
        probabilities: list[torch.Tensor] = []
        hidden = self._catch_up(context)
        while True:
            logits = self._logits(hidden)[0]
            if sampler.greedy:
                token_ids.append(self._token(int(logits.argmax())))
            else:
                chosen, full = self._draw(logits, sampler)
                token_ids.append(chosen)
                probabilities.append(full)
            if len(token_ids) == length:
                break
            hidden = self._follow([token_ids[-1]], hidden)
        return Proposal(tuple(token_ids), torch.stack(probabilities) if probabilities else None)

    @abstractmethod
    def _room(self, context: Sequence[int]) -> int:
        """Forget what is not of the context; return how many tokens can be proposed after it."""

    @abstractmethod
    def _catch_up(self, context: Sequence[int]) -> torch.Tensor:
        """Feed what the cache has not seen; return the hidden row [1, hidden] of the newest."""

    @abstractmethod
    def _follow(
        self, token_ids: list[int], states: torch.Tensor, parents: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Feed proposed tokens; return their hidden rows [n, hidden].

        `states` [n, hidden] are the rows that proposed them; `parents` as in `Decoder.forward`.
        """

    @abstractmethod
    def _feed_part(self, token_ids: Sequence[int]) -> None:
        """Feed tokens of the context in one pass."""

    def _feed(self, token_ids: Sequence[int]) -> None:
        """Feed what the cache has not seen of these tokens, with which it agrees so far."""
        for first in range(self._cache.length, len(token_ids), CATCH_UP_ROWS):
            self._feed_part(list(token_ids[first : first + CATCH_UP_ROWS]))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, m] of tokens that the target has too."""
        logits = self._layers.logits(hidden)
        return (
            logits
            if self._layers.head_token_ids is not None
            else (logits[:, : self._vocabulary_size])
        )

    def _token(self, index: int) -> int:
        ids = self._layers.head_token_ids
        return index if ids is None else int(ids[index])

    def _draw(self, logits: torch.Tensor, sampler: Sampler) -> tuple[int, torch.Tensor]:
        """Draw a token; return it with its distribution over the target's vocabulary."""
        probabilities = sampler.distribution(logits[None])[0]
        chosen = self._token(sampler.draw(probabilities))
        full = probabilities.new_zeros(self._vocabulary_size)
        ids = self._layers.head_token_ids
        if ids is None:
            full[: probabilities.shape[0]] = probabilities
        else:
            full[ids] = probabilities
        return chosen, full
