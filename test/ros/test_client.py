"""The text that a client makes of feedback, of which some may be lost."""

from memspec_msgs.action import Generate
from memspec_ros.client import Streamer


def streamed(feedback, result):
    written = []
    stream = Streamer(written.append)
    for sequence, text in feedback:
        stream.feedback(Generate.Feedback(sequence=sequence, text=text))
    stream.finish(result)
    return "".join(written)


def test_feedback_that_all_arrives_is_the_text():
    assert streamed([(0, "One "), (1, "two")], "One two") == "One two"


def test_lost_feedback_is_made_up_for_by_the_result():
    assert streamed([(0, "One "), (2, "three")], "One two three") == "One two three"
    assert streamed([], "One two") == "One two"


def test_the_result_is_right_where_they_differ():
    assert streamed([(0, "One")], "Two") == "One\nTwo"
