"""Decoding traces: what is written, and the figures that are computed from them."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from core.tiny import load_target
from memspec_core.cli.main import main
from memspec_core.errors import CacheMismatchError, TraceError
from memspec_core.evaluation.acceptance import (
    as_json,
    beside_lookup,
    dynamic_walk,
    gains,
    matrix,
    permuted,
    rate_interval,
    ratio_interval,
    static_oracle,
    walk,
)
from memspec_core.evaluation.acceptance_report import table
from memspec_core.measurement.trace import (
    Trace,
    TracedPrompt,
    TraceHeader,
    claim_trace,
    part_file,
    read_trace,
    write_part,
)
from memspec_core.training.prompts import PromptSet
from memspec_core.training.traces import PROMPTS_A_PART, TracePlan, collect_trace

HEADER = TraceHeader("t", "p", {"a": "1", "b": "2", "lookup": ""}, 8, 16, states=False)


def traced(accepted: Sequence[Sequence[int]], matched: Sequence[int] = (), **changes: Any) -> Any:
    count = len(accepted)
    prompt = TracedPrompt(
        domain="sums",
        prompt_ids=np.arange(3, dtype=np.int32),
        token_ids=np.arange(count, dtype=np.int32),
        accepted=np.asarray(accepted, np.uint8),
        matched=np.asarray(matched or [0] * count, np.uint8),
    )
    return replace(prompt, **changes)


# Files


def test_what_is_written_is_read(tmp_path: Path) -> None:
    claim_trace(tmp_path, HEADER)
    prompts = [
        traced([[1, 0, 0], [0, 2, 1]], states=np.ones((2, 4), np.float16)),
        traced([[3, 0, 8]], domain="law", states=np.zeros((1, 4), np.float16)),
    ]
    write_part(part_file(tmp_path, 0), prompts)
    claim_trace(tmp_path, HEADER)  # to go on with it is no other trace
    found = read_trace(tmp_path, "t")
    assert found.header == HEADER
    assert found.drafts == ("a", "b", "lookup")
    assert found.domains == ("sums", "law")
    for one, other in zip(found.prompts, prompts, strict=True):
        for name in ("prompt_ids", "token_ids", "accepted", "matched", "states"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_traces_of_something_else_are_refused(tmp_path: Path) -> None:
    claim_trace(tmp_path, HEADER)
    with pytest.raises(CacheMismatchError, match="another drafts"):
        claim_trace(tmp_path, replace(HEADER, drafts={"a": "3", "lookup": ""}))
    with pytest.raises(TraceError, match="no prompts yet"):
        read_trace(tmp_path)
    write_part(part_file(tmp_path, 0), [traced([[1, 0, 0]])])
    with pytest.raises(TraceError, match="another target"):
        read_trace(tmp_path, "u")


def test_damaged_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.json"):
        read_trace(tmp_path)
    for content in ("", "[]", "{}", json.dumps({"format_version": 1, "length": 3})):
        (tmp_path / "trace.json").write_text(content)
        with pytest.raises(TraceError, match=r"trace\.json"):
            read_trace(tmp_path)
    (tmp_path / "trace.json").write_text(json.dumps({"format_version": 2} | asdict(HEADER)))
    with pytest.raises(TraceError, match="format 2"):
        read_trace(tmp_path)
    (tmp_path / "trace.json").unlink()
    claim_trace(tmp_path, HEADER)
    part = part_file(tmp_path, 0)
    write_part(part, [traced([[1, 0, 0]])])
    whole = part.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"no zip at all"):
        part.write_bytes(broken)
        with pytest.raises(TraceError, match="damaged"):
            read_trace(tmp_path)


# Figures


def test_a_walk_is_a_generation() -> None:
    prompt = traced([[2, 0, 0], [1, 0, 0], [0, 0, 0], [9, 0, 0], [8, 0, 0], [7, 0, 0]])
    # Gains of 3 at place 0, then of 4 at place 3, of which three tokens are left.
    found = walk([prompt], lambda p: gains(p, 0, 3))
    assert (found.tokens.tolist(), found.iterations.tolist()) == ([6], [2])
    assert found.tokens_an_iteration == 3.0
    assert walk([prompt], lambda p: gains(p, 1, 3)).tokens_an_iteration == 1.0


def test_a_sure_lookup_goes_first() -> None:
    prompt = traced([[5, 0, 1], [5, 0, 1], [5, 0, 1]], matched=[2, 3, 4])
    assert beside_lookup(prompt, 0, 2, 4).tolist() == [5, 2, 2]


def test_the_matrix_has_each_draft_alone_and_beside_the_lookup() -> None:
    trace = Trace(HEADER, [traced([[1, 0, 0]] * 4), traced([[0, 3, 0]] * 4, domain="law")])
    found = matrix(trace, 3)
    assert list(found) == ["a", "a + lookup", "b", "b + lookup", "lookup"]
    assert found["a"]["sums"].tokens_an_iteration == 2.0
    assert found["b"]["law"].tokens_an_iteration == 4.0
    assert found["b"]["sums"].tokens_an_iteration == 1.0


random_prompts = st.lists(
    st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=7).map(traced),
    min_size=1,
    max_size=3,
)


def fewest(prompt: TracedPrompt, interval: int) -> int:
    """Try all choices."""
    count = len(prompt.token_ids)
    best = count
    for choice in itertools.product((0, 1), repeat=-(-count // interval)):
        place = spent = 0
        while place < count:
            place += int(prompt.accepted[place, choice[spent // interval]]) + 1
            spent += 1
        best = min(best, spent)
    return best


@given(random_prompts, st.integers(1, 3))
def test_the_dynamic_oracle_is_exact(prompts: list[TracedPrompt], interval: int) -> None:
    found = dynamic_walk(prompts, (0, 1), 3, interval)
    assert found.iterations.tolist() == [fewest(p, interval) for p in prompts]
    fixed = walk(prompts, static_oracle((0, 1), 3))
    alone = [walk(prompts, lambda p, c=c: gains(p, c, 3)) for c in (0, 1)]  # type: ignore[misc]
    assert (found.iterations <= fixed.iterations).all()
    least = np.minimum(alone[0].iterations, alone[1].iterations)
    assert (fixed.iterations == least).all()


def test_the_null_control_exchanges_roles_at_each_place() -> None:
    trace = Trace(HEADER, [traced([[3, 0, 7]] * 200)])
    [prompt] = permuted(trace, (0, 1)).prompts
    assert (prompt.accepted[:, 2] == 7).all()
    assert (np.sort(prompt.accepted[:, :2], axis=1) == [0, 3]).all()
    assert 60 < int((prompt.accepted[:, 0] == 3).sum()) < 140
    [again] = permuted(trace, (0, 1)).prompts
    np.testing.assert_array_equal(prompt.accepted, again.accepted)


def test_intervals_are_over_prompts() -> None:
    same = walk([traced([[1, 0, 0]] * 4)] * 9, lambda p: gains(p, 0, 3))
    assert rate_interval(same) == (2.0, 2.0, 2.0)
    plain = walk([traced([[1, 0, 0]] * 4)] * 9, lambda p: gains(p, 1, 3))
    assert ratio_interval(same, plain) == (2.0, 2.0, 2.0)
    mixed = walk([traced([[n % 3, 0, 0]] * 6) for n in range(30)], lambda p: gains(p, 0, 3))
    value, lower, upper = rate_interval(mixed)
    assert lower < value < upper


def test_figures_as_text() -> None:
    figures = as_json(Trace(HEADER, [traced([[1, 0, 0]] * 4)]), (3, 4))
    text = table(figures)
    assert "a + lookup" in text
    assert "best a prompt" in text
    json.dumps(figures)


# From end to end


def test_a_trace_of_real_models(target_folder: Path, distilled: Path, tmp_path: Path) -> None:
    parameters = {
        "target.path": str(target_folder),
        "drafts.names": ["tiny"],
        "drafts.tiny.path": str(distilled),
        "dtype": "fp32",
        "context_tokens": 256,
        "memory.floor_mib": 0,
        "memory.budget_mib": 1000,
    }
    texts = tuple(f"What is {n} plus {n}?" for n in range(PROMPTS_A_PART + 2))
    sets = (PromptSet("sums", texts), PromptSet("long", ("word " * 300,)))
    plan = TracePlan(parameters, sets, tmp_path, length=3, max_new_tokens=8, states=True)
    told: list[tuple[str, int, int]] = []
    collect_trace(plan, lambda *progress: told.append(progress))
    assert told == [("trace", 1, 2), ("trace", 2, 2)]
    found = read_trace(tmp_path)
    assert len(found.prompts) == len(texts)  # the long one leaves no room
    assert found.drafts == ("tiny", "lookup")
    target = load_target(target_folder)
    for prompt in found.prompts[:3]:
        context = [*prompt.prompt_ids.tolist(), *prompt.token_ids.tolist()]
        first = len(prompt.prompt_ids)
        assert prompt.states is not None
        assert prompt.states.shape == (len(prompt.token_ids), 64)
        target.cache.truncate(0)
        hidden = target.decoder.forward(context[:-1], target.cache)
        logits = target.decoder.head(torch.from_numpy(prompt.states).to(hidden.dtype))
        assert logits.argmax(-1).tolist() == context[first:]
        # A run that is right here goes on, one shorter, at the next place.
        runs = prompt.accepted[:, 0].astype(int)
        assert all(later >= now - 1 for now, later in itertools.pairwise(runs.tolist()))
    before = part_file(tmp_path, 0).stat().st_mtime_ns
    part_file(tmp_path, 1).unlink()
    collect_trace(plan, lambda *_: None)
    assert part_file(tmp_path, 0).stat().st_mtime_ns == before
    assert len(read_trace(tmp_path).prompts) == len(texts)
    with pytest.raises(CacheMismatchError, match="max_new_tokens"):
        collect_trace(replace(plan, max_new_tokens=9), lambda *_: None)


def test_the_command(
    target_folder: Path, distilled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "params.yaml"
    drafts = {"names": ["tiny"], "tiny": {"path": str(distilled)}}
    memory = {"floor_mib": 0, "budget_mib": 1000}
    values = {"target": {"path": str(target_folder)}, "drafts": drafts, "memory": memory}
    values |= {"dtype": "fp32", "context_tokens": 256}
    config.write_text(yaml.safe_dump({"/**": {"ros__parameters": values}}))
    prompts = tmp_path / "sums.jsonl"
    prompts.write_text(json.dumps({"prompt": "One and one?"}))
    command = ["trace", str(prompts), "--config", str(config), "--out", str(tmp_path / "trace")]
    command += ["--max-new-tokens", "6"]
    assert main(command) == 0
    assert "tiny + lookup" in capsys.readouterr().out
    assert main([*command, "--json", "--lengths", "2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["prompts"] == {"sums": 1}
    assert list(figures["tokens_an_iteration"]) == ["2"]
    assert main([*command, "--length", "3"]) == 2
    assert "another length" in capsys.readouterr().err
