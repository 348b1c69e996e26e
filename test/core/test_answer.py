"""Which verified tokens an answer keeps, and why it ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspec_core.models.tokenizer import Tokenizer
from memspec_core.request import FinishReason
from memspec_core.speculation.answer import Answer

END = 2


def make_answer(
    tokenizer: Tokenizer, *, stop: tuple[str, ...] = (), max_tokens: int = 100
) -> Answer:
    return Answer(
        tokenizer.decode,
        stop=stop,
        end_of_sequence_ids=frozenset({END}),
        max_tokens=max_tokens,
    )


def test_end_of_sequence_in_the_middle_of_a_block(tokenizer: Tokenizer) -> None:
    hello, more = tokenizer.backend.encode("Hello"), tokenizer.backend.encode(" more")
    answer = make_answer(tokenizer)
    assert answer.extend([*hello, END, *more]) == len(hello)
    assert answer.finish_reason is FinishReason.END_OF_SEQUENCE
    assert answer.generated_tokens == len(hello)
    piece = answer.take()
    assert (piece.text, list(piece.token_ids)) == ("Hello", hello)


def test_end_of_sequence_at_once(tokenizer: Tokenizer) -> None:
    answer = make_answer(tokenizer)
    assert answer.extend([END, 100]) == 0
    assert answer.take().text == ""
    assert answer.generated_tokens == 0


def test_the_length_limit_cuts_a_block(tokenizer: Tokenizer) -> None:
    answer = make_answer(tokenizer, max_tokens=3)
    assert answer.remaining_tokens == 3
    assert answer.extend([100, 101, 102, 103]) == 3
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.remaining_tokens == 0
    assert answer.take().token_ids == (100, 101, 102)


def test_a_stop_string_beats_the_length_limit_of_the_same_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.backend.encode("one two")
    answer = make_answer(tokenizer, stop=("two",), max_tokens=len(ids))
    assert answer.extend([*ids, 100]) == len(ids)
    assert answer.finish_reason is FinishReason.STOP_STRING
    piece = answer.take()
    assert piece.text == "one "
    assert answer.generated_tokens == len(piece.token_ids)


def test_the_tokens_of_a_stop_string_are_not_counted(tokenizer: Tokenizer) -> None:
    answer = make_answer(tokenizer, stop=(" two",))
    assert answer.extend(tokenizer.backend.encode("one two three")) == 2
    assert answer.generated_tokens == 1
    piece = answer.take()
    assert (piece.text, list(piece.token_ids)) == ("one", tokenizer.backend.encode("one"))


def test_end_of_sequence_beats_a_length_limit_that_is_reached_with_it(
    tokenizer: Tokenizer,
) -> None:
    answer = make_answer(tokenizer, max_tokens=2)
    assert answer.extend([100]) == 1
    assert answer.extend([END]) == 0
    assert answer.finish_reason is FinishReason.END_OF_SEQUENCE


def test_text_that_is_held_back_comes_with_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.backend.encode("Well, one")
    answer = make_answer(tokenizer, stop=("one two",), max_tokens=len(ids))
    answer.extend(ids[:-1])
    first = answer.take()
    answer.extend(ids[-1:])
    assert first.text + answer.take().text == "Well, one"


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.TIME_LIMIT])
def test_an_interruption_hands_out_the_rest(tokenizer: Tokenizer, reason: FinishReason) -> None:
    ids = tokenizer.backend.encode("one two")
    answer = make_answer(tokenizer, stop=(" two three",))
    answer.extend(ids)
    assert answer.take().text == "one"
    answer.finish_reason = reason
    assert answer.take().text == " two"


@given(
    ids=st.lists(st.integers(0, 400), max_size=30),
    sizes=st.lists(st.integers(1, 7), min_size=30, max_size=30),
    limit=st.integers(1, 30),
)
def test_blocks_of_any_size_give_the_same_answer(
    ids: list[int], sizes: list[int], limit: int, tokenizer: Tokenizer
) -> None:
    def run(blocks: list[int]) -> tuple[str, list[int], int, FinishReason | None]:
        answer = make_answer(tokenizer, stop=("a", '!"'), max_tokens=limit)
        text, given_ids, first = "", [], 0
        for size in blocks:
            if answer.finish_reason is not None or first >= len(ids):
                break
            answer.extend(ids[first : first + size])
            first += size
            piece = answer.take()
            text += piece.text
            given_ids += piece.token_ids
        if answer.finish_reason is None:
            answer.finish_reason = FinishReason.CANCELLED
            piece = answer.take()
            text += piece.text
            given_ids += piece.token_ids
        return text, given_ids, answer.generated_tokens, answer.finish_reason

    assert run(sizes) == run([1] * len(ids))
