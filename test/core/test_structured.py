"""Answers with a JSON schema: valid, the same whatever proposes, and of the target's own law."""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.tiny import (
    EVEN_COSTS,
    ManualClock,
    assert_law,
    assert_rows_are_of,
    ids_of,
    load_draft,
    load_feature_draft,
    load_target,
    logits_of,
    make_settings,
    never,
    sampling,
    text_of,
    write_feature_draft,
)
from memspec_core import FinishReason, GenerationRequest, Runtime
from memspec_core.errors import MemoryBudgetError, RequestError, SchemaError
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.models.draft import plan_draft
from memspec_core.models.target import Target
from memspec_core.request import SamplingSettings
from memspec_core.speculation import schema as schema_module
from memspec_core.speculation import structure as structure_module
from memspec_core.speculation.decoding import Decoding
from memspec_core.speculation.lookup import NgramLookup
from memspec_core.speculation.planner import Planner
from memspec_core.speculation.proposal import Draft, Proposal
from memspec_core.speculation.sampling import Sampler
from memspec_core.speculation.schema import SchemaChecker
from memspec_core.speculation.structure import Grammars
from memspec_core.speculation.tree import TreeDraft

TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["fetch", "go_to", "say"]},
        "object": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["tool", "object"],
    "additionalProperties": False,
}
DIGITS: dict[str, Any] = {
    "type": "array",
    "items": {"enum": [1, 2, 3]},
    "minItems": 2,
    "maxItems": 2,
}
WORD: dict[str, Any] = {"type": "string"}


@dataclass
class Bench:
    """A target with its grammars and everything that proposes for it."""

    target: Target
    drafts: dict[str, Draft]
    booked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grammars = Grammars(self.target, self.booked.append)

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self.target.tokenizer.backend.encode(text)]

    def decode(
        self,
        schema: dict[str, Any],
        prompt: str = "go",
        draft: Draft | None = None,
        lookup: NgramLookup | None = None,
        *,
        length: int = 3,
        max_new_tokens: int = 200,
        how: SamplingSettings | None = None,
    ) -> list[Iteration]:
        text = json.dumps(schema)
        decoding = Decoding(
            self.target,
            self.encode(prompt),
            GenerationRequest(prompt="-", json_schema=text, sampling=how or SamplingSettings()),
            max_new_tokens=max_new_tokens,
            planner=Planner(EVEN_COSTS),
            lookup=lookup,
            document=self.grammars.begin(text),
            interruption=never,
            clock=ManualClock(),
        )
        events: list[Iteration] = []
        decoding.read_prompt()
        while not decoding.ended:
            wanted = "none" if draft is None else draft.name
            events.append(decoding.iterate(draft, wanted, length, IterationSeconds()))
        decoding.close()
        context = [*self.encode(prompt), *ids_of(events)]
        assert_rows_are_of(context, self.target.decoder, self.target.cache)
        return events


@pytest.fixture(scope="module")
def bench(
    target_folder: Path,
    draft_folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Bench:
    target = load_target(target_folder, taps=(0, 2))
    drafts: dict[str, Draft] = {
        name: load_draft(name, draft_folders[name], target) for name in ("itself", "first_layer")
    }
    decoder, cache = plan_draft("tree", str(draft_folders["itself"]), target).load(target)
    size = target.decoder.config.vocabulary_size
    drafts["tree"] = TreeDraft("tree", decoder, cache, size)
    folder = tmp_path_factory.mktemp("structured")
    path = write_feature_draft(folder / "feature", target, (0, 2))
    drafts["feature"] = load_feature_draft("feature", path, target)
    return Bench(target, drafts)


values = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 300},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{1,4}$"},
        {"enum": ["red", "red mug", 7, None]},
        {"const": "fixed \u00fc"},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    ]
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any] = values) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
    required = [name for name in names if draw(st.booleans())]
    properties = {name: draw(inner) for name in names}
    closed = {"additionalProperties": False, "required": required}
    return {"type": "object", "properties": properties, **closed}


schemas = st.one_of(values, objects(), objects(st.one_of(values, objects())))


def assert_valid(schema: dict[str, Any], events: Sequence[Iteration]) -> None:
    assert events[-1].finish_reason is FinishReason.END_OF_SEQUENCE
    jsonschema.validate(json.loads(text_of(events)), schema)


@settings(max_examples=25)
@given(schema=schemas, seed=st.integers(0, 3))
def test_every_answer_is_valid_and_the_same_whatever_proposes(
    bench: Bench, schema: dict[str, Any], seed: int
) -> None:
    prompt = "take the red mug" * seed + json.dumps(schema)[:80]
    plain = bench.decode(schema, prompt)
    assert_valid(schema, plain)
    for name, draft in bench.drafts.items():
        assert ids_of(bench.decode(schema, prompt, draft)) == ids_of(plain), name
    lookup = NgramLookup(shortest=1)
    # The second time the prompt has the answer in it, so that looking it up helps.
    for text in (prompt, prompt + text_of(plain)):
        without = bench.decode(schema, text)
        assert ids_of(bench.decode(schema, text, lookup=lookup)) == ids_of(without)


@settings(max_examples=15)
@given(schema=schemas, seed=st.integers(0, 1000))
def test_sampled_answers_are_valid(bench: Bench, schema: dict[str, Any], seed: int) -> None:
    for draft in (None, bench.drafts["first_layer"], bench.drafts["tree"]):
        assert_valid(schema, bench.decode(schema, draft=draft, how=sampling(seed=seed)))


def test_drafts_and_lookups_have_their_part(bench: Bench) -> None:
    plain = bench.decode(TOOL)
    for name in ("itself", "tree"):
        events = bench.decode(TOOL, draft=bench.drafts[name])
        assert sum(event.accepted for event in events) > 0, name
        assert len(events) < len(plain)
    again = bench.decode(TOOL, "go" + text_of(plain), lookup=NgramLookup(shortest=1))
    assert sum(event.accepted for event in again) > 0


def test_what_is_forced_takes_no_iteration_of_its_own(bench: Bench) -> None:
    events = bench.decode({"const": {"tool": "go_to", "place": "the kitchen"}})
    assert text_of(events) == '{"tool": "go_to", "place": "the kitchen"}'
    assert sum(event.committed for event in events) == len(ids_of(events)) > 5
    assert len(events) == 1


class Scripted:
    """Draws each proposal from a law of its own, of which one token may never follow."""

    name = kind = "scripted"

    def __init__(self, bench: Bench, *, certain: bool, tree: bool = False) -> None:
        self._size = bench.target.decoder.config.vocabulary_size
        self._tokens = [bench.encode(text)[0] for text in ("1", "2", "3", ",", "]", "mug")]
        self._certain, self._tree = certain, tree

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        law = torch.zeros(self._size)
        law[self._tokens] = torch.tensor([0.4, 0.05, 0.0, 0.05, 0.05, 0.45])
        if self._tree:
            roots = self._tokens[:2]
            return Proposal((*roots, self._tokens[5], self._tokens[3]), parents=(-1, -1, -1, 0))
        if self._certain:
            return Proposal((self._tokens[len(context) % 3],))
        drawn = tuple(sampler.draw(law) for _ in range(min(length, 2)))
        return Proposal(drawn, torch.stack([law] * len(drawn)))

    def read(self, context: Sequence[int]) -> None: ...

    def known(self, context: Sequence[int]) -> int:
        return len(context)

    def rollback(self, length: int) -> None: ...


def law_of(bench: Bench, schema: dict[str, Any], how: SamplingSettings) -> dict[str, float]:
    """Return the probability of each document, by following all of them."""
    sampler = Sampler(how, torch.device("cpu"))
    law: dict[str, float] = {}
    waiting: list[tuple[list[int], float]] = [([], 1.0)]
    while waiting:
        taken, chance = waiting.pop()
        document = bench.grammars.begin(json.dumps(schema))
        document.take(*taken)
        if document.complete:
            text = bench.target.tokenizer.decode(taken)
            law[text] = law.get(text, 0.0) + chance
            continue
        bench.target.cache.truncate(0)
        logits = logits_of(bench.target, [*bench.encode("go"), *taken])[-1:]
        p = sampler.distribution(document.masked_along(logits, []))[0]
        likely = p.nonzero()[:, 0].tolist()
        waiting += [([*taken, token], chance * float(p[token])) for token in likely]
    return law


@pytest.mark.parametrize("how", [sampling(2.0), sampling(3.0, top_k=2)], ids=["plain", "top-k"])
@pytest.mark.parametrize("kind", ["none", "drawn", "certain", "tree"])
def test_sampled_answers_have_the_targets_law_over_what_may_follow(
    bench: Bench, kind: str, how: SamplingSettings
) -> None:
    law = law_of(bench, DIGITS, how)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-4)
    draft = Scripted(bench, certain=kind == "certain", tree=kind == "tree")
    counts: Counter[str] = Counter()
    accepted = rejected = 0
    for seed in range(250):
        how = SamplingSettings(how.temperature, how.top_p, how.top_k, seed)
        events = bench.decode(DIGITS, draft=None if kind == "none" else draft, how=how)
        counts[text_of(events)] += 1
        accepted += sum(event.accepted for event in events)
        rejected += sum(event.proposed - event.accepted for event in events)
    assert kind == "none" or (accepted > 20 and rejected > 20)
    assert set(counts) <= set(law)
    assert_law([counts[text] for text in law], list(law.values()))


def test_a_cut_document_is_told_by_its_reason(bench: Bench) -> None:
    whole = bench.decode(TOOL)
    for length in range(1, len(ids_of(whole))):
        cut = bench.decode(TOOL, max_new_tokens=length)
        assert cut[-1].finish_reason is FinishReason.LENGTH
        assert ids_of(cut) == ids_of(whole)[:length]
    exact = bench.decode(TOOL, max_new_tokens=len(ids_of(whole)))
    assert exact[-1].finish_reason is FinishReason.END_OF_SEQUENCE
    assert text_of(exact) == text_of(whole)


def test_what_becomes_too_complex_on_the_way_ends_the_answer_with_its_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few_states() -> Any:
        return schema_module.library().LLParserLimits(max_lexer_states=12, verbose_errors=False)

    monkeypatch.setattr(structure_module, "limits", few_states)
    grown = {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"}
    with pytest.raises(SchemaError, match="too complex"):
        bench.decode(grown)
    monkeypatch.undo()
    assert_valid(TOOL, bench.decode(TOOL))


def test_the_table_of_tokens_is_built_once(target: Target) -> None:
    booked: list[int] = []
    grammars = Grammars(target, booked.append)
    for schema in (TOOL, WORD, TOOL):
        grammars.begin(json.dumps(schema))
    assert len(booked) == 1
    assert booked[0] > 2**20


REFUSED = {
    "no JSON": ("{", "no JSON"),
    "no object": ("[1]", "must be a JSON object"),
    "too long": (json.dumps({"title": "x" * 70_000}), "longer than 65536 bytes"),
    "brackets": ('{"a":' + "[" * 30_000, "nested too deeply|no JSON"),
    "deep": ('{"items":' * 70 + "{}" + "}" * 70, "deeper than 64"),
    "unknown type": ('{"type": "strin"}', "Invalid type"),
    "unknown keyword": ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "unknown format": ('{"type": "string", "format": "mood"}', "Unknown format"),
    "not": ('{"not": {}}', "not"),
    "contradiction": ('{"type": "integer", "minimum": 5, "maximum": 3}', "greater than"),
    "no document": ('{"$ref": "#"}', "No document|not supported"),
    "remote": ('{"$ref": "http://example.org/a.json"}', "not present"),
    "look-around": ('{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    "multiple": ('{"type": "integer", "multipleOf": 99991}', "multipleOf"),
    "multiples": ('{"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}', "multipleOf"),
    "patterns": (
        json.dumps({"allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(40)]}),
        "combines",
    ),
    "not a number": ('{"type": "number", "multipleOf": NaN}', "NaN"),
    "huge number": ('{"type": "integer", "minimum": 100000000000000000000}', "exact"),
    "endless number": ('{"type": "number", "maximum": 1e400}', "exact"),
    "lenient": ('{"x-guidance": {"lenient": true}, "uniqueItems": true}', "uniqueItems"),
}


@pytest.fixture(scope="module")
def runtime(target_folder: Path) -> Any:
    running = Runtime(make_settings(target_folder))
    running.load()
    running.open()
    yield running
    running.close()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_with_its_reason(runtime: Runtime, case: str) -> None:
    schema, reason = REFUSED[case]
    with pytest.raises(SchemaError, match=reason) as caught:
        runtime.check(GenerationRequest(prompt="go", json_schema=schema))
    assert len(str(caught.value)) < 400


def test_stop_strings_are_refused_beside_a_schema(runtime: Runtime) -> None:
    request = GenerationRequest(prompt="go", json_schema=json.dumps(TOOL), stop=("x",))
    with pytest.raises(RequestError, match="not both"):
        runtime.check(request)


def test_a_runtime_answers_with_a_document(runtime: Runtime) -> None:
    before = runtime.snapshot().memory.target_bytes
    request = GenerationRequest(prompt="go", json_schema=json.dumps(TOOL), max_new_tokens=60)
    results = [runtime.submit(request).result() for _ in range(2)]
    for result in results:
        assert result.finish_reason is FinishReason.END_OF_SEQUENCE
        jsonschema.validate(json.loads(result.text), TOOL)
    assert results[0].text == results[1].text
    assert runtime.snapshot().memory.target_bytes > before


def test_without_memory_for_the_table_the_goal_is_aborted(
    target: Target, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> None:
        raise MemoryBudgetError(f"No room for {size} bytes.")

    grammars = Grammars(target, refuse)
    for _ in range(2):
        with pytest.raises(MemoryBudgetError):
            grammars.begin(json.dumps(TOOL))


def test_without_the_library_only_schemas_are_refused(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    runtime = Runtime(make_settings(target_folder))
    runtime.load()
    try:
        runtime.open()
        with pytest.raises(SchemaError, match="pip install llguidance"):
            runtime.submit(GenerationRequest(prompt="go", json_schema=json.dumps(TOOL)))
        result = runtime.submit(GenerationRequest(prompt="go", max_new_tokens=4)).result()
        assert len(result.token_ids) == 4
    finally:
        runtime.close()


def test_what_takes_too_long_is_refused_and_blocks_only_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    compile_really: Callable[..., None] = schema_module._try
    checker = SchemaChecker(patience_seconds=0.05)
    known, slow, other = (json.dumps({"const": name}) for name in ("known", "slow", "other"))
    patient = SchemaChecker(patience_seconds=60.0)
    patient.check(known)
    checker._known.update(patient._known)

    def compile_when_told(*arguments: Any) -> None:
        release.wait()
        compile_really(*arguments)

    monkeypatch.setattr(schema_module, "_try", compile_when_told)
    with pytest.raises(SchemaError, match="longer than"):
        checker.check(slow)
    with pytest.raises(SchemaError, match="still being compiled"):
        checker.check(other)
    checker.check(known)
    release.set()
    assert checker._compiling is not None
    checker._compiling.join()
    checker._patience_seconds = 60.0
    checker.check(other)
