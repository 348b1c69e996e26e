"""Text that grows by whole characters and is cut at stop strings, with its tokens."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core.tiny import VOCABULARY
from memspec_core.models.text import TextStream
from memspec_core.models.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Characters of one to four bytes, joined ones among them, and ends of words.
ALPHABET = "ab .\n\tеж你好é👍🏽👩‍🚀ñ̃€"
texts = st.text(ALPHABET, max_size=30) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=20
)


def streamed(stream: TextStream, ids: list[int]) -> tuple[list[str], list[int]]:
    """Push tokens until the stream stops; return the pieces of text and all tokens given."""
    pieces, given_ids = [], []
    for token in ids:
        stopped = stream.push(token)
        piece = stream.take()
        pieces.append(piece.text)
        given_ids += piece.token_ids
        if stopped:
            break
    rest = stream.finish()
    assert "".join([*pieces, rest.text]) == stream.text
    assert (*given_ids, *rest.token_ids) == stream.token_ids
    return [*pieces, rest.text], [*given_ids, *rest.token_ids]


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text; a few rare bytes have none, and such texts are passed over."""
    ids = tokenizer.backend.encode(text)
    assume(tokenizer.decode(ids) == text)
    return list(ids)


def expected_cut(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> str:
    """The text before the earliest stop string of those that the first token completes."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count]).rstrip(REPLACEMENT)
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)]
    return tokenizer.decode(ids)


@given(text=texts)
def test_pieces_are_whole_characters_and_add_up(text: str, tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, text)
    pieces, given_ids = streamed(TextStream(tokenizer.decode), ids)
    assert "".join(pieces) == text
    assert given_ids == ids
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, VOCABULARY - 1) | st.integers(0, 300), max_size=40))
def test_any_tokens_at_all(ids: list[int], tokenizer: Tokenizer) -> None:
    pieces, given_ids = streamed(TextStream(tokenizer.decode), ids)
    assert given_ids == ids
    "".join(pieces).encode()


@given(ids=st.lists(st.sampled_from([104, 459, 3351, 10003, 264, 2, 30]), max_size=20))
def test_nothing_that_was_given_changes_later(ids: list[int], tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer.decode)
    seen = [""]
    for token in ids:
        stream.push(token)
        stream.take()
        seen.append(stream.text)
    stream.finish()
    seen.append(stream.text)
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))


@given(text=texts.filter(bool), data=st.data())
def test_stop_strings_cut_text_and_tokens(
    text: str, data: st.DataObject, tokenizer: Tokenizer
) -> None:
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(0, len(text) - 1))
        last = data.draw(st.integers(first + 1, min(len(text), first + 6)))
        stops.append(text[first:last])
    ids = encoded(tokenizer, text)
    pieces, given_ids = streamed(TextStream(tokenizer.decode, tuple(stops)), ids)
    result = "".join(pieces)
    assert result == expected_cut(tokenizer, ids, stops)
    assert not any(stop in result for stop in stops)
    # The tokens are those that the text was decoded from, and no more.
    assert given_ids == ids[: len(given_ids)]
    assert tokenizer.decode(given_ids).startswith(result)
    if given_ids:
        assert len(tokenizer.decode(given_ids[:-1]).rstrip(REPLACEMENT)) < max(1, len(result))


@given(text=texts, stop=st.text(ALPHABET, min_size=1, max_size=4))
def test_a_stop_string_that_does_not_come_changes_nothing(
    text: str, stop: str, tokenizer: Tokenizer
) -> None:
    ids = encoded(tokenizer, text)
    pieces, given_ids = streamed(TextStream(tokenizer.decode, (stop,)), ids)
    if stop not in text:
        assert "".join(pieces) == text
        assert given_ids == ids


@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["one"], ""),  # at the very start
        ("international", ["nation"], "inter"),  # inside a token
        ("one two three", ["three", "two"], "one "),  # the earliest wins
        ("one two three", ["wo th"], "one t"),  # over several tokens
        ("a\n\nb\n\nc", ["\n\n"], "a"),
        ("costs 5 € each", ["€"], "costs 5 "),
        ("aaab", ["aab"], "a"),
        ("no stop here", ["nope"], "no stop here"),
    ],
)
def test_examples_of_stop_strings(
    text: str, stops: list[str], left: str, tokenizer: Tokenizer
) -> None:
    stream = TextStream(tokenizer.decode, tuple(stops))
    pieces, given_ids = streamed(stream, tokenizer.backend.encode(text))
    assert "".join(pieces) == left
    assert stream.stopped == (left != text)
    assert tokenizer.decode(given_ids).startswith(left)


def test_what_may_be_the_beginning_of_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer.decode, ("\n\nUser",))
    for token in tokenizer.backend.encode("Yes.\n\n"):
        stream.push(token)
    assert stream.take().text == "Yes."
    for token in tokenizer.backend.encode("And"):
        stream.push(token)
    assert stream.take().text == "\n\nAnd"


def test_special_tokens_have_no_text_but_stay_tokens(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.backend.encode("Hi"), 0, *tokenizer.backend.encode(" you")]
    pieces, given_ids = streamed(TextStream(tokenizer.decode), ids)
    assert "".join(pieces) == "Hi you"
    assert given_ids == ids


def test_whole_characters_before_an_unfinished_one_are_kept_at_the_end(
    tokenizer: Tokenizer,
) -> None:
    token = tokenizer.backend.convert_tokens_to_ids("Ð¾Ð")  # a whole letter and half of another
    pieces, given_ids = streamed(TextStream(tokenizer.decode), [token])
    assert (pieces, given_ids) == (["", "о"], [token])
    stopping = TextStream(tokenizer.decode, ("о",))
    assert stopping.push(token)
    assert stopping.finish().text == ""
