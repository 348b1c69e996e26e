"""Which proposals the target accepts: greedy runs, and the law of what is sampled."""

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.tiny import CPU, assert_law, sampling
from memspec_core.speculation.acceptance import accept_greedy, accept_sampled, accept_tree
from memspec_core.speculation.sampling import Sampler

ROUNDS = 4000


@pytest.mark.parametrize(
    ("proposed", "own", "result"),
    [
        ([], [7], (0, 7)),
        ([1, 2, 3], [1, 2, 3, 4], (3, 4)),
        ([1, 2, 3], [1, 2, 9, 4], (2, 9)),
        ([1, 2, 3], [8, 2, 3, 4], (0, 8)),
        ([1, 2, 3], [1, 9, 3, 4], (1, 9)),
    ],
)
def test_greedy(proposed: list[int], own: list[int], result: tuple[int, int]) -> None:
    assert accept_greedy(proposed, own) == result


@given(proposed=st.lists(st.integers(0, 2), max_size=6), data=st.data())
def test_greedy_gives_the_targets_own_tokens(proposed: list[int], data: st.DataObject) -> None:
    size = len(proposed) + 1
    own = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    accepted, extra = accept_greedy(proposed, own)
    assert [*proposed[:accepted], extra] == own[: accepted + 1]
    assert accepted == len(proposed) or proposed[accepted] != own[accepted]


# 0 and 1 after the context, 2 and 3 after 0, 4 after 3.
TREE = ([10, 11, 10, 12, 11], [-1, -1, 0, 0, 3])


@pytest.mark.parametrize(
    ("own", "path", "extra"),
    [
        ([10, 12, 11, 5], [0, 3, 4], 5),
        ([10, 12, 10], [0, 3], 10),
        ([10, 10, 12], [0, 2], 12),
        ([10, 11], [0], 11),
        ([11, 10], [1], 10),
        ([12], [], 12),
    ],
)
def test_a_walk_through_a_tree(own: list[int], path: list[int], extra: int) -> None:
    asked: list[int] = []

    def answer(place: int) -> int:
        asked.append(place)
        return own[len(asked) - 1]

    assert accept_tree(*TREE, answer) == (path, extra)
    assert asked == [-1, *path]


def test_an_empty_tree_is_plain_decoding() -> None:
    assert accept_tree([], [], lambda place: 7) == ([], 7)


@given(proposed=st.lists(st.integers(0, 2), max_size=6), data=st.data())
def test_a_tree_without_branches_is_a_chain(proposed: list[int], data: st.DataObject) -> None:
    size = len(proposed) + 1
    own = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    path, extra = accept_tree(proposed, range(-1, size - 2), lambda place: own[place + 1])
    assert (len(path), extra) == accept_greedy(proposed, own)
    assert path == [*range(len(path))]


def law(*weights: float) -> torch.Tensor:
    values = torch.tensor(weights)
    return values / values.sum()


def cut(values: torch.Tensor, top_k: int) -> torch.Tensor:
    return Sampler(sampling(top_k=top_k), CPU).distribution(values.log()[None])[0]


PAIRS = {
    "equal": (law(1, 2, 3, 4), law(1, 2, 3, 4)),
    "nearly equal": (law(1, 2, 3, 4), law(1, 2, 3, 4.00001)),
    "different": (law(4, 3, 2, 1), law(1, 2, 3, 4)),
    "draft too sure": (law(1, 1, 1, 1), law(97, 1, 1, 1)),
    "draft too flat": (law(97, 1, 1, 1), law(1, 1, 1, 1)),
    "draft without mass where the target has it": (law(1, 2, 3, 4), law(1, 1, 0, 0)),
    "target without mass where the draft has it": (law(1, 1, 0, 0), law(1, 2, 3, 4)),
    "nothing in common": (law(1, 2, 0, 0), law(0, 0, 1, 2)),
    "one token each": (law(1, 0, 0, 0), law(0, 1, 0, 0)),
    "top-k on both sides": (cut(law(4, 3, 2, 1), 3), cut(law(1, 2, 3, 4), 2)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_one_proposal_keeps_the_targets_law(pair: str) -> None:
    p, q = PAIRS[pair]
    sampler = Sampler(sampling(seed=5), CPU)
    target, draft = torch.stack((p, p)), q[None]
    counts, accepted_count = [0] * 4, 0
    for _ in range(ROUNDS):
        proposed = [sampler.draw(q)]
        accepted, extra = accept_sampled(proposed, draft, target, sampler)
        accepted_count += accepted
        counts[[*proposed[:accepted], extra][0]] += 1
    assert_law(counts, p.tolist())
    # Acceptance is 1 - TV(p, q).
    overlap = float(torch.minimum(p, q).sum())
    assert accepted_count / ROUNDS == pytest.approx(overlap, abs=0.04)


def test_a_chain_keeps_the_joint_law() -> None:
    """Three tokens in a row, the laws of which depend on the tokens before."""
    generator = torch.Generator().manual_seed(0)
    size, length = 3, 2
    p = (2.0 * torch.randn(size**length, length + 1, size, generator=generator)).softmax(-1)
    q = (2.0 * torch.randn(size**length, length + 1, size, generator=generator)).softmax(-1)

    def at(model: torch.Tensor, prefix: tuple[int, ...]) -> torch.Tensor:
        index = sum(token * size**place for place, token in enumerate(prefix))
        return model[index % len(model), len(prefix)]

    sampler = Sampler(sampling(seed=6), CPU)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(ROUNDS):
        text: tuple[int, ...] = ()
        while len(text) < length + 1:
            proposed: tuple[int, ...] = ()
            for _ in range(length - len(text)):
                proposed += (sampler.draw(at(q, text + proposed)),)
            prefixes = [text + proposed[:count] for count in range(len(proposed) + 1)]
            accepted, extra = accept_sampled(
                proposed,
                torch.stack([at(q, prefix) for prefix in prefixes]),
                torch.stack([at(p, prefix) for prefix in prefixes]),
                sampler,
            )
            text = (*text, *proposed[:accepted], extra)
        counts[text[: length + 1]] += 1
    outcomes = list(product(range(size), repeat=length + 1))
    expected = [
        float(at(p, o[:0])[o[0]] * at(p, o[:1])[o[1]] * at(p, o[:2])[o[2]]) for o in outcomes
    ]
    assert_law([counts[outcome] for outcome in outcomes], expected)


def test_equal_laws_accept_everything() -> None:
    sampler = Sampler(sampling(seed=7), CPU)
    p = law(1, 2, 3, 4)
    for _ in range(500):
        proposed = [sampler.draw(p) for _ in range(3)]
        accepted, _ = accept_sampled(proposed, p.expand(3, 4), p.expand(4, 4), sampler)
        assert accepted == 3


def test_no_proposals_draw_from_the_target() -> None:
    sampler = Sampler(sampling(), CPU)
    assert accept_sampled([], torch.zeros(0, 3), law(0, 1, 0)[None], sampler) == (0, 1)


@given(
    weights=st.lists(st.floats(0.01, 1.0), min_size=12, max_size=12),
    proposed=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 1000),
)
def test_certain_proposals_are_those_of_a_law_with_all_mass_on_one(
    weights: list[float], proposed: list[int], seed: int
) -> None:
    target = torch.tensor(weights).view(3, 4)
    target = (target / target.sum(-1, keepdim=True))[: len(proposed) + 1]
    certain = torch.nn.functional.one_hot(torch.tensor(proposed, dtype=torch.int64), 4).float()

    def accept(draft: torch.Tensor | None) -> tuple[int, int]:
        return accept_sampled(proposed, draft, target, Sampler(sampling(seed=seed), CPU))

    assert accept(None) == accept(certain)


def test_a_certain_proposal_is_accepted_with_the_targets_probability() -> None:
    p = law(1, 2, 3, 4)
    sampler = Sampler(sampling(seed=8), CPU)
    counts = [0] * 4
    for _ in range(ROUNDS):
        accepted, extra = accept_sampled([3], None, torch.stack((p, p)), sampler)
        counts[3 if accepted else extra] += 1
        assert accepted or extra != 3
    assert_law(counts, p.tolist())


def test_a_certain_proposal_that_the_target_is_certain_of_is_accepted() -> None:
    sampler = Sampler(sampling(), CPU)
    p = law(0, 1, 0).expand(3, 3)
    assert all(accept_sampled([1, 1], None, p, sampler) == (2, 1) for _ in range(50))
    assert all(accept_sampled([0, 1], None, p, sampler) == (0, 1) for _ in range(50))


@pytest.mark.parametrize("draft", [None, law(1, 0, 0)[None]], ids=["certain", "drawn"])
def test_what_the_target_never_says_is_never_accepted(
    draft: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "uniform", lambda _: 0.0)  # the least that is drawn
    p = law(0, 1, 0).expand(2, 3)
    assert accept_sampled([0], draft, p, Sampler(sampling(), CPU)) == (0, 1)
