"""Reduced traces: small, without the text of prompts, and the same to strategies."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core.test_simulator import SECONDS
from memspec_core.cli.main import main
from memspec_core.errors import PredictorError, TraceError
from memspec_core.evaluation.paperlike import DRAFTS, PaperLike, paper_like_trace
from memspec_core.evaluation.reduction import read_trace_and_head, reduce_trace, write_reduced
from memspec_core.evaluation.simulator import SimulationPlan, simulate
from memspec_core.measurement.trace import (
    Trace,
    claim_trace,
    hash_of_prompt,
    part_file,
    read_trace,
    write_part,
)
from memspec_core.prediction.context import BOTH, FORMS
from memspec_core.prediction.head import HIDDEN_STATES, PredictorPlan, RankingHead, save_head
from memspec_core.training.predictor import PredictorTraining, train_predictor

HIDDEN = 6
TARGET = "a" * 64


def make_trace(prompts: int = 2) -> Trace:
    """A trace with states, whose prompts have tokens of their own."""
    random = np.random.default_rng(0)
    trace = paper_like_trace(PaperLike(prompts=prompts, tokens=40, prompt_tokens=7))
    header = replace(trace.header, target_sha256=TARGET, states=True)
    with_states = [
        replace(
            prompt,
            prompt_ids=random.integers(0, 999, 7).astype(np.int32),
            states=random.normal(size=(len(prompt.token_ids), HIDDEN)).astype(np.float16),
            prompt_state=random.normal(size=HIDDEN).astype(np.float16),
        )
        for prompt in trace.prompts
    ]
    return Trace(header, with_states)


def make_predictor(inputs: str = BOTH, encoder: str = HIDDEN_STATES) -> RankingHead:
    plan = PredictorPlan(DRAFTS, inputs, encoder, HIDDEN, 16, 16, 4, TARGET, {"seed": 1})
    random, count = np.random.default_rng(1), len(DRAFTS)
    return RankingHead(
        plan,
        random.normal(size=(count, plan.input_size)).astype(np.float32),
        random.normal(size=count).astype(np.float32),
        random.random((count, count)).astype(np.float32),
    )


def write_whole(trace: Trace, folder: Path) -> None:
    claim_trace(folder, trace.header)
    write_part(part_file(folder, 0), trace.prompts)


@pytest.mark.parametrize("inputs", FORMS)
@pytest.mark.parametrize("weighed", [False, True])
def test_strategies_do_the_same_on_a_reduced_trace(
    inputs: str, weighed: bool, tmp_path: Path
) -> None:
    trace, head = make_trace(), make_predictor(inputs)
    write_reduced(*reduce_trace(trace, head), tmp_path)
    reduced, own_head = read_trace_and_head(tmp_path, None)
    parameters = {"draft_length": 3, "observation": weighed, "cost_aware": weighed}
    plan = SimulationPlan(SECONDS, parameters=parameters, head=head)
    assert simulate(reduced, replace(plan, head=own_head)) == simulate(trace, plan)


def test_a_reduced_trace_holds_no_prompts(tmp_path: Path) -> None:
    trace = make_trace()
    write_reduced(*reduce_trace(trace, make_predictor()), tmp_path)
    with np.load(part_file(tmp_path, 0)) as arrays:
        assert "prompt_ids" not in arrays
        assert arrays["states"].shape[1] == len(DRAFTS)
        assert arrays["token_ids"].dtype == np.uint16
    read = read_trace(tmp_path, TARGET)
    assert read.header.reduced
    for one, other in zip(read.prompts, trace.prompts, strict=True):
        assert not one.prompt_ids.any()
        assert len(one.prompt_ids) == len(other.prompt_ids)
        assert one.prompt_hash == other.prompt_hash == hash_of_prompt(other.prompt_ids.tolist())
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.accepted, other.accepted)


def test_what_cannot_be_reduced_is_refused() -> None:
    trace = make_trace()
    bare = [replace(prompt, states=None, prompt_state=None) for prompt in trace.prompts]
    stateless = Trace(replace(trace.header, states=False), bare)
    with pytest.raises(TraceError, match="without the target's states"):
        reduce_trace(stateless, make_predictor())
    with pytest.raises(TraceError, match="already"):
        reduce_trace(*reduce_trace(trace, make_predictor()))
    with pytest.raises(PredictorError, match="minilm"):
        reduce_trace(trace, make_predictor(encoder="minilm"))


def test_another_predictor_and_training_are_refused(tmp_path: Path, target_folder: Path) -> None:
    trace, head = make_trace(), make_predictor()
    reduced, predictor = tmp_path / "reduced", tmp_path / "p"
    save_head(head, predictor)
    write_reduced(*reduce_trace(trace, head), reduced)
    with pytest.raises(TraceError, match="leave --predictor out"):
        read_trace_and_head(reduced, predictor)
    header = json.loads((reduced / "trace.json").read_text())
    from memspec_core.models.checkpoint import open_checkpoint

    header["target_sha256"] = open_checkpoint(target_folder).sha256()
    (reduced / "trace.json").write_text(json.dumps(header))
    plan = PredictorTraining(reduced, tmp_path / "out", str(target_folder))
    with pytest.raises(TraceError, match="is reduced"):
        train_predictor(plan, lambda *_: None)


def test_the_commands_reduce_and_simulate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, reduced, predictor = tmp_path / "whole", tmp_path / "reduced", tmp_path / "p"
    write_whole(make_trace(), whole)
    save_head(make_predictor(), predictor)
    arguments = ["reduce-trace", str(whole), "--predictor", str(predictor), "--out", str(reduced)]
    assert main(arguments) == 0
    assert "10 prompts" in capsys.readouterr().out
    simulated = ["--jobs", "1", "--strategies", "memspec", "--json"]
    assert main(["simulate", str(reduced), *simulated]) == 0
    of_reduced = json.loads(capsys.readouterr().out)["points"]
    assert main(["simulate", str(whole), "--predictor", str(predictor), *simulated]) == 0
    assert json.loads(capsys.readouterr().out)["points"] == of_reduced


def test_columns_are_chosen() -> None:
    trace = make_trace(1)
    chosen = trace.only(("law", "code"))
    assert chosen.drafts == ("law", "code")
    place = trace.drafts.index("law")
    np.testing.assert_array_equal(
        chosen.prompts[0].accepted[:, 0], trace.prompts[0].accepted[:, place]
    )
    with pytest.raises(TraceError, match="no draft 'nobody'"):
        trace.only(("nobody",))
