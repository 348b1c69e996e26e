"""The answer so far: which verified tokens it keeps, and when it ends."""

from collections.abc import Callable, Sequence

from memspec_core.models.text import Piece, TextStream
from memspec_core.request import FinishReason


class Answer:
    """Takes verified tokens one by one and cuts at the first that ends the answer.

    An end-of-sequence token ends it and is no part of it; so does a stop string, which wins
    over the length limit that the same token reaches.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        stop: tuple[str, ...],
        end_of_sequence_ids: frozenset[int],
        max_tokens: int,
    ) -> None:
        self._stream = TextStream(decode, stop)
        self._ends = end_of_sequence_ids
        self._max_tokens = max_tokens
        self.finish_reason: FinishReason | None = None

    @property
    def generated_tokens(self) -> int:
        """How many tokens the answer has; a stop string's own are taken off again."""
        return self._stream.token_count

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens the length limit allows."""
        return self._max_tokens - self.generated_tokens

    def extend(self, token_ids: Sequence[int]) -> int:
        """Take the tokens of one iteration; return how many of them came before the end.

        The tokens that complete a stop string count here, though they are no part of the answer.
        """
        kept = 0
        for token in token_ids:
            if token in self._ends:
                self.finish_reason = FinishReason.END_OF_SEQUENCE
                break
            kept += 1
            if self._stream.push(token):
                self.finish_reason = FinishReason.STOP_STRING
                break
            if self.remaining_tokens <= 0:
                self.finish_reason = FinishReason.LENGTH
                break
        return kept

    def take(self) -> Piece:
        """Hand out what became final; everything that is left once the answer has ended."""
        return self._stream.take() if self.finish_reason is None else self.rest()

    def rest(self) -> Piece:
        """Hand out everything that was held back."""
        return self._stream.finish()
