"""The paper's figures from tiny traces: what they are computed from, and the folder."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from core.test_comparison import run_of
from core.test_reduction import make_predictor, make_trace
from memspec_core.cli.main import main
from memspec_core.errors import CacheMismatchError, MeasurementError, MemSpecError, TraceError
from memspec_core.evaluation.comparison import StrategyRun
from memspec_core.evaluation.installed import Models, installed_models
from memspec_core.evaluation.paperlike import DRAFTS, PaperLike, paper_like_trace
from memspec_core.evaluation.paperlike_head import paper_like_head
from memspec_core.evaluation.profiles import load_profile
from memspec_core.evaluation.reduction import reduce_trace, renamed, write_reduced
from memspec_core.evaluation.reproduction import claims, shapes
from memspec_core.evaluation.reproduction.curves import CURVE_FORMS
from memspec_core.evaluation.reproduction.estimates import (
    Estimate,
    acceptance_over,
    answers_of,
    arithmetic,
    geometric,
    proposals_over,
    share,
    throughput_over,
)
from memspec_core.evaluation.reproduction.figures import (
    FORMS,
    MEAN,
    by_length,
    step_name,
    throughput,
)
from memspec_core.evaluation.reproduction.folder import PARTS, Output
from memspec_core.evaluation.reproduction.measured import (
    Measured,
    Point,
    Simulated,
    measure_simulated,
)
from memspec_core.evaluation.reproduction.real import measured_really, read_reports
from memspec_core.evaluation.reproduction.run import reproduce
from memspec_core.evaluation.reproduction.sources import (
    GENERAL_ONLY,
    ReproductionPlan,
    candidates,
    read_sources,
)
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.request import LOOKUP
from memspec_core.settings import Settings

STRATEGIES = ("general_static", "mab_async", "memspec")


def silent(what: str, done: int, total: int) -> None:
    """Show nothing."""


# Estimates


def two_domains(gain: float = 2.0) -> list[StrategyRun]:
    """MemSpec is `gain` times as fast in one domain, and as fast as the others in another."""
    return [
        run_of(name, number, seconds, prompt_set=domain)
        for number in range(3)
        for name in STRATEGIES
        for domain, seconds in (("a", 2.0 / (gain if name == "memspec" else 1.0)), ("b", 1.0))
    ]


def test_ratios_are_means_over_domains() -> None:
    found = geometric(answers_of(two_domains(4.0)), throughput_over("memspec", "general_static"))
    assert found.mean == pytest.approx(2.0)
    assert (found.low, found.high) == pytest.approx((2.0, 2.0))


def test_intervals_are_over_prompts_and_repeats_add_up() -> None:
    runs = [run_of("general_static", n, 2.0) for n in range(9)]
    runs += [run_of("memspec", n, 1.0 + n / 9) for n in range(9)]
    answers = answers_of(runs)
    found = geometric(answers, throughput_over("memspec", "general_static"))
    assert found.low < found.mean < found.high
    assert geometric(answers, throughput_over("memspec", "memspec")).high == pytest.approx(1.0)
    repeated = answers_of(runs * 2)
    assert len(repeated.keys) == 9
    assert geometric(repeated, throughput_over("memspec", "general_static")) == found


def test_shares_and_acceptance() -> None:
    answers = answers_of(
        [run_of("memspec", 0, 2.0), run_of("general_static", 0, 1.0, iterations=8)]
    )
    assert arithmetic(answers, share("fallback", "memspec")).mean == pytest.approx(0.2)
    # 10 tokens in 5 iterations are 2 each, one of them proposed; in 8 iterations a quarter
    accepted = geometric(answers, acceptance_over("memspec", "general_static"))
    assert accepted.mean == pytest.approx(1.6)
    proposals = geometric(answers, proposals_over("memspec", "general_static"))
    assert proposals.mean == pytest.approx(4.0)


def test_draws_of_answers_in_which_nothing_was_accepted_leave_the_interval_finite() -> None:
    runs = [run_of("memspec", n, 1.0, iterations=4 + n) for n in range(3)]
    runs += [run_of("general_static", n, 1.0, iterations=(10, 11, 5)[n]) for n in range(3)]
    found = geometric(answers_of(runs), proposals_over("memspec", "general_static"))
    assert 0.0 < found.low <= found.mean <= found.high < float("inf")


# Claims and shapes


def test_a_claim_lies_to_an_interval() -> None:
    assert claims.exactly(1.4).verdict(1.3, 1.5) == "agrees"
    assert claims.exactly(1.4).verdict(1.41, 1.5) == "above"
    assert claims.at_most(0.05).verdict(0.0, 0.01) == "agrees"
    assert claims.at_most(0.05).verdict(0.06, 0.07) == "above"
    assert claims.Claim(0.95, 0.97).verdict(0.8, 0.9) == "below"


def surely(*changes: float) -> list[Estimate]:
    return [Estimate(change, change - 0.002, change + 0.002) for change in changes]


def test_steps_of_a_curve() -> None:
    assert shapes.steps(surely(1.2, 1.005, 0.95)) == shapes.INTERVAL_SHAPE
    assert shapes.step(Estimate(1.2, 0.9, 1.4)) == shapes.FLAT  # it may be chance
    assert shapes.step(*surely(1.02), shapes.NEARLY_FLAT) == shapes.FLAT


def test_growing_curves() -> None:
    [much, little] = surely(1.1, 1.001)
    assert shapes.grows(surely(1.0, 1.1), much)
    assert not shapes.grows(surely(0.9, 1.3), much)
    assert not shapes.grows(surely(1.0, 1.0), little)


# The output folder


def test_parts_are_made_once_and_only_for_the_same_inputs(tmp_path: Path) -> None:
    made: list[str] = []

    def make() -> list[int]:
        made.append("x")
        return [1]

    for _ in range(2):
        assert Output(tmp_path / "out", {"trace": "a"}).part("x", make) == [1]
    assert made == ["x"]
    with pytest.raises(CacheMismatchError, match=r"another trace.*--force"):
        Output(tmp_path / "out", {"trace": "b"})
    assert Output(tmp_path / "out", {"trace": "b"}, force=True).part("x", make) == [1]
    assert made == ["x", "x"]


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "letters.txt"
    kept.write_text("dear")
    with pytest.raises(CacheMismatchError, match="no reproduction"):
        Output(tmp_path, {})
    Output(tmp_path, {}, force=True)
    assert kept.read_text() == "dear"


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    output = Output(tmp_path, {})
    (tmp_path / PARTS / "x.json").write_text("[1")
    with pytest.raises(CacheMismatchError, match=r"x\.json is damaged"):
        output.part("x", list)


# Real runs


def report_of(runs: Sequence[StrategyRun], models: Models, **changes: int) -> dict[str, object]:
    settings = {"scheduling_interval": 4, "resident_capacity": 2, "draft_length": 3, **changes}
    return {
        "machine": {"cpu": "an abacus"},
        "models": models.to_json(),
        "settings": {**settings, "drafts": [{"name": "general"}, {"name": "code"}]},
        "max_new_tokens": 128,
        "runs": [asdict(run) for run in runs],
    }


def test_reports_are_points(tmp_path: Path) -> None:
    models = Models("t", {"general": "1"})
    files = [tmp_path / "base.json", tmp_path / "n8.json"]
    files[0].write_text(json.dumps(report_of(two_domains(), models)))
    files[1].write_text(json.dumps(report_of(two_domains(3.0), models, scheduling_interval=8)))
    measured = measured_really(read_reports(files, models))
    assert measured.base == Point()
    assert set(measured.points) == {Point(), Point(interval=8)}
    assert measured.drafts == ("general", "code")
    assert measured.machine == "an abacus"
    panel = throughput(measured)
    assert panel.mean("memspec") == pytest.approx(2.0**0.5)
    assert panel.mean("memspec", "a") == pytest.approx(2.0)


def test_other_models_runs_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text(json.dumps(report_of(two_domains(), Models("t", {"general": "1"}))))
    for models, says in (
        (Models("u", {}), "another target"),
        (Models("t", {"general": "2"}), "another draft 'general'"),
    ):
        with pytest.raises(TraceError, match=says):
            read_reports([file], models)
    alone = [run for run in two_domains() if run.prompt == 0]
    with pytest.raises(MeasurementError, match="one prompt of a"):
        measured_really([report_of(alone, Models("t", {}))])
    file.write_text('{"figures": {}}')
    with pytest.raises(MeasurementError, match="older"):
        read_reports([file], Models("t", {}))


# Figures


def simulated(prompts: int = 2, tokens: int = 48) -> Simulated:
    like = PaperLike(prompts=prompts, tokens=tokens)
    head = paper_like_head(like)
    return Simulated("paper_like", paper_like_trace(like), load_profile("orin_nano"), 4, head, 1)


def test_every_figure_is_made_of_simulations(tmp_path: Path) -> None:
    measured = measure_simulated(simulated(), Output(tmp_path, {}), silent)
    panels = {form.key: form.build(measured) for form in FORMS}
    assert [key for key, panel in panels.items() if panel is None] == ["table_2"]
    figure = panels["figure_06"]
    assert figure is not None
    assert figure.mean("general_static") == pytest.approx(1.0)
    for oracle in ("oracle_static", "oracle_dynamic"):
        value = figure.find(oracle)
        assert value is not None
        assert value.control is not None
    assert set(measured.reach_control.sums) == set(measured.reach.sums)  # type: ignore[union-attr]


def test_lengths_are_compared_on_the_same_answers() -> None:
    long = [run_of(s, n, 1.0, tokens=10 + n) for s in STRATEGIES for n in range(2)]
    short = [run_of(s, n, 0.5, tokens=5) for s in STRATEGIES for n in range(2)]
    points = {Point(tokens=64): answers_of(short), Point(tokens=128): answers_of(long)}
    panel = by_length(Measured("real", Point(), points, ("general",), 3))
    assert panel is not None
    assert {value.group for value in panel.drawn} == {"64", "128"}
    # Only the second answer reaches the longest: 11 tokens and 5 in half the time.
    assert panel.mean("memspec", step_name("64", "128")) == pytest.approx(1.0)


# The whole command


@pytest.fixture
def parameters(target_folder: Path, draft_folders: dict[str, Path]) -> dict[str, object]:
    paths = {f"drafts.{name}.path": str(draft_folders["other"]) for name in DRAFTS}
    return {"target.path": str(target_folder), **paths}


@pytest.fixture
def trace(tmp_path: Path, target_folder: Path) -> Path:
    """A reduced trace of the tiny target and its drafts."""
    checksum = open_checkpoint(target_folder).sha256()
    made = make_trace(2)
    head = make_predictor()
    made = replace(made, header=replace(made.header, target_sha256=checksum))
    head = replace(head, plan=replace(head.plan, target_sha256=checksum))
    write_reduced(*reduce_trace(made, head), tmp_path / "trace")
    return tmp_path / "trace"


def test_a_reproduction_is_written_and_taken_over(
    parameters: dict[str, object],
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, runs, out = tmp_path / "p.yaml", tmp_path / "runs.json", tmp_path / "out"
    config.write_text(yaml.safe_dump({"memspec": {"ros__parameters": parameters}}))
    drafts = {"drafts.names": list(DRAFTS)}
    models = installed_models(Settings.from_parameters({**parameters, **drafts}))
    runs.write_text(json.dumps(report_of(two_domains(), models)))
    arguments = ["reproduce", str(out), "--trace", str(trace), "--config", str(config)]
    arguments += ["--runs", str(runs), "--prompts", "2", "--jobs", "1"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(out / "report.md")
    report = (out / "report.md").read_text()
    keys = [form.key for form in (*FORMS, *CURVE_FORMS)]
    keys.remove("sensitivity_lookup_and_alternatives")  # the trace has no lookup
    for key in keys:
        assert f"figures/{key}.svg" in report
        assert (out / "figures" / f"{key}.png").stat().st_size > 1000
    figures = json.loads((out / "figures.json").read_text())
    assert list(figures) == keys
    assert set(figures["figure_06"]["settings"]) == {"real", "ours", "paper_like"}
    with (out / "figures.csv").open() as file:
        rows = list(csv.DictReader(file))
    [row] = [
        row
        for row in rows
        if (row["figure"], row["setting"], row["series"], row["group"])
        == ("figure_06", "real", "memspec", MEAN)
    ]
    assert float(row["mean"]) == pytest.approx(2.0**0.5, abs=1e-5)
    assert float(row["paper_high"]) == pytest.approx(1.588)

    parts = {path: path.stat().st_mtime_ns for path in (out / PARTS).iterdir()}
    assert main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in (out / PARTS).iterdir()} == parts
    assert (out / "report.md").read_text() == report

    assert main([*arguments, "--length", "3"]) == 2
    assert "another length" in capsys.readouterr().err
    assert (out / "report.md").read_text() == report


@pytest.mark.parametrize("kind", ["paper_like", "paper_form"])
def test_parts_of_other_generated_traces_or_another_form_are_not_taken_over(
    kind: str, parameters: dict[str, object], trace: Path, tmp_path: Path
) -> None:
    plan = ReproductionPlan(tmp_path / "out", trace, parameters=parameters, prompts=2)
    inputs = read_sources(plan).inputs
    Output(plan.folder, inputs)
    Output(plan.folder, inputs)
    older = {**inputs, kind: {**inputs[kind], next(iter(inputs[kind])): 0.5}}
    Output(plan.folder, older, force=True)
    with pytest.raises(CacheMismatchError, match=f"another {kind}.*--force"):
        Output(plan.folder, inputs)


def test_sources_that_do_not_fit_are_refused(
    parameters: dict[str, object], trace: Path, tmp_path: Path, distilled: Path
) -> None:
    plan = ReproductionPlan(tmp_path / "out", trace, parameters=parameters)
    rankings = tmp_path / "rankings.json"
    rankings.write_text("{}")
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("trace.json", "trace-00000.npz"):
        text = (trace / name).read_bytes()
        (whole / name).write_bytes(text.replace(b'"reduced": true', b'"reduced": false'))
    cases: list[tuple[ReproductionPlan, str]] = [
        (replace(plan, trace=tmp_path / "nowhere"), "not the record of a trace"),
        (replace(plan, trace=whole), "predictor must be given"),
        (replace(plan, length=9), "has 8 proposals"),
        (replace(plan, rankings=rankings), "train-predictor"),
        (replace(plan, parameters={}), "another target"),
        (
            replace(plan, parameters={**parameters, "drafts.code.path": str(distilled)}),
            "another draft 'code'",
        ),
        (replace(plan, prompts=1), "two of each domain"),
        (replace(plan, reports=(rankings,), real_prompts=(rankings,)), "one of both"),
    ]
    for wrong, says in cases:
        with pytest.raises(MemSpecError, match=says):
            reproduce(wrong, silent)
    assert not (tmp_path / "out").exists()


def test_the_papers_general_draft_takes_the_place_of_ours() -> None:
    trace, head = paper_like_trace(PaperLike(prompts=1, tokens=8)), make_predictor()
    assert candidates(trace, head) == DRAFTS
    names = {**trace.header.drafts, GENERAL_ONLY: "", LOOKUP: ""}
    wider = replace(trace, header=replace(trace.header, drafts=names))
    assert candidates(wider, head) == (GENERAL_ONLY, *DRAFTS[1:])
    with pytest.raises(TraceError, match="lacks the draft 'kitchen'"):
        candidates(trace, renamed(head, ("kitchen", *DRAFTS[1:])))
