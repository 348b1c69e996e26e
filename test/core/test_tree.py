"""Trees of the most probable paths: how they are grown, and decoding with them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.conftest import Checkpoints
from core.tiny import (
    CPU,
    assert_law,
    assert_rows_are_of,
    decode,
    ids_of,
    load_draft,
    load_target,
    logits_of,
    make_model,
    make_settings,
    sampling,
    text_of,
    truncated,
    without_ends,
)
from memspec_core.clock import SystemClock
from memspec_core.engine import load_engine
from memspec_core.models.decoder import Decoder, DecoderParts
from memspec_core.models.draft import plan_draft
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.linear import DenseLinear
from memspec_core.models.native.library import library
from memspec_core.models.target import Target
from memspec_core.models.torch_decoder import TorchDecoder
from memspec_core.request import FinishReason
from memspec_core.speculation.proposal import Draft, Proposal
from memspec_core.speculation.sampling import Sampler
from memspec_core.speculation.tree import Children, Node, TreeDraft, best_tree, to_proposal

GREEDY = Sampler(sampling(0.0), CPU)
Path_ = tuple[int, ...]


def paths_of(proposal: Proposal) -> list[Path_]:
    """Return the tokens from the context to each node."""
    assert proposal.parents is not None
    paths: list[Path_] = []
    for place, (token, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
        assert -1 <= parent < place
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths


# Growing.


class Table:
    """Log-probabilities of three tokens after any path, different for each."""

    SIZE = 3

    def __init__(self, seed: int, sharpness: float) -> None:
        self._seed, self._sharpness = seed, sharpness
        self.passes: list[int] = []

    def after(self, path: Path_) -> Children:
        number = sum((token + 1) * 4**place for place, token in enumerate(path))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        logits = self._sharpness * torch.randn(self.SIZE, generator=generator)
        scores = logits.double().log_softmax(-1).tolist()
        return sorted(enumerate(scores), key=lambda child: -child[1])

    def follow(self, nodes: Sequence[Node]) -> list[Children]:
        self.passes.append(len(nodes))
        return [self.after(path_of(node)) for node in nodes]

    def score(self, path: Path_) -> float:
        return sum(dict(self.after(path[:end]))[path[end]] for end in range(len(path)))


def path_of(node: Node | None) -> Path_:
    return () if node is None else (*path_of(node.parent), node.token_id)


@given(seed=st.integers(0, 10_000), budget=st.integers(1, 7), sharp=st.sampled_from([0.1, 1, 5]))
def test_a_tree_holds_the_most_probable_paths(seed: int, budget: int, sharp: float) -> None:
    table = Table(seed, sharp)
    tree = best_tree(table.after(()), table.follow, budget)
    found = [path_of(node) for node in tree]
    # Four tokens are enough to tell: what is longer cannot be better than its beginnings.
    everything = [path for length in range(1, 5) for path in product(range(3), repeat=length)]
    best = sorted(everything, key=lambda path: -table.score(path))
    if all(len(path) < 5 for path in found):
        assert found == best[:budget]
    assert [node.score for node in tree] == pytest.approx([table.score(path) for path in found])
    paths_of(to_proposal(tree))
    assert len(table.passes) <= max(len(path) for path in found)


def test_a_sure_draft_gives_a_chain_and_an_unsure_one_a_bush() -> None:
    sure, unsure = Table(1, 50.0), Table(1, 0.01)
    chain = best_tree(sure.after(()), sure.follow, 6)
    assert to_proposal(chain).parents == (-1, 0, 1, 2, 3, 4)
    bush = best_tree(unsure.after(()), unsure.follow, 6)
    assert [len(path_of(node)) for node in bush] == [1, 1, 1, 2, 2, 2]


def test_few_beams_follow_the_best_nodes_only() -> None:
    table = Table(3, 1.0)
    tree = best_tree(table.after(()), table.follow, 7, max_beams=1)
    assert set(table.passes) == {1}
    assert len(tree) == 7
    assert all(node.parent is None or node.parent in tree for node in tree)


def test_what_does_not_fit_into_the_cache_is_not_followed() -> None:
    table = Table(3, 1.0)
    tree = best_tree(table.after(()), lambda nodes: table.follow(nodes[:1]), 7)
    assert len({node.parent for node in tree}) <= 1 + len(table.passes)
    assert [path_of(n) for n in best_tree(table.after(()), lambda _: [], 7)] == [
        (token,) for token, _ in table.after(())
    ]


def test_equal_paths_keep_parents_in_front() -> None:
    tree = best_tree([(1, 0.0), (2, 0.0)], lambda nodes: [[(1, 0.0), (2, 0.0)]] * len(nodes), 8)
    paths = paths_of(to_proposal(tree))
    assert paths[:2] == [(1,), (2,)]


# Drafts that propose trees.

SIZE = 8
CONTEXT = 96


@dataclass(frozen=True)
class Small:
    """A target of eight tokens and drafts of trees that differ from it more and less."""

    target: Target
    drafts: dict[str, TreeDraft]
    decoders: dict[str, Decoder]
    caches: dict[str, KeyValueCache]


@pytest.fixture(scope="module")
def small(checkpoints: Checkpoints) -> Small:
    model = make_model(seed=11, vocab_size=SIZE, num_hidden_layers=2)
    far = make_model("qwen2", seed=12, vocab_size=SIZE, num_hidden_layers=1)
    target = load_target(checkpoints.save("tree-eight", model), context_tokens=CONTEXT)
    folders = {
        "near": checkpoints.save("tree-near", truncated(model, 1)),
        "far": checkpoints.save("tree-far", far),
    }
    loaded = {n: plan_draft(n, str(f), target).load(target) for n, f in folders.items()}
    near, _ = loaded["near"]
    ids = torch.tensor([1, 3, 4, 6])
    head = DenseLinear(near.embedding.rows(ids))
    loaded["partial"] = (
        TorchDecoder(DecoderParts(near.config, near.embedding, near.layers, near.norm, head, ids)),
        KeyValueCache(near.config, CONTEXT, torch.float32, CPU),
    )
    return Small(
        without_ends(target),
        {n: TreeDraft(n, decoder, cache, SIZE) for n, (decoder, cache) in loaded.items()},
        {n: decoder for n, (decoder, _) in loaded.items()},
        {n: cache for n, (_, cache) in loaded.items()},
    )


def most_probable(
    decoder: Decoder, context: list[int], sampler: Sampler, at_least: float, longest: int
) -> dict[Path_, float]:
    """Return all paths that have a probability of `at_least`, each fed as a chain."""
    found: dict[Path_, float] = {}
    ahead: list[tuple[Path_, float]] = [((), 1.0)]
    ids = decoder.head_token_ids
    while ahead:
        path, chance = ahead.pop()
        cache = KeyValueCache(decoder.config, CONTEXT, torch.float32, CPU)
        logits = decoder.logits(decoder.forward([*context, *path], cache)[-1:])
        law = logits.softmax(-1) if sampler.greedy else sampler.distribution(logits)
        for index, p in enumerate(law[0].tolist()):
            if p > 0.0 and p * chance >= at_least and len(path) < longest:
                step = (*path, index if ids is None else int(ids[index]))
                found[step] = p * chance
                ahead.append((step, p * chance))
    return found


SAMPLERS = {
    "greedy": GREEDY,
    "temperature": Sampler(sampling(0.6), CPU),
    "top-k": Sampler(sampling(1.0, top_k=2), CPU),
    "top-p": Sampler(sampling(1.3, top_p=0.7), CPU),
}


@pytest.mark.parametrize("how", SAMPLERS)
@pytest.mark.parametrize("name", ["near", "far", "partial"])
@pytest.mark.parametrize("budget", [1, 2, 6, 16])
def test_a_draft_proposes_its_most_probable_paths(
    budget: int, name: str, how: str, small: Small
) -> None:
    context = [5, 2, 5, 1]
    proposal = small.drafts[name].propose(context, budget, SAMPLERS[how])
    found = paths_of(proposal)
    assert len(found) == budget
    assert proposal.probabilities is None
    decoder = small.decoders[name]
    everything = most_probable(decoder, context, SAMPLERS[how], 1e-3, budget)
    best = sorted(everything, key=lambda path: -everything[path])[:budget]
    assert everything[best[-1]] > 2e-3  # or paths that were left out could be among them
    assert found == best
    # What was fed to grow the tree is forgotten, and the context is there.
    assert small.caches[name].length == len(context)
    assert_rows_are_of([*context, 0], decoder, small.caches[name])
    assert small.drafts[name].propose(context, budget, SAMPLERS[how]) == proposal


def test_a_context_that_grows_and_shrinks(small: Small) -> None:
    draft = small.drafts["near"]
    first = draft.propose([5, 2, 5], 6, GREEDY)
    draft.propose([5, 2, 5, 7, 7], 6, GREEDY)
    draft.rollback(2)
    assert draft.propose([5, 2, 5], 6, GREEDY) == first


def test_no_tree_where_the_drafts_context_is_full(small: Small) -> None:
    draft = small.drafts["near"]
    full = [5] * CONTEXT
    near_full = paths_of(draft.propose(full[:-1], 6, GREEDY))
    assert (len(near_full), max(map(len, near_full))) == (6, 2)  # one node has been followed
    assert {len(path) for path in paths_of(draft.propose(full, 6, GREEDY))} == {1}
    assert draft.propose([*full, 5], 6, GREEDY) == Proposal()
    assert draft.propose(full, 0, GREEDY) == Proposal()
    draft.rollback(0)


# Decoding with them.

PROMPTS = [[1], [30, 40, 50, 60], list(range(1000, 1030))]
DRAFTS = ["itself", "first_layer", "other", "short"]


@dataclass(frozen=True)
class Models:
    """A target, with drafts that propose trees and one that proposes chains."""

    target: Target
    trees: dict[str, TreeDraft]
    chain: Draft


@pytest.fixture(scope="module", params=["fp32", "native"])
def models(
    request: pytest.FixtureRequest, target_folder: Path, draft_folders: dict[str, Path]
) -> Models:
    native = request.param == "native"
    if native and library() is None:
        pytest.skip("the native step is not there")
    target = load_target(target_folder, dtype="bf16" if native else "fp32")
    assert target.backend.name == ("native" if native else "torch")
    trees = {name: tree_draft(name, folder, target) for name, folder in draft_folders.items()}
    return Models(target, trees, load_draft("chain", draft_folders["first_layer"], target))


def tree_draft(name: str, folder: Path, target: Target) -> TreeDraft:
    decoder, cache = plan_draft(name, str(folder), target).load(target)
    return TreeDraft(name, decoder, cache, target.decoder.config.vocabulary_size)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_is_plain_greedy(name: str, budget: int, models: Models) -> None:
    for prompt in PROMPTS:
        plain = ids_of(decode(models.target, prompt))
        events = decode(models.target, prompt, models.trees[name], gamma=budget)
        assert ids_of(events) == plain
        assert max(event.proposed for event in events) <= budget
        for event in events:
            assert event.accepted <= event.committed <= event.accepted + 1


def test_the_cache_is_that_of_plain_decoding(models: Models) -> None:
    target, prompt = models.target, PROMPTS[1]
    decode(target, prompt)
    rows = target.cache.rows.clone()
    target.cache.rows.zero_()
    target.cache.truncate(0)
    decode(target, prompt, models.trees["first_layer"], gamma=8)
    known = len(prompt) + 23
    found = target.decoder.forward([7], target.cache)
    assert target.cache.length == known + 1
    target.cache.rows.copy_(rows)
    target.cache.truncate(known)
    expected = target.decoder.forward([7], target.cache)
    if target.backend.name == "native":
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_tree_has_something_right_more_often_than_a_chain(models: Models) -> None:
    def share(draft: Draft) -> float:
        events = [e for prompt in PROMPTS for e in decode(models.target, prompt, draft, gamma=16)]
        return sum(event.accepted > 0 for event in events) / len(events)

    assert share(models.trees["first_layer"]) > share(models.chain) > 0.0
    events = decode(models.target, PROMPTS[1], models.trees["itself"], gamma=4)
    assert all(event.accepted for event in events[:-1])


def test_trees_and_chains_take_turns(models: Models) -> None:
    target = models.target
    plain = ids_of(decode(target, PROMPTS[1], max_new_tokens=40))
    turns = [models.trees[name] for name in DRAFTS]
    drafts: list[Draft | None] = [turns[1], models.chain, None, turns[2], turns[0], turns[3]]
    for budget in (1, 4, 9):
        events = decode(
            target, PROMPTS[1], lambda i: drafts[i % 6], gamma=budget, max_new_tokens=40
        )
        assert ids_of(events) == plain
        assert len({event.draft for event in events}) >= 4


@pytest.mark.parametrize("name", ["itself", "first_layer"])
def test_an_end_of_sequence_inside_a_path(name: str, models: Models) -> None:
    plain = ids_of(decode(without_ends(models.target), PROMPTS[1]))
    for end in plain[:8]:
        length = plain.index(end)
        ending = replace(models.target, end_of_sequence_ids=frozenset({end}))
        events = decode(ending, PROMPTS[1], models.trees[name], gamma=9)
        assert ids_of(events) == plain[:length]
        assert events[-1].finish_reason is FinishReason.END_OF_SEQUENCE
        assert models.target.cache.length <= len(PROMPTS[1]) + length - 1


@pytest.mark.parametrize("name", ["itself", "first_layer"])
def test_a_stop_string_inside_a_path(name: str, models: Models) -> None:
    text = text_of(decode(models.target, PROMPTS[1], max_new_tokens=20))
    for first in range(2, len(text) - 4, 7):
        stop = text[first : first + 3]
        events = decode(
            models.target,
            PROMPTS[1],
            models.trees[name],
            gamma=9,
            max_new_tokens=20,
            stop=(stop,),
        )
        assert text_of(events) == text[: text.index(stop)]
        assert events[-1].finish_reason is FinishReason.STOP_STRING


@pytest.mark.parametrize("name", ["itself", "first_layer"])
def test_the_context_is_used_to_its_end(name: str, models: Models) -> None:
    for room in (1, 2, 3, 6):
        prompt = [(31 * index) % 40000 + 5 for index in range(256 - room)]
        plain = ids_of(decode(models.target, prompt, max_new_tokens=1000))
        events = decode(models.target, prompt, models.trees[name], gamma=16, max_new_tokens=1000)
        assert ids_of(events) == plain
        assert events[-1].finish_reason in (FinishReason.LENGTH, FinishReason.END_OF_SEQUENCE)
        assert models.target.cache.length <= 255


# The law of sampled answers, end to end.


@pytest.mark.parametrize(
    ("name", "budget", "how"),
    [
        ("near", 2, {}),
        ("near", 7, {"top_k": 3}),
        ("near", 7, {"temperature": 0.6, "top_p": 0.9}),
        ("far", 7, {}),
        ("far", 2, {"top_p": 0.8}),
        ("partial", 7, {"temperature": 1.4, "top_k": 5}),
    ],
)
def test_sampled_answers_have_the_targets_law(
    name: str, budget: int, how: dict[str, float], small: Small
) -> None:
    target, prompt, rounds = small.target, [5, 2, 5], 500
    counts: Counter[Path_] = Counter()
    accepted = 0
    for seed in range(rounds):
        events = decode(
            target,
            prompt,
            small.drafts[name],
            gamma=budget,
            max_new_tokens=5,
            sampling=sampling(**{"seed": seed, **how}),
        )
        accepted += sum(event.accepted for event in events)
        counts[tuple(ids_of(events)[:2])] += 1
    assert accepted > rounds // 2
    sampler = Sampler(sampling(**how), CPU)

    def after(context: list[int]) -> list[float]:
        target.cache.truncate(0)
        law: list[float] = sampler.distribution(logits_of(target, context)[-1:])[0].tolist()
        return law

    first = after(prompt)
    second = [after([*prompt, token]) for token in range(SIZE)]
    outcomes = list(product(range(SIZE), repeat=2))
    assert_law([counts[o] for o in outcomes], [first[a] * second[a][b] for a, b in outcomes])


def test_the_shape_of_the_settings_is_that_of_the_drafts(
    target_folder: Path, draft_folders: dict[str, Path]
) -> None:
    folders = {"first_layer": draft_folders["first_layer"]}
    for shape, kind in {"tree": True, "chain": False}.items():
        chosen = make_settings(target_folder, folders, draft_shape=shape)
        engine = load_engine(
            lambda chosen=chosen: chosen,
            SystemClock(),
            between_parts=lambda: None,
            on_change=lambda: None,
            on_load_finished=lambda: None,
        )
        try:
            assert isinstance(engine.cache.require("first_layer"), TreeDraft) == kind
        finally:
            engine.close()
