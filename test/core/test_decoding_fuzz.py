"""Any course of draft-and-verify against a slow reference: tokens, text, counts and caches.

The reference feeds the whole context anew for every token and looks at the whole text after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.conftest import Checkpoints
from core.tiny import (
    EVEN_COSTS,
    ManualClock,
    assert_rows_are_of,
    load_target,
    logits_of,
    make_model,
    sampling,
    truncated,
)
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.models.decoder import Decoder
from memspec_core.models.draft import plan_draft
from memspec_core.models.kv_cache import KeyValueCache, common_length
from memspec_core.models.target import Target
from memspec_core.request import PLAIN, FinishReason, GenerationRequest
from memspec_core.speculation import decoding as decoding_module
from memspec_core.speculation.chain import IndependentDraft
from memspec_core.speculation.decoding import Decoding
from memspec_core.speculation.lookup import NgramLookup
from memspec_core.speculation.planner import Planner
from memspec_core.speculation.proposal import Draft, Proposal
from memspec_core.speculation.sampling import Sampler
from memspec_core.speculation.tree import TreeDraft

CONTEXT = 20
SHORT = 9
PROMPT_ROWS = 4
MOST_TOKENS = 15
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens of several characters, of parts of one, and of none; two spellings of the same text.
PIECES = [b"a", b"b", b"ab", b"ba", b"c ", b"\xc3", b"\xa9", "é".encode(), b"\xe2\x82", b"\xac"]
PIECES += [b" ", b""]
SIZE = len(PIECES)
# So cold that only the most probable token has mass: the sampled path with a known result.
COLD = 1e-6


class PieceTokenizer:
    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(PIECES[token] for token in token_ids).decode(errors="replace")


def whole(token_ids: Sequence[int]) -> str:
    """Return the text of tokens without an unfinished character at its end."""
    return PieceTokenizer().decode(token_ids).rstrip(REPLACEMENT)


@dataclass(frozen=True)
class Reference:
    """How plain greedy decoding goes: `path`, the prompt and what follows it up to the edge.

    The answer may have `limit` tokens and ends for `reason` after `taken`, with `text`.
    """

    path: list[int]
    limit: int
    taken: int
    text: str
    reason: FinishReason


def agreement(proposal: Proposal, right: Sequence[int]) -> int:
    """Return how many of the right tokens some path of a proposal begins with."""
    parents = proposal.parents
    if parents is None:
        parents = tuple(range(-1, len(proposal.token_ids) - 1))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.token_ids, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return max((len(path) for path in paths if path == tuple(right[: len(path)])), default=0)


def greedy_path(target: Target, prompt: Sequence[int]) -> list[int]:
    path = list(prompt)
    while len(path) < CONTEXT:
        target.cache.truncate(0)
        path.append(int(logits_of(target, path)[-1].argmax()))
    return path


def read_off(
    path: list[int], prompt_tokens: int, ends: frozenset[int], stop: Sequence[str], limit: int
) -> Reference:
    """Cut the path after the first token that ends the answer."""
    answer: list[int] = []
    for token in path[prompt_tokens:]:
        if token in ends:
            return Reference(path, limit, len(answer), whole(answer), FinishReason.END_OF_SEQUENCE)
        answer.append(token)
        found = [at for text in stop if (at := whole(answer).find(text)) >= 0]
        if found:
            text = whole(answer)[: min(found)]
            return Reference(path, limit, len(answer), text, FinishReason.STOP_STRING)
        if len(answer) == limit:
            break
    return Reference(path, limit, len(answer), whole(answer), FinishReason.LENGTH)


class ScriptedDraft:
    """Proposes the path, each token shifted by the script; 0 is right.

    With `branches` it proposes trees: each gives how far back a node's parent is, 0 for the node
    before it. Keeps what a cache of it would hold, and checks that it is the context's beginning.
    """

    name = "scripted"
    kind = "scripted"

    def __init__(self) -> None:
        self.path: list[int] = []
        self.script: list[list[int]] = [[]]
        self.branches: list[int] = []
        self.held: list[int] = []
        self._calls = 0

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        assert len(self.held) < len(context)
        assert self.held == context[: len(self.held)] == self.path[: len(self.held)]
        shifts = self.script[self._calls % len(self.script)][:length]
        self._calls += 1
        if self.branches:
            self.held = [*context]
            return self._tree(self.path[len(context) :], shifts)
        right = self.path[len(context) : len(context) + len(shifts)]
        ids = [(token + shift) % SIZE for token, shift in zip(right, shifts, strict=True)]
        self.held = [*context, *ids[:-1]]
        return Proposal(tuple(ids))

    def read(self, context: Sequence[int]) -> None:
        self.held = list(context[:-1])

    def known(self, context: Sequence[int]) -> int:
        return common_length(self.held, context)

    def _tree(self, right: list[int], shifts: list[int]) -> Proposal:
        """Shift the token that is right at each node's depth; no two children are the same."""
        ids: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for shift in shifts:
            parent = max(-1, len(ids) - 1 - self.branches[len(ids) % len(self.branches)])
            depth = depths[parent] + 1 if parent >= 0 else 0
            token = (right[depth] + shift) % SIZE
            if (token, parent) not in zip(ids, parents, strict=True):
                ids.append(token)
                parents.append(parent)
                depths.append(depth)
        return Proposal(tuple(ids), parents=tuple(parents))

    def rollback(self, length: int) -> None:
        del self.held[length:]


class Watched:
    """Passes on to a draft and remembers what it proposed last, None if it was not asked."""

    def __init__(self, draft: Draft) -> None:
        self.name, self.kind = draft.name, draft.kind
        self.last: Proposal | None = None
        self._draft = draft

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        assert length > 0
        proposal = self._draft.propose(context, length, sampler)
        assert len(proposal.token_ids) <= length
        self.last = proposal
        return proposal

    def read(self, context: Sequence[int]) -> None:
        self._draft.read(context)

    def known(self, context: Sequence[int]) -> int:
        return self._draft.known(context)

    def rollback(self, length: int) -> None:
        self._draft.rollback(length)


@dataclass
class Bench:
    """A target with drafts of every kind, and their caches; `twin` is for the reference."""

    target: Target
    twin: Target
    scripted: ScriptedDraft
    drafts: dict[str, Watched]
    decoders: dict[str, Decoder]
    caches: dict[str, KeyValueCache]

    def forget(self) -> None:
        self.target.cache.truncate(0)
        for draft in self.drafts.values():
            draft.rollback(0)


@pytest.fixture(scope="module")
def bench(checkpoints: Checkpoints) -> Bench:
    model = make_model(seed=28, vocab_size=SIZE, num_hidden_layers=2)
    folder = checkpoints.save("pieces", model)
    target = load_target(folder, context_tokens=CONTEXT)
    short = make_model(seed=28, vocab_size=SIZE, num_hidden_layers=2, max_position_embeddings=SHORT)
    folders = {
        "itself": folder,
        "near": checkpoints.save("pieces-near", truncated(model, 1)),
        "short": checkpoints.save("pieces-short", short),
    }
    folders |= {f"{name} tree": folder for name, folder in folders.items()}
    scripted = ScriptedDraft()
    drafts: dict[str, Draft] = {"scripted": scripted, "lookup": NgramLookup(3, 1)}
    decoders: dict[str, Decoder] = {}
    caches: dict[str, KeyValueCache] = {}
    for name, place in folders.items():
        decoders[name], caches[name] = plan_draft(name, str(place), target).load(target)
        kind = TreeDraft if name.endswith("tree") else IndependentDraft
        drafts[name] = kind(name, decoders[name], caches[name], SIZE)
    pieces: Any = PieceTokenizer()
    return Bench(
        replace(target, tokenizer=pieces),
        load_target(folder, context_tokens=CONTEXT),
        scripted,
        {name: Watched(draft) for name, draft in drafts.items()},
        decoders,
        caches,
    )


@pytest.fixture(autouse=True)
def prompts_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_module, "PROMPT_ROWS", PROMPT_ROWS)


@dataclass
class Interruptions:
    """Gives a reason at the look `at`, counted from 0, and remembers whether it just did."""

    at: int
    reason: FinishReason
    looks: int = 0
    given: bool = False

    def __call__(self) -> FinishReason | None:
        self.given = self.looks == self.at
        self.looks += 1
        return self.reason if self.given else None


@dataclass
class Course:
    """One generation, its events checked against the reference as they come."""

    bench: Bench
    reference: Reference
    prompt_tokens: int
    decoding: Decoding
    interruptions: Interruptions
    taken: int = 0
    events: list[Iteration] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    @property
    def answer(self) -> list[int]:
        """The reference's tokens as far as they were taken."""
        return self.reference.path[self.prompt_tokens : self.prompt_tokens + self.taken]

    def iterate(self, draft: Watched | None, length: int) -> None:
        if draft is not None:
            draft.last = None
        event = self.decoding.iterate(draft, "wanted", length, IterationSeconds())
        self.events.append(event)
        proposal = draft.last if draft is not None else None
        if draft is not None and proposal is not None:
            self.asked.add(draft.name)
        if self.interruptions.given:
            self._check_closing(event, self.interruptions.reason)
        else:
            self._check(event, draft, proposal or Proposal())
        self._check_caches()

    def fail(self) -> None:
        """End the way that a fault does."""
        event = self.decoding.rest()
        self.events.append(event)
        self._check_closing(event, None)

    def _check(self, event: Iteration, draft: Watched | None, proposal: Proposal) -> None:
        proposed = proposal.token_ids
        agreed = agreement(proposal, self.reference.path[self.prompt_tokens + self.taken :])
        left = self.reference.taken - self.taken
        committed = min(agreed + 1, left)
        # Each pass adds a token of the target's own, for which there must be room as well.
        assert not proposed or len(proposed) < self.reference.limit - self.taken
        self.taken += committed
        # An end of sequence is no part of the answer: it takes one token more to be seen.
        ending = self.reference.reason is FinishReason.END_OF_SEQUENCE
        ended = agreed + 1 >= left + ending
        name = draft.name if draft is not None and proposed else PLAIN
        assert event.draft == name
        assert event.wanted == (PLAIN if draft is not None and not proposed else "wanted")
        assert (event.proposed, event.accepted) == (len(proposed), min(agreed, committed))
        assert event.committed == committed
        assert event.finish_reason == (self.reference.reason if ended else None)
        self._check_answer(event, ended)

    def _check_closing(self, event: Iteration, reason: FinishReason | None) -> None:
        assert (event.proposed, event.accepted, event.committed) == (0, 0, 0)
        assert event.finish_reason == reason
        assert self.text == whole(self.answer)
        assert self.ids == self.answer
        assert event.generated_tokens == self.taken

    def _check_answer(self, event: Iteration, ended: bool) -> None:
        """What was handed out is the reference's, and all of it at the end."""
        assert event.sequence == len(self.events) - 1
        assert self.ids == self.answer[: len(self.ids)]
        if ended:
            assert self.text == self.reference.text
            assert event.generated_tokens == len(self.ids)
        else:
            assert self.reference.text.startswith(self.text)
            assert event.generated_tokens == self.taken
        if not (ended and self.reference.reason is FinishReason.STOP_STRING):
            assert event.generated_tokens == self.taken
        elif REPLACEMENT not in self.reference.text:
            # The tokens are those of the text; only the last may reach into the stop string.
            assert whole(self.ids).startswith(self.text)
            assert len(whole(self.ids[:-1])) <= len(self.text)

    def _check_caches(self) -> None:
        """Nothing but the context is in any cache, and its newest token in none."""
        known = self.prompt_tokens + self.taken - 1
        length = self.bench.target.cache.length
        assert length == known if self.taken else length <= known
        for name in self.asked & {*self.bench.caches}:
            assert self.bench.caches[name].length <= known
        if "scripted" in self.asked:
            held = self.bench.scripted.held
            assert len(held) <= known
            assert held == self.reference.path[: len(held)]

    def check_rows(self) -> None:
        """The rows themselves are those of the context."""
        self._check_caches()
        context = self.reference.path[: self.prompt_tokens + self.taken]
        assert_rows_are_of(context, self.bench.target.decoder, self.bench.target.cache)
        for name in self.asked & {*self.bench.caches}:
            assert_rows_are_of(context, self.bench.decoders[name], self.bench.caches[name])

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]


NAMES = ["scripted", "lookup", "itself", "near", "short", None]
NAMES += ["itself tree", "near tree", "short tree"]
shifts = st.lists(st.sampled_from([0, 0, 0, 1, 5]), max_size=8)
turns = st.lists(
    st.tuples(st.sampled_from([*NAMES, "scripted"]), st.integers(0, 8)), min_size=1, max_size=8
)


def begin(data: st.DataObject, bench: Bench) -> Course:
    """Draw a request and make ready to run it."""
    prompt = data.draw(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=CONTEXT - 1))
    path = greedy_path(bench.twin, prompt)
    answer = path[len(prompt) :]
    ends = frozenset(data.draw(st.lists(st.sampled_from(answer), max_size=1)))
    text = whole(answer)
    stop = []
    for _ in range(data.draw(st.integers(0, 2)) if text else 0):
        first = data.draw(st.integers(0, len(text) - 1))
        stop.append(text[first : first + data.draw(st.integers(1, 5))])
    limit = data.draw(st.integers(1, MOST_TOKENS))
    bench.scripted.path, bench.scripted.held = path, []
    bench.scripted.branches = data.draw(st.lists(st.integers(0, 4), max_size=8))
    bench.scripted.script = data.draw(st.lists(shifts, min_size=1, max_size=6))
    interruptions = Interruptions(
        data.draw(st.integers(0, 40)),
        data.draw(st.sampled_from([FinishReason.CANCELLED, FinishReason.TIME_LIMIT])),
    )
    request = GenerationRequest(
        prompt="-",
        stop=tuple(stop),
        sampling=sampling(data.draw(st.sampled_from([0.0, COLD])), seed=3),
    )
    decoding = Decoding(
        replace(bench.target, end_of_sequence_ids=ends),
        prompt,
        request,
        max_new_tokens=limit,
        interruption=interruptions,
        planner=Planner(EVEN_COSTS),
        clock=ManualClock(),
    )
    reference = read_off(path, len(prompt), ends, stop, min(limit, CONTEXT - len(prompt)))
    return Course(bench, reference, len(prompt), decoding, interruptions)


@settings(max_examples=150)
@given(data=st.data())
def test_any_course_is_the_slow_references(data: st.DataObject, bench: Bench) -> None:
    """Two generations on the same caches: the second may keep what its prompt shares."""
    bench.forget()
    for _ in range(2):
        course = begin(data, bench)
        order = data.draw(turns)
        fault_after = data.draw(st.integers(0, 30))
        course.decoding.read_prompt()
        while not course.decoding.ended:
            name, length = order[len(course.events) % len(order)]
            course.iterate(None if name is None else bench.drafts[name], length)
            if len(course.events) > fault_after and not course.decoding.ended:
                course.fail()
                break
        course.decoding.close()
        course.check_rows()
