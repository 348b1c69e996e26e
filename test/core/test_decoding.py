"""Draft-and-verify: whatever the draft, the target's own answer, and caches in order after it."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from core.conftest import Checkpoints
from core.tiny import (
    CPU,
    assert_law,
    assert_rows_are_of,
    decode,
    greedy_by_transformers,
    ids_of,
    load_draft,
    load_target,
    logits_of,
    make_model,
    sampling,
    text_of,
    truncated,
    without_ends,
)
from memspec_core.errors import ModelError, PromptTooLongError
from memspec_core.iteration import Iteration
from memspec_core.models.decoder import Decoder, DecoderParts
from memspec_core.models.draft import plan_draft
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.linear import DenseLinear
from memspec_core.models.target import Target
from memspec_core.models.torch_decoder import TorchDecoder
from memspec_core.request import FinishReason
from memspec_core.speculation import decoding as decoding_module
from memspec_core.speculation.chain import IndependentDraft
from memspec_core.speculation.lookup import NgramLookup
from memspec_core.speculation.proposal import Draft
from memspec_core.speculation.sampling import Sampler

PROMPTS = [[1], [30, 40, 50, 60], list(range(1000, 1030)), [7, 7, 7, 300, 4000, 48000]]
DRAFTS = ["itself", "first_layer", "other", "short"]


class Drafts:
    """Drafts by name, with the caches that they work on."""

    def __init__(self, folders: dict[str, Path], target: Target) -> None:
        self.by_name: dict[str, IndependentDraft] = {}
        self.caches: dict[str, KeyValueCache] = {}
        self.decoders: dict[str, Decoder] = {}
        for name, folder in folders.items():
            decoder, cache = plan_draft(name, str(folder), target).load(target)
            self.decoders[name], self.caches[name] = decoder, cache
            self.by_name[name] = IndependentDraft(
                name, decoder, cache, target.decoder.config.vocabulary_size
            )

    def __getitem__(self, name: str | None) -> IndependentDraft | None:
        return None if name in (None, "none") else self.by_name[str(name)]


@pytest.fixture(scope="module")
def drafts(draft_folders: dict[str, Path], target: Target) -> Drafts:
    return Drafts(draft_folders, target)


def assert_events_agree(events: list[Iteration]) -> None:
    """Check the counts of every event against each other."""
    total = 0
    for place, event in enumerate(events):
        total += event.committed
        assert event.sequence == place
        assert event.generated_tokens == total
        assert 0 <= event.accepted <= event.proposed
        assert event.accepted <= event.committed <= event.accepted + 1 or event.committed == 0
        assert (event.finish_reason is not None) == (event is events[-1])
        assert not event.plain or event.proposed == 0


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_plain_decoding_is_transformers_greedy(
    prompt: list[int], target: Target, target_model: PreTrainedModel
) -> None:
    events = decode(target, prompt, max_new_tokens=30)
    assert ids_of(events) == greedy_by_transformers(target_model, prompt, 30, ends=[2])
    assert all(event.plain and event.committed <= 1 for event in events)
    assert_events_agree(events)


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5, 6, 40])
@pytest.mark.parametrize("name", DRAFTS)
def test_speculative_greedy_is_plain_greedy(
    name: str, gamma: int, target: Target, drafts: Drafts
) -> None:
    for prompt in PROMPTS[:3]:
        plain = ids_of(decode(target, prompt))
        events = decode(target, prompt, drafts[name], gamma=gamma)
        assert ids_of(events) == plain
        assert max(event.proposed for event in events) <= gamma
        assert_events_agree(events)
        assert_rows_are_of([*prompt, *plain], target.decoder, target.cache)
        assert_rows_are_of([*prompt, *plain], drafts.decoders[name], drafts.caches[name])


def test_the_target_as_its_own_draft_is_accepted_in_full(target: Target, drafts: Drafts) -> None:
    events = decode(target, PROMPTS[1], drafts["itself"], gamma=4, max_new_tokens=20)
    assert [event.committed for event in events] == [5, 5, 5, 5]
    assert all(event.accepted == event.proposed == 4 for event in events)


def test_drafts_are_right_in_part(target: Target, drafts: Drafts) -> None:
    """A check of the other tests: they see full, partial and no acceptance."""
    accepted = {
        name: sum(e.accepted for e in decode(target, PROMPTS[1], drafts[name])) for name in DRAFTS
    }
    assert accepted["itself"] > accepted["first_layer"] > accepted["other"]


def test_a_quantised_draft_and_a_bf16_target_decode(
    target_folder: Path, draft_folders: dict[str, Path]
) -> None:
    target = load_target(target_folder, dtype="bf16")
    drafts = Drafts({"first_layer": draft_folders["first_layer"]}, target)
    events = decode(target, PROMPTS[1], drafts["first_layer"])
    assert len(ids_of(events)) == 24
    assert_events_agree(events)


def test_drafts_may_switch_in_mid_answer(target: Target, drafts: Drafts) -> None:
    plain = ids_of(decode(target, PROMPTS[1], max_new_tokens=40))
    turns = ["first_layer", "other", None, "itself", "first_layer", "short", "none"]
    for gamma in (1, 3, 5):
        events = decode(
            target,
            PROMPTS[1],
            lambda index: drafts[turns[index % len(turns)]],
            gamma=gamma,
            max_new_tokens=40,
        )
        assert ids_of(events) == plain
        assert len({event.draft for event in events}) >= 4


@settings(max_examples=60)
@given(data=st.data())
def test_any_course_of_a_generation(data: st.DataObject, target: Target, drafts: Drafts) -> None:
    """Any prompt, gamma, length, order of drafts and moment of interruption."""
    prompt = data.draw(st.lists(st.integers(3, 49151), min_size=1, max_size=40))
    gamma = data.draw(st.integers(1, 8))
    limit = data.draw(st.integers(1, 20))
    turns = data.draw(st.lists(st.sampled_from([*DRAFTS, None]), min_size=1, max_size=6))
    asked_until = data.draw(st.integers(0, 12))
    asked = 0

    def interruption() -> FinishReason | None:
        nonlocal asked
        asked += 1
        return FinishReason.CANCELLED if asked > asked_until else None

    plain = ids_of(decode(target, prompt, max_new_tokens=limit))
    events = decode(
        target,
        prompt,
        lambda index: drafts[turns[index % len(turns)]],
        gamma=gamma,
        max_new_tokens=limit,
        interruption=interruption,
    )
    ids = ids_of(events)
    assert ids == plain[: len(ids)]
    if events[-1].finish_reason is FinishReason.CANCELLED:
        assert events[-1].committed == 0
    else:
        assert ids == plain
    assert_events_agree(events)
    assert_rows_are_of([*prompt, *ids], target.decoder, target.cache)
    for name in {event.draft for event in events if event.proposed}:
        assert_rows_are_of([*prompt, *ids], drafts.decoders[name], drafts.caches[name])
    assert ids_of(decode(target, prompt, drafts["first_layer"], max_new_tokens=limit)) == plain


@pytest.mark.parametrize("name", ["itself", "first_layer", "none"])
def test_end_of_sequence_inside_a_block(name: str, target: Target, drafts: Drafts) -> None:
    plain = ids_of(decode(without_ends(target), PROMPTS[1]))
    for end in plain[:8]:
        length = plain.index(end)
        ending = replace(target, end_of_sequence_ids=frozenset({end}))
        events = decode(ending, PROMPTS[1], drafts[name], gamma=6)
        assert ids_of(events) == plain[:length]
        assert events[-1].finish_reason is FinishReason.END_OF_SEQUENCE
        assert events[-1].generated_tokens == length
        assert end not in ids_of(events)
        assert_rows_are_of([*PROMPTS[1], *plain[:length]], target.decoder, target.cache)


@pytest.mark.parametrize("name", ["itself", "first_layer", "none"])
def test_stop_string_inside_a_block(name: str, target: Target, drafts: Drafts) -> None:
    plain = decode(target, PROMPTS[1], max_new_tokens=20)
    text = text_of(plain)
    for first in range(2, len(text) - 4, 7):
        stop = text[first : first + 3]
        events = decode(target, PROMPTS[1], drafts[name], gamma=6, max_new_tokens=20, stop=(stop,))
        assert text_of(events) == text[: text.index(stop)]
        assert events[-1].finish_reason is FinishReason.STOP_STRING
        ids = ids_of(events)
        assert ids == ids_of(plain)[: len(ids)]
        assert target.tokenizer.decode(ids).startswith(text_of(events))


@pytest.mark.parametrize("name", ["itself", "first_layer", "none"])
def test_the_context_is_used_to_its_end_and_not_beyond(
    name: str, target: Target, target_model: PreTrainedModel, drafts: Drafts
) -> None:
    for room in (1, 2, 5):
        prompt = [(31 * index) % 40000 + 5 for index in range(256 - room)]
        events = decode(target, prompt, drafts[name], gamma=6, max_new_tokens=1000)
        assert ids_of(events) == greedy_by_transformers(target_model, prompt, room, ends=[2])
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert target.cache.length == 255


def test_a_prompt_that_fills_the_context_is_too_long(target: Target) -> None:
    for length in (256, 300):
        with pytest.raises(PromptTooLongError, match=f"{length} tokens.*256"):
            decode(target, [5] * length)


def test_a_draft_of_shorter_context_stops_drafting(target: Target, drafts: Drafts) -> None:
    prompt = PROMPTS[1]
    events = decode(target, prompt, drafts["short"], gamma=3, max_new_tokens=40)
    assert ids_of(events) == ids_of(decode(target, prompt, max_new_tokens=40))
    drafted = [event for event in events if event.proposed]
    plain = [event for event in events if not event.proposed]
    assert len(prompt) + drafted[-1].generated_tokens <= 24 + 3 + 1
    assert [*drafted, *plain] == events
    # It says that it decodes plainly, and that nothing else was wanted there.
    assert {(event.draft, event.wanted) for event in plain} == {("none", "none")}
    assert not decode(target, [5] * 60, drafts["short"])[0].proposed


def test_an_interruption_in_mid_prompt(
    target: Target, drafts: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding_module, "PROMPT_ROWS", 16)
    prompt = list(range(500, 600))
    plain = ids_of(decode(target, prompt))
    asked = iter([None, None, *[FinishReason.TIME_LIMIT] * 9])
    target.cache.truncate(0)  # else the prompt would be known
    events = decode(target, prompt, drafts["itself"], interruption=lambda: next(asked))
    assert target.cache.length == 32
    assert [event.finish_reason for event in events] == [FinishReason.TIME_LIMIT]
    assert (ids_of(events), text_of(events)) == ([], "")
    assert ids_of(decode(target, prompt, drafts["itself"])) == plain


def test_nothing_of_a_request_stays_for_the_next(target: Target, drafts: Drafts) -> None:
    draft = drafts["first_layer"]
    before = decode(target, PROMPTS[1], draft)
    warm = sampling(2.0, seed=1)
    decode(target, PROMPTS[1], draft, gamma=9, sampling=warm, stop=("a",), max_new_tokens=3)
    assert decode(target, PROMPTS[1], draft) == before


@pytest.mark.parametrize("name", ["none", "first_layer", "other"])
def test_a_seed_gives_the_same_answer_again(name: str, target: Target, drafts: Drafts) -> None:
    def sampled(seed: int) -> list[int]:
        how = sampling(1.0, seed=seed, top_k=50)
        return ids_of(decode(target, PROMPTS[1], drafts[name], sampling=how))

    assert sampled(3) == sampled(3)
    assert sampled(3) != sampled(4)


def test_sampled_proposals_of_the_target_itself_are_accepted(
    target: Target, drafts: Drafts
) -> None:
    how = sampling(0.8, seed=1, top_p=0.9)
    events = decode(target, PROMPTS[1], drafts["itself"], sampling=how)
    assert sum(e.accepted for e in events) >= 0.95 * sum(e.proposed for e in events)


def test_a_draft_that_was_let_go_is_not_kept_alive(
    target: Target, draft_folders: dict[str, Path]
) -> None:
    """What the cache evicts in mid-answer must be free at once: the ledger says it is."""
    evicted = load_draft("other", draft_folders["other"], target)
    seen = weakref.ref(evicted)
    held: list[IndependentDraft] = [evicted]
    del evicted

    def choose(index: int) -> Draft | None:
        if index == 3:
            held.clear()
        if index == 4:
            gc.collect()
            assert seen() is None
        return held[0] if held else None

    assert len(decode(target, PROMPTS[1], choose)) > 4


# The law of sampled answers, end to end.

SIZE = 8


@pytest.fixture(scope="module")
def small(checkpoints: Checkpoints) -> tuple[Target, Drafts]:
    """A target of eight tokens, and drafts that differ from it more and less."""
    model = make_model(seed=11, vocab_size=SIZE, num_hidden_layers=2)
    target = load_target(checkpoints.save("eight", model), context_tokens=32)
    folders = {
        "near": checkpoints.save("eight-near", truncated(model, 1)),
        "far": checkpoints.save(
            "eight-far", make_model("qwen2", seed=12, vocab_size=SIZE, num_hidden_layers=1)
        ),
    }
    return without_ends(target), Drafts(folders, target)


def partial(drafts: Drafts, target: Target) -> IndependentDraft:
    """A draft whose head covers some tokens only, as those that memspec distill makes."""
    near = drafts.decoders["near"]
    ids = torch.tensor([1, 3, 4, 6])
    decoder = TorchDecoder(
        DecoderParts(
            near.config,
            near.embedding,
            near.layers,
            near.norm,
            DenseLinear(near.embedding.rows(ids)),
            head_token_ids=ids,
        )
    )
    cache = KeyValueCache(near.config, 32, torch.float32, CPU)
    return IndependentDraft("partial", decoder, cache, SIZE)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("none", {}),
        ("near", {}),
        ("near", {"top_k": 3}),
        ("far", {}),
        ("far", {"top_p": 0.8}),
        ("partial", {}),
        ("partial", {"temperature": 0.4, "top_k": 5}),
        ("lookup", {}),
        ("lookup", {"temperature": 0.7, "top_p": 0.9}),
    ],
)
def test_sampled_answers_have_the_targets_law(
    name: str, how: dict[str, float], small: tuple[Target, Drafts]
) -> None:
    target, drafts = small
    made = {"partial": lambda: partial(drafts, target), "lookup": lambda: NgramLookup(shortest=1)}
    draft: Draft | None = made[name]() if name in made else drafts[name]
    prompt, rounds = [5, 2, 5], 600
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(rounds):
        # Three tokens, of which up to two are proposed; the law of the first two is compared.
        events = decode(
            target, prompt, draft, max_new_tokens=3, sampling=sampling(**{"seed": seed, **how})
        )
        counts[tuple(ids_of(events)[:2])] += 1
    expected = law_of_two(target, prompt, Sampler(sampling(**how), CPU))
    outcomes = list(product(range(SIZE), repeat=2))
    assert_law([counts[o] for o in outcomes], [expected(*o) for o in outcomes])


def law_of_two(target: Target, prompt: list[int], sampler: Sampler) -> Callable[[int, int], float]:
    """Return the target's probability of two tokens after a prompt."""

    def after(context: list[int]) -> torch.Tensor:
        target.cache.truncate(0)
        return sampler.distribution(logits_of(target, context)[-1:])[0]

    first = after(prompt)
    second = torch.stack([after([*prompt, token]) for token in range(SIZE)])
    return lambda one, two: float(first[one] * second[one, two])


def test_a_prompt_that_begins_alike_is_not_fed_again(
    target: Target, drafts: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A robot's system prompt stays in the caches of target and draft."""
    system, first, second = list(range(300, 360)), [5, 6, 7, 8], [9, 10, 11]
    plain = ids_of(decode(target, [*system, *second]))
    decode(target, [*system, *first], drafts["other"])
    fed = []
    forward = TorchDecoder.forward

    def counted(
        decoder: TorchDecoder, ids: Sequence[int], cache: KeyValueCache, *parents: Any
    ) -> torch.Tensor:
        fed.append(len(ids))
        return forward(decoder, ids, cache, *parents)

    monkeypatch.setattr(TorchDecoder, "forward", counted)
    assert ids_of(decode(target, [*system, *second], drafts["other"])) == plain
    assert max(fed) < 10


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_the_answer(
    target: Target, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    prompt = [11, 12, 13]
    plain = ids_of(decode(target, prompt))
    logits, passes = TorchDecoder.logits, []

    def breaking(decoder: TorchDecoder, hidden: torch.Tensor) -> torch.Tensor:
        passes.append(len(hidden))
        found = logits(decoder, hidden)
        return found if len(passes) <= 4 else found.index_fill(1, torch.tensor([77]), wrong)

    with monkeypatch.context() as patch:
        patch.setattr(TorchDecoder, "logits", breaking)
        with pytest.raises(ModelError, match="fp32"):
            decode(target, prompt)
    assert len(passes) == 5
    assert target.cache.length == 0
    assert ids_of(decode(target, prompt)) == plain
