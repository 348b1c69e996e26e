"""Parameters that suit a trace, and what a record of decisions says."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core.test_decisions import DECISION
from core.test_simulator import SECONDS, plan_for, traced
from memspec_core.cli.main import main
from memspec_core.errors import RecordError, SettingsError, TraceError
from memspec_core.evaluation.demand import read_demand
from memspec_core.evaluation.foretold import Recall
from memspec_core.evaluation.paperlike import DRAFTS, PaperLike, paper_like_trace
from memspec_core.evaluation.tuning import Space, Tuning, tune
from memspec_core.evaluation.tuning_report import table, write_parameters
from memspec_core.measurement.trace import Trace, claim_trace, part_file, write_part
from memspec_core.settings import Settings, read_parameters


def clear_trace(prompts: int = 4) -> Trace:
    """Return answers of code and math whose drafts are right there and nowhere else."""
    trace = paper_like_trace(
        PaperLike(prompts=prompts, tokens=64, matched=0.97, unmatched=0.1, digressing=0, straying=0)
    )
    prompts = [p for p in trace.prompts if p.domain in ("code", "math")]
    return Trace(replace(trace.header, states=False), prompts)


def tuning(trace: Trace, space: Space, **changes: object) -> Tuning:
    plan = replace(plan_for(), recall=Recall(1.0, 1.0), **changes)  # type: ignore[arg-type]
    return Tuning(trace, plan, "memspec", space)


def test_drafts_that_are_never_right_are_left_out_and_one_is_enough_for_each_topic() -> None:
    found = tune(tuning(clear_trace(), Space((1, 2), (4,), (1, 3))))
    assert set(found.parameters["drafts.names"]) == {"code", "math"}
    assert found.parameters["resident_capacity"] == 1
    assert found.parameters["draft_length"] == 3  # nearly all of its proposals are right
    assert [found.before[n] for n in ("resident_capacity", "draft_length")] == [2, 3]
    assert found.over_general_static[1] > 1.5
    assert not found.is_slower
    assert found.prompts == 4
    assert len(found.considered) == 4
    worth = {one.draft: one for one in found.worth}
    assert list(worth) == list(DRAFTS)
    assert worth["code"].kept
    assert worth["code"].gain[0] > 1.2
    assert not worth["law"].kept
    assert worth["law"].gain[0] == pytest.approx(1.0, abs=0.02)
    text = table(found, SECONDS)
    assert "Chosen: K 1, N 4, gamma 3." in text
    assert "left out" in text
    assert "4 prompts are few" in text


def test_memory_bounds_the_drafts_that_are_tried() -> None:
    found = tune(tuning(clear_trace(), Space((1, 2, 3), (4,), (3,)), budget_bytes=5.1e6))
    assert {point["resident_capacity"] for point, _ in found.considered} == {1, 2}


def test_the_recent_tokens_matter_where_there_are_states() -> None:
    from core.test_prediction import make_head

    trace = traced(2)
    state = np.zeros((96, 3), np.float16)
    prompts = [replace(p, states=state, prompt_state=state[0]) for p in trace.prompts]
    names = ("math", "code", *DRAFTS[2:])
    header = replace(trace.header, states=True, drafts=dict.fromkeys(names, ""))
    head = make_head()
    chosen = tuning(Trace(header, prompts), Space((1,), (4,), (3,)), head=head)
    found = tune(replace(chosen, plan=replace(chosen.plan, recall=None)))
    tried = {point["recent_tokens"] for point, _ in found.considered}
    assert max(tried) == head.plan.positions


def test_one_prompt_cannot_choose_and_judge() -> None:
    trace = traced(1)
    with pytest.raises(TraceError, match="one prompt a domain"):
        tune(tuning(trace, Space((1,), (4,), (3,))))
    with pytest.raises(SettingsError, match="no draft 'poetry'"):
        tune(tuning(traced(2), Space((1,), (4,), (3,)), drafts=("poetry",)))


def test_a_parameter_file_is_what_the_node_reads(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    write_parameters({"drafts.names": ["code"], "drafts.code.path": "d", "lookup": False}, path)
    settings = Settings.from_parameters(read_parameters(path))
    assert settings.draft_names == ("code",)
    assert settings.drafts[0].path == "d"
    assert settings.lookup is False


# Records of decisions


def written(path: Path, answers: Sequence[Sequence[str]]) -> Path:
    """Write answers, each with the drafts that ranked first; the second best is always law."""
    lines = []
    for answer in answers:
        for number, best in enumerate(answer):
            scores = {"law": 0.2, "math": 0.1} | {best: 0.7}
            decision = replace(DECISION, place=10 * number, scores=scores, wanted=best, active=best)
            lines.append(decision.to_json())
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_record_says_what_was_wanted(tmp_path: Path) -> None:
    path = written(tmp_path / "d.jsonl", [["code"] * 3, ["code", "law", "code"], ["math"]])
    demand = read_demand(path)
    assert (demand.answers, demand.points) == (3, 7)
    assert list(demand.wanted) == ["code", "law", "math"]
    assert demand.wanted["code"] == pytest.approx(5 / 7)
    assert demand.changes == pytest.approx(2 / 4)
    # law was second to code; code was not second to law.
    assert demand.held == {1: 0.5, 2: 0.75, 3: 0.75}
    assert demand.tokens_between == 10
    assert demand.fallback == 0
    assert demand.capacity == 3
    assert demand.worthwhile == ("code", "law", "math")


def test_a_record_that_was_cut_off_counts_up_to_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "d.jsonl", [["code"] * 3])
    path.write_text(path.read_text()[:-40])
    assert read_demand(path).points == 2
    assert "cut off" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no decision"),
        ("no json", "Line 1 of .* is no JSON"),
        ("{}\n{}\n", "Line 1 of .* active is missing"),
        ("[]\n", "no object"),
        (f"{{\n{DECISION.to_json()}\n", "Line 1"),
        (DECISION.to_json().replace("0.75", '"x"'), "no numbers"),
    ],
)
def test_what_is_no_record(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(RecordError, match=words):
        read_demand(path)
    with pytest.raises(RecordError, match="Cannot read"):
        read_demand(tmp_path / "nothing.jsonl")


# The command


def test_the_command_tunes_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = clear_trace(2)
    claim_trace(tmp_path / "trace", trace.header)
    write_part(part_file(tmp_path / "trace", 0), trace.prompts)
    output = tmp_path / "tuned.yaml"
    arguments = ["tune", str(tmp_path / "trace"), "-K", "1,2", "-N", "4", "--lengths", "3"]
    arguments += ["--jobs", "1", "-o", str(output)]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    settings = Settings.from_parameters(read_parameters(output))
    assert settings.draft_length == 3
    assert list(settings.draft_names) == report["parameters"]["drafts.names"]
    before = output.read_text()
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert output.read_text() == before
    assert main([*arguments, "--force", "--lengths", "9"]) == 2
    assert output.read_text() == before
    assert main([*arguments, "--force"]) == 0
    assert "Chosen:" in capsys.readouterr().out


def test_the_command_reads_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = written(tmp_path / "d.jsonl", [["code"] * 3])
    output = tmp_path / "tuned.yaml"
    assert main(["tune", str(record), "-o", str(output)]) == 0
    assert "trace the prompts" in capsys.readouterr().out
    settings = Settings.from_parameters(read_parameters(output))
    assert (settings.resident_capacity, settings.draft_names) == (1, ("code",))
    assert main(["tune", str(record), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["demand"]["points"] == 3
    assert main(["tune", str(tmp_path / "nowhere")]) == 2
    assert main(["tune", str(record), "-o", str(tmp_path / "no" / "t.yaml")]) == 2
