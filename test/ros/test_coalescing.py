"""Which iterations share a message, on a clock that the test moves."""

from hypothesis import given
from hypothesis import strategies as st

from memspec_core.iteration import Iteration
from memspec_core.request import FinishReason
from memspec_ros.coalescing import Coalescer


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def now(self):
        return self.seconds


def iteration(number, draft="none", finish_reason=None, text=None):
    return Iteration(
        sequence=number,
        draft=draft,
        wanted="general",
        proposed=0,
        accepted=0,
        committed=1,
        token_ids=(number,),
        text=f"{number} " if text is None else text,
        generated_tokens=number + 1,
        finish_reason=finish_reason,
    )


def run(period, steps, ends=True):
    """Return the pieces of iterations that end so many seconds after each other, and when."""
    clock = Clock()
    coalescer = Coalescer(period, clock)
    pieces = []
    for number, seconds in enumerate(steps):
        clock.seconds += seconds
        last = ends and number == len(steps) - 1
        piece = coalescer.add(
            iteration(number, finish_reason=FinishReason.LENGTH if last else None)
        )
        if piece is not None:
            pieces.append((clock.seconds, piece))
    rest = coalescer.flush()
    if rest is not None:
        pieces.append((clock.seconds, rest))
    assert coalescer.flush() is None
    assert coalescer.sequence == len(pieces)
    return pieces


def numbers(pieces):
    return [[i.sequence for i in piece.iterations] for _, piece in pieces]


@given(
    period=st.sampled_from([0.0, 0.02, 0.05, 1.0]),
    steps=st.lists(st.floats(0.0, 0.2), min_size=1, max_size=60),
    ends=st.booleans(),
)
def test_pieces_are_the_answer_in_order_and_few(period, steps, ends):
    pieces = run(period, steps, ends)

    assert "".join(p.text for _, p in pieces) == "".join(f"{n} " for n in range(len(steps)))
    assert [i for _, p in pieces for i in p.token_ids] == list(range(len(steps)))
    assert [p.sequence for _, p in pieces] == list(range(len(pieces)))
    assert pieces[0][1].iterations[0].sequence == 0
    assert len(pieces[0][1].iterations) == 1, "the first goes out at once"
    assert pieces[-1][1].newest.sequence == len(steps) - 1
    if period:
        assert len(pieces) <= sum(steps[1:]) / period + 2 + 1e-6
    else:
        assert len(pieces) == len(steps)


@given(
    period=st.sampled_from([0.02, 0.05]),
    steps=st.lists(st.floats(0.0, 0.2), min_size=1, max_size=60),
)
def test_nothing_waits_longer_than_the_period_and_one_iteration(period, steps):
    ends, now = [], 100.0
    for seconds in steps:
        now += seconds
        ends.append(now)

    for sent_at, piece in run(period, steps):
        oldest, newest = piece.iterations[0].sequence, piece.newest.sequence
        assert sent_at - ends[oldest] <= period + steps[newest] + 1e-9


def test_fast_iterations_share_slow_ones_do_not():
    assert numbers(run(0.02, [0.0, 0.005, 0.005, 0.011, 0.005, 0.005])) == [[0], [1, 2, 3], [4, 5]]
    assert numbers(run(0.02, [0.0, 0.03, 0.03, 0.03])) == [[0], [1], [2], [3]]
    assert numbers(run(0.0, [0.0, 0.0, 0.0])) == [[0], [1], [2]]


def test_a_piece_tells_of_its_newest_iteration():
    coalescer = Coalescer(1.0, Clock())
    coalescer.add(iteration(0, text=""))
    coalescer.add(iteration(1, draft="none"))
    assert coalescer.add(iteration(2, draft="general")) is None

    piece = coalescer.flush()
    assert (piece.text, piece.token_ids) == ("1 2 ", [1, 2])
    assert (piece.newest.draft, piece.newest.fallback) == ("general", False)
    assert piece.newest.generated_tokens == 3
