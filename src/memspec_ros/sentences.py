"""From a stream of text to whole sentences, as a speech synthesiser wants them."""

import re
from collections import OrderedDict

from memspec_msgs.msg import TokenChunk

MOST_GOALS = 16
"""One goal runs at a time; of more streams than this the oldest has lost its last chunk."""

ABBREVIATIONS = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "st",
        "sr",
        "jr",
        "vs",
        "approx",
        "dept",
        "est",
        "inc",
        "ltd",
        "capt",
        "gen",
        "col",
        "sgt",
        "cf",
        "al",
    ]
)
BEFORE_NUMBERS = frozenset(
    ["no", "nos", "fig", "figs", "eq", "eqs", "sec", "ch", "p", "pp", "vol", "art"]
)
"""These words end with a full stop, but only before a number."""

# Each ends before a character that is no space, so that what follows is known.
_END = re.compile(
    r"""
      (?P<mark>[.!?…]+) [\])}"'”’»*_]* \s+ (?=\S)
    | [。！？]+ [」』）”’]* \s* (?=[^\s。！？」』）”’])
    | [^\S\n]* \n \s* (?=\S)
    """,
    re.VERBOSE,
)
_LETTERS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")


class SentenceCutter:
    """Cuts one text, however it is divided into pieces. The sentences joined are the text.

    A sentence ends after its mark and the space behind it, or at the end of a line. Abbreviations,
    initials, decimals, the numbers of lists, and marks before a small letter end none.
    """

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> list[str]:
        """Take what is new; return the sentences that are whole by now."""
        self._held += text
        sentences = []
        start = 0
        for end in _END.finditer(self._held):
            if self._is_end(start, end):
                sentences.append(self._held[start : end.end()])
                start = end.end()
        self._held = self._held[start:]
        return sentences

    def flush(self) -> list[str]:
        """Return what is left at the end of the text: a sentence, or none."""
        rest, self._held = self._held, ""
        return [rest] if rest else []

    def _is_end(self, start: int, end: re.Match[str]) -> bool:
        before = self._held[start : end.start()]
        if not self._held[start : end.end()].strip():
            return False
        if end["mark"] is None or "\n" in end[0]:
            return True
        following = self._held[end.end()]
        if following.islower():
            return False
        return end["mark"] != "." or not _is_shortened(before, following)


def _is_shortened(before: str, following: str) -> bool:
    """Whether a full stop after `before` belongs to its last word."""
    word = before.rsplit(maxsplit=1)[-1] if before.split() else ""
    word = word.lstrip("([{\"'“‘«*_").lower()
    if word in ABBREVIATIONS or (word in BEFORE_NUMBERS and following.isdigit()):
        return True
    if _LETTERS.fullmatch(word) and word != "i":
        return True
    line = before.rpartition("\n")[2].strip()
    return line.isdigit() and len(line) <= 3


class GoalSentences:
    """Cuts `~/tokens`, where goals may interleave: give it each chunk as it comes."""

    def __init__(self) -> None:
        self._cutters: OrderedDict[bytes, SentenceCutter] = OrderedDict()

    def add(self, chunk: TokenChunk) -> list[str]:
        """Return the sentences that a chunk completes, all that is left where it is the last."""
        goal = bytes(chunk.goal_id.uuid)
        cutter = self._cutters.setdefault(goal, SentenceCutter())
        sentences = cutter.add(chunk.text)
        if chunk.last:
            sentences += cutter.flush()
            del self._cutters[goal]
        elif len(self._cutters) > MOST_GOALS:
            self._cutters.popitem(last=False)
        return sentences
