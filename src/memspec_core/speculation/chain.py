"""A draft that is a small causal model of its own."""

from collections.abc import Sequence

import torch

from memspec_core.models.decoder import Decoder
from memspec_core.models.draft import INDEPENDENT
from memspec_core.models.kv_cache import KeyValueCache, common_length
from memspec_core.speculation.model_draft import CATCH_UP_ROWS, ModelDraft


class IndependentDraft(ModelDraft):
    """A causal draft (`kind` "independent") with its decoder and KV cache, proposing chains."""

    kind = INDEPENDENT

    def __init__(
        self, name: str, decoder: Decoder, cache: KeyValueCache, vocabulary_size: int
    ) -> None:
        super().__init__(name, decoder, cache, vocabulary_size)
        self._decoder = decoder

    def read(self, context: Sequence[int]) -> None:
        """Feed all of the context but its last token, as far as there is room."""
        known = context[: min(len(context) - 1, self._cache.capacity)]
        self._cache.keep_common(known)
        self._feed(known)

    def known(self, context: Sequence[int]) -> int:
        """Return how many of the context's first tokens have rows."""
        return common_length(self._cache.token_ids, context)

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens of the context."""
        self._cache.truncate(length)

    def _room(self, context: Sequence[int]) -> int:
        self._cache.keep_common(context[:-1])
        return self._cache.capacity - len(context) + 1

    def _catch_up(self, context: Sequence[int]) -> torch.Tensor:
        self._feed(context[: len(context) - CATCH_UP_ROWS])
        return self._decoder.forward(context[self._cache.length :], self._cache)[-1:]

    def _follow(
        self, token_ids: list[int], states: torch.Tensor, parents: Sequence[int] | None = None
    ) -> torch.Tensor:
        return self._decoder.forward(token_ids, self._cache, parents)

    def _feed_part(self, token_ids: Sequence[int]) -> None:
        self._decoder.forward(token_ids, self._cache)
