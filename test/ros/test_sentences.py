"""Sentences cut from a stream, however it is divided and whatever is in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unique_identifier_msgs.msg import UUID

from memspec_msgs.msg import TokenChunk
from memspec_ros.sentences import MOST_GOALS, GoalSentences, SentenceCutter

PIECES = st.sampled_from(
    [*"aA1 .!?…\n\"')。」", "Dr.", "e.g.", "3.14", ". ", ".\n", "one two", "  ", "No. ", "1. "]
)
TEXTS = st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=40)


def cut(*pieces):
    cutter = SentenceCutter()
    whole = [sentence for piece in pieces for sentence in cutter.add(piece)]
    return whole + cutter.flush()


@given(TEXTS)
def test_joined_sentences_are_the_text(text):
    assert "".join(cut(text)) == text


@given(TEXTS, st.data())
def test_sentences_are_the_same_however_the_text_is_divided(text, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = zip([0, *places], [*places, len(text)], strict=True)
    assert cut(*(text[a:b] for a, b in bounds)) == cut(text)
    assert cut(*text) == cut(text)


@pytest.mark.parametrize(
    "sentences",
    [
        ["Go left. ", "Then stop! ", "Is it there? ", "Yes."],
        ['He said "Stop." ', "Then it stopped."],
        ["It is 3.14 m long. ", "Take 2.5 of them."],
        ["Dr. Smith and J. Doe met e.g. Mr. X. Then they left."],
        ["See Fig. 3 and No. 5. ", "No. ", "It is not."],
        ["First:\n", "1. Go to the door.\n", "2. Open it.\n\n", "Done."],
        ["Wait... and see. ", "Really?! ", "So do I. ", "Good."],
        ["U.S. robots came. ", "They won."],
        ["走って。", "止まって！", "はい。"],
        ["no end in sight"],
    ],
)
def test_where_sentences_end(sentences):
    assert cut(*"".join(sentences)) == sentences


def test_a_sentence_is_whole_as_soon_as_the_next_begins():
    cutter = SentenceCutter()

    assert cutter.add("Go left.") == []
    assert cutter.add(" ") == []
    assert cutter.add("T") == ["Go left. "]
    assert cutter.flush() == ["T"]
    assert cutter.flush() == []


def chunk(goal, text, last=False):
    return TokenChunk(goal_id=UUID(uuid=[goal] * 16), text=text, last=last)


def test_goals_that_interleave_are_kept_apart():
    goals = GoalSentences()

    assert goals.add(chunk(1, "One is")) == []
    assert goals.add(chunk(2, "Two. B")) == ["Two. "]
    assert goals.add(chunk(1, " here. And", last=True)) == ["One is here. ", "And"]
    assert goals.add(chunk(2, "ye", last=True)) == ["Bye"]
    # A new goal of the same id would begin anew.
    assert goals.add(chunk(1, "X", last=True)) == ["X"]


def test_goals_that_never_end_are_forgotten():
    goals = GoalSentences()
    for goal in range(MOST_GOALS + 1):
        goals.add(chunk(goal, "never"))

    assert goals.add(chunk(0, "new", last=True)) == ["new"]
    assert goals.add(chunk(MOST_GOALS, "", last=True)) == ["never"]
