"""The lookup: what followed the context's last tokens before, whatever was rolled back."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.tiny import CPU, sampling
from memspec_core.speculation.lookup import NgramLookup
from memspec_core.speculation.proposal import Proposal
from memspec_core.speculation.sampling import Sampler

GREEDY = Sampler(sampling(0.0), CPU)


def proposed(context: list[int], length: int = 3, **sizes: int) -> tuple[int, tuple[int, ...]]:
    proposal = NgramLookup(**sizes).propose(context, length, GREEDY)
    return proposal.matched, proposal.token_ids


def searched(context: list[int], length: int, longest: int, shortest: int) -> Proposal:
    """Say what a lookup must propose, by searching the whole context backwards."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(context) - 1, size - 1, -1):
            if len(context) > size and context[end - size : end] == context[-size:]:
                return Proposal(tuple(context[end : end + length]), matched=size)
    return Proposal()


def test_what_followed_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5, 6, 1, 2]) == (2, (3, 4, 5))
    assert proposed([1, 2, 3, 4, 5, 6, 1, 2], length=1) == (2, (3,))


def test_the_latest_occurrence_wins() -> None:
    assert proposed([1, 2, 3, 1, 2, 4, 1, 2]) == (2, (4, 1, 2))


def test_a_longer_match_beats_a_later_one() -> None:
    assert proposed([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]) == (3, (3, 8, 1))


def test_matches_have_the_given_sizes() -> None:
    context = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]
    assert proposed(context)[0] == 4
    assert proposed(context, longest=3)[0] == 3
    assert proposed([1, 2, 1]) == (0, ())
    assert proposed([1, 2, 1], shortest=1) == (1, (2, 1))


@pytest.mark.parametrize("context", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_nothing_is_proposed_where_nothing_matches(context: list[int]) -> None:
    assert proposed(context, shortest=1) == (0, ())


def test_nothing_is_proposed_where_nothing_is_wanted() -> None:
    assert proposed([1, 2, 3, 1, 2], length=0) == (0, ())


def test_proposals_are_certain_under_sampling() -> None:
    proposal = NgramLookup().propose([1, 2, 3, 1, 2], 2, Sampler(sampling(1.0), CPU))
    assert (proposal.token_ids, proposal.probabilities) == ((3, 1), None)


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (2, 0), (0, 0)])
def test_sizes_that_make_no_sense_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match=f"{shortest} to {longest}"):
        NgramLookup(longest, shortest)


def test_rolling_back_brings_the_occurrence_before_back() -> None:
    lookup = NgramLookup()
    context = [1, 2, 3, 1, 2]
    assert lookup.propose(context, 1, GREEDY).token_ids == (3,)
    assert lookup.propose([*context, 4, 1, 2], 1, GREEDY).token_ids == (4,)
    lookup.rollback(len(context))
    assert lookup.propose(context, 1, GREEDY).token_ids == (3,)
    lookup.rollback(0)
    assert lookup.propose([2, 3, 1, 2], 1, GREEDY).token_ids == ()


def test_a_lookup_that_is_rolled_back_to_nothing_holds_nothing() -> None:
    lookup = NgramLookup()
    lookup.propose([1, 2, 1, 2, 1, 2, 3, 1, 2], 3, GREEDY)
    lookup.rollback(0)
    assert not any(vars(lookup)[name] for name in ("_tokens", "_latest", "_replaced"))


tokens = st.lists(st.integers(0, 2), max_size=12)


@given(
    turns=st.lists(st.tuples(st.integers(0, 30), tokens, st.booleans()), max_size=12),
    sizes=st.sampled_from([(4, 2), (3, 1), (2, 2), (5, 3), (1, 1)]),
    length=st.integers(1, 5),
    many=st.sampled_from([0, 4, 100]),
)
def test_any_course_is_that_of_a_fresh_search(
    turns: list[tuple[int, list[int], bool]], sizes: tuple[int, int], length: int, many: int
) -> None:
    """Contexts that grow, shrink and fork, whether or not the lookup is told before."""
    lookup = NgramLookup(*sizes)
    context: list[int] = []
    with mock.patch("memspec_core.speculation.lookup.MANY_TOKENS", many):
        for kept, more, told in turns:
            context = context[:kept] + more
            if told:
                lookup.rollback(kept)
            assert lookup.propose(context, length, GREEDY) == searched(context, length, *sizes)
