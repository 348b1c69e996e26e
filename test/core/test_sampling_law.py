"""Sampled answers have the target's own law, whatever the draft and the sampling settings."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from core.tiny import CPU, assert_law, sampling
from memspec_core.request import SamplingSettings
from memspec_core.speculation.acceptance import accept_sampled, accept_tree
from memspec_core.speculation.sampling import Sampler

SIZE = 5
LENGTH = 2
ROUNDS = 2000
SETTINGS = {
    "temperature 1": sampling(),
    "temperature 0.5": sampling(0.5),
    "temperature 2": sampling(2.0),
    "top-k": sampling(top_k=3),
    "top-p": sampling(top_p=0.8),
    "temperature, top-k": sampling(1.5, top_k=2),
    "temperature, top-p": sampling(0.7, top_p=0.9),
    "top-k, top-p": sampling(top_k=4, top_p=0.7),
    "all three": sampling(1.8, top_k=4, top_p=0.85),
}

Accept = Callable[[Sequence[int], torch.Tensor | None, torch.Tensor, Sampler], tuple[int, int]]


def table(seed: int) -> torch.Tensor:
    """Return the logits [SIZE, SIZE] of the next token after each token."""
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


# The seeds give laws so different under all settings that a wrong acceptance shows.
TARGET, DRAFT = table(14), table(103)
FOLLOWS = (3, 0, 4, 2, 1)
"""What a certain draft proposes after each token: likely ones, and one that is often cut off."""


def own_law(logits: Sequence[float], how: SamplingSettings) -> list[float]:
    """Return the target's distribution, written down without tensors."""
    weights = {token: math.exp(value / how.temperature) for token, value in enumerate(logits)}
    best = sorted(weights, key=weights.__getitem__, reverse=True)[: how.top_k or SIZE]
    mass, kept = 0.0, []
    for token in best:
        kept.append(token)
        mass += weights[token] / sum(weights[other] for other in best)
        if how.top_p and mass >= how.top_p:
            break
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(SIZE)]


def joint_law(how: SamplingSettings) -> dict[tuple[int, ...], float]:
    """Return the probability of every answer of two tokens after token 0."""
    laws = [own_law(row, how) for row in TARGET.tolist()]
    return {(a, b): laws[0][a] * laws[a][b] for a, b in product(range(SIZE), repeat=2)}


class Chain:
    """Speculation on two tables, by the real sampler; `certain` takes the draft from FOLLOWS."""

    def __init__(self, how: SamplingSettings, *, certain: bool, accept: Accept) -> None:
        self.sampler = Sampler(how, CPU)
        self.certain = certain
        self.accept = accept
        self.target = self.sampler.distribution(TARGET)
        self.draft = self.sampler.distribution(DRAFT)
        self.accepted = 0

    def answer(self) -> tuple[int, ...]:
        text = [0]
        while len(text) < 3:
            before = [text[-1]]
            for _ in range(LENGTH):
                before.append(self.propose(before[-1]))
            q = None if self.certain else self.draft[before[:-1]]
            accepted, extra = self.accept(before[1:], q, self.target[before], self.sampler)
            text += [*before[1 : 1 + accepted], extra]
            self.accepted += accepted
        return tuple(text[1:3])

    def propose(self, token: int) -> int:
        return FOLLOWS[token] if self.certain else self.sampler.draw(self.draft[token])


def assert_targets_law(
    how: SamplingSettings,
    law: dict[tuple[int, ...], float],
    *,
    certain: bool,
    accept: Accept = accept_sampled,
) -> None:
    chain = Chain(how, certain=certain, accept=accept)
    counts = Counter(chain.answer() for _ in range(ROUNDS))
    assert chain.accepted > 0
    assert_law([counts[answer] for answer in law], list(law.values()))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_draft_of_another_law(setting: str) -> None:
    how = SETTINGS[setting]
    assert_targets_law(how, joint_law(how), certain=False)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_draft_that_is_certain(setting: str) -> None:
    how = SETTINGS[setting]
    assert_targets_law(how, joint_law(how), certain=True)


BRANCHES = (-1, -1, 0, 0, 1)
"""Parents of a tree of two tokens after the context, and three after those."""

Walk = Callable[
    [Sequence[int], Sequence[int], torch.Tensor, Callable[[int], int]], tuple[list[int], int]
]


def walk(
    proposed: Sequence[int], parents: Sequence[int], p: torch.Tensor, own: Callable[[int], int]
) -> tuple[list[int], int]:
    """Accept by the real rule, which needs no distributions [6, SIZE]."""
    return accept_tree(proposed, parents, own)


class Bush:
    """Speculation with trees of the likeliest tokens of a table, by the real sampler."""

    def __init__(self, how: SamplingSettings, accept: Walk = walk) -> None:
        self.sampler = Sampler(how, CPU)
        self.accept = accept
        self.target = self.sampler.distribution(TARGET)
        self.likeliest = DRAFT.argsort(dim=-1, descending=True).tolist()
        self.accepted = 0

    def answer(self) -> tuple[int, ...]:
        text = [0]
        while len(text) < 3:
            tokens = self.propose(text[-1])
            p = self.target[[text[-1], *tokens]]

            def own(place: int, p: torch.Tensor = p) -> int:
                return self.sampler.draw(p[place + 1])

            path, extra = self.accept(tokens, BRANCHES, p, own)
            text += [*(tokens[place] for place in path), extra]
            self.accepted += len(path)
        return tuple(text[1:3])

    def propose(self, last: int) -> list[int]:
        tokens: list[int] = []
        for place, parent in enumerate(BRANCHES):
            before = last if parent < 0 else tokens[parent]
            tokens.append(self.likeliest[before][BRANCHES[:place].count(parent)])
        return tokens


def assert_law_of_trees(how: SamplingSettings, accept: Walk = walk) -> None:
    bush, law = Bush(how, accept), joint_law(how)
    counts = Counter(bush.answer() for _ in range(ROUNDS))
    assert bush.accepted > 0
    assert_law([counts[answer] for answer in law], list(law.values()))


@pytest.mark.parametrize("setting", SETTINGS)
def test_trees(setting: str) -> None:
    assert_law_of_trees(SETTINGS[setting])


# The same check must find what is known to be wrong.


def draw_a_second_time(
    proposed: Sequence[int], parents: Sequence[int], p: torch.Tensor, own: Callable[[int], int]
) -> tuple[list[int], int]:
    path, _ = accept_tree(proposed, parents, own)
    return path, own(path[-1] if path else -1)


def ask_for_each_child(
    proposed: Sequence[int], parents: Sequence[int], p: torch.Tensor, own: Callable[[int], int]
) -> tuple[list[int], int]:
    """Give each child a chance of its own, as if those before had not been turned down."""
    path, place = [], -1
    while True:
        children = [child for child, parent in enumerate(parents) if parent == place]
        taken = next((child for child in children if own(place) == proposed[child]), None)
        if taken is None:
            return path, own(place)
        place = taken
        path.append(place)


@pytest.mark.parametrize("setting", ["temperature 1", "top-k, top-p"])
@pytest.mark.parametrize("accept", [draw_a_second_time, ask_for_each_child])
def test_the_check_finds_a_wrong_walk(accept: Walk, setting: str) -> None:
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law_of_trees(SETTINGS[setting], accept)


def take_all(
    proposed: Sequence[int], draft: torch.Tensor | None, target: torch.Tensor, sampler: Sampler
) -> tuple[int, int]:
    possible = [float(row[token]) > 0.0 for token, row in zip(proposed, target, strict=False)]
    accepted = [*possible, False].index(False)
    return accepted, sampler.draw(target[accepted])


def draw_the_rejected_again(
    proposed: Sequence[int], draft: torch.Tensor | None, target: torch.Tensor, sampler: Sampler
) -> tuple[int, int]:
    accepted, extra = accept_sampled(proposed, draft, target, sampler)
    return accepted, extra if accepted == len(proposed) else sampler.draw(target[accepted])


def take_another_draft_law(
    proposed: Sequence[int], draft: torch.Tensor | None, target: torch.Tensor, sampler: Sampler
) -> tuple[int, int]:
    """Compare with a law of half the temperature, though the tokens were drawn from `draft`."""
    assert draft is not None
    sharper = draft**2 / (draft**2).sum(-1, keepdim=True)
    return accept_sampled(proposed, sharper, target, sampler)


WRONG = [
    (take_all, False),
    (take_all, True),
    (draw_the_rejected_again, False),
    (draw_the_rejected_again, True),
    (take_another_draft_law, False),
]


@pytest.mark.parametrize("setting", ["temperature 1", "top-k, top-p"])
@pytest.mark.parametrize(("accept", "certain"), WRONG)
def test_the_check_finds_a_wrong_acceptance(accept: Accept, certain: bool, setting: str) -> None:
    how = SETTINGS[setting]
    with pytest.raises(AssertionError, match="chi-square"):
        assert_targets_law(how, joint_law(how), certain=certain, accept=accept)


@pytest.mark.parametrize("certain", [False, True])
def test_the_check_finds_another_temperature(certain: bool) -> None:
    with pytest.raises(AssertionError, match="chi-square"):
        assert_targets_law(sampling(1.0), joint_law(sampling(1.3)), certain=certain)
