"""Generated tokens as text that only ever grows by whole characters, cut at stop strings."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_TOKENS_OF_A_CHARACTER = 16


@dataclass(frozen=True)
class Piece:
    """What became final: text and the tokens that it was decoded from."""

    text: str
    token_ids: tuple[int, ...]


class TextStream:
    """Collects tokens and hands out what is final.

    A token is held back while its text is not whole UTF-8 characters, or while the end of the
    text may be the beginning of a stop string. After `stopped` nothing more is taken.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: tuple[str, ...] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._text = ""
        self._ids: list[int] = []
        # Length of the text once token i is whole; tokens of one character share it.
        self._ends: list[int] = []
        self._decoded = 0
        self._context = 0
        self._given_tokens = 0
        self._given_characters = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text that has been handed out."""
        return self._text[: self._given_characters]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that have been handed out."""
        return tuple(self._ids[: self._given_tokens])

    @property
    def token_count(self) -> int:
        """How many tokens the text has, those held back included."""
        return len(self._ids)

    def push(self, token_id: int) -> bool:
        """Take one token; return whether a stop string is now complete."""
        self._ids.append(token_id)
        fresh, whole = self._fresh_text()
        searched_from = max(0, len(self._text) - self._longest_stop())
        text = self._text + fresh
        found = [at for s in self._stop if (at := text.find(s, searched_from)) >= 0]
        if whole or found:
            self._extend(text)
        if found:
            self._cut(min(found))
        return self.stopped

    def take(self) -> Piece:
        """Hand out what has become final since the last call."""
        if self.stopped:
            return self.finish()
        settled = self._settled()
        tokens = bisect_right(self._ends, settled)
        return self._give(tokens, self._ends[tokens - 1] if tokens else 0)

    def finish(self) -> Piece:
        """Hand out the rest: every token, and every whole character of their text."""
        if self._decoded < len(self._ids) and not self.stopped:
            self._extend(self._text + self._fresh_text()[0])
        return self._give(len(self._ids), len(self._text))

    def _fresh_text(self) -> tuple[str, bool]:
        """Decode what is new in the context of the tokens just before.

        Returns its whole characters, and whether that is all of it.
        """
        before = self._decode(self._ids[self._context : self._decoded])
        fresh = self._decode(self._ids[self._context :])[len(before) :]
        waiting = len(self._ids) - self._decoded
        if fresh.endswith(_INCOMPLETE) and waiting < _MAX_TOKENS_OF_A_CHARACTER:
            return fresh.rstrip(_INCOMPLETE), False
        self._context, self._decoded = self._decoded, len(self._ids)
        return fresh, True

    def _extend(self, text: str) -> None:
        """Take over the text of all tokens so far."""
        self._text = text
        self._ends.extend([len(text)] * (len(self._ids) - len(self._ends)))

    def _cut(self, length: int) -> None:
        """Drop the stop string; keep the tokens up to the one that completes what is left."""
        self._text = self._text[:length]
        kept = bisect_right(self._ends, length)
        if length > (self._ends[kept - 1] if kept else 0):
            kept += 1  # the stop string begins inside this token
        del self._ids[kept:], self._ends[kept:]
        self.stopped = True

    def _settled(self) -> int:
        """Return the length of the text that no stop string can still take away."""
        longest = min(self._longest_stop() - 1, len(self._text) - self._given_characters)
        for length in range(longest, 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return len(self._text) - length
        return len(self._text)

    def _give(self, tokens: int, characters: int) -> Piece:
        piece = Piece(
            self._text[self._given_characters : characters],
            tuple(self._ids[self._given_tokens : tokens]),
        )
        self._given_tokens, self._given_characters = tokens, characters
        return piece

    def _longest_stop(self) -> int:
        return max((len(stop) for stop in self._stop), default=0)
