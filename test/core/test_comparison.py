"""Strategies compared by real runs on tiny models."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memspec_core.cli.main import main
from memspec_core.errors import SettingsError, TraceError
from memspec_core.evaluation.comparison import (
    BASELINE,
    PAPER_FORM,
    ComparisonPlan,
    StrategyRun,
    compare,
)
from memspec_core.evaluation.comparison_report import ALL, as_json, table
from memspec_core.settings import STRATEGY_NAMES
from memspec_core.training.prompts import PromptSet
from memspec_core.training.traces import TracePlan, collect_trace

SETS = (PromptSet("a", ("plus", "minus")), PromptSet("b", ("times",)))


def test_every_strategy_answers_every_prompt_from_the_same_beginning(
    parameters: dict[str, object],
) -> None:
    plan = ComparisonPlan(
        {**parameters, **PAPER_FORM}, SETS, (*STRATEGY_NAMES, "static:other"), max_new_tokens=24
    )
    told: list[tuple[str, int, int]] = []
    runs = compare(plan, lambda *what: told.append(what))
    names = {*STRATEGY_NAMES, "static:other"}
    answered = {(run.strategy, run.prompt_set, run.prompt) for run in runs}
    assert answered == {(n, s.name, i) for n in names for s in SETS for i in range(len(s.texts))}
    assert len(runs) == len(answered)
    assert told[-1] == ("comparing strategies", 3, 3)
    for run in runs:
        assert run.tokens == len(run.token_ids) > 0
        assert run.loads >= 1  # of the first draft at least: none was there
        assert run.first_wait > 0
        assert run.seconds > 0
        if run.strategy != "mab_sync":
            assert run.load_wait < 1e-3
    figures = as_json(runs)
    assert list(figures) == ["a", "b", ALL]
    assert {found["same_tokens"] for found in figures[ALL].values()} == {3}
    assert figures[ALL][BASELINE]["over_general_static"] == [1.0, 1.0, 1.0]
    assert "mab_sync" in table(figures)


def test_oracles_replay_a_trace(parameters: dict[str, object], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    collect_trace(TracePlan(parameters, SETS, trace, length=3, max_new_tokens=24), lambda *_: None)
    plan = ComparisonPlan(
        {**parameters, **PAPER_FORM},
        SETS,
        ("oracle_static", "oracle_dynamic"),
        max_new_tokens=24,
        trace=trace,
    )
    figures = as_json(compare(plan, lambda *_: None))[ALL]
    assert {found["same_tokens"] for found in figures.values()} == {3}
    rates = {name: found["tokens_an_iteration"] for name, found in figures.items()}
    assert rates["oracle_static"] >= rates[BASELINE]
    with pytest.raises(SettingsError, match="An oracle needs a trace"):
        compare(replace(plan, trace=None), lambda *_: None)
    other = replace(plan, prompt_sets=(PromptSet("a", ("equals",)),))
    with pytest.raises(TraceError, match="lacks the prompt 'equals'"):
        compare(other, lambda *_: None)


def run_of(strategy: str, prompt: int, seconds: float, **more: object) -> StrategyRun:
    run = StrategyRun(
        strategy=strategy,
        prompt_set="a",
        prompt=prompt,
        tokens=10,
        iterations=5,
        desired=0.6 * seconds,
        fallback=0.2 * seconds,
        load_wait=0.15 * seconds,
        prediction=0.05 * seconds,
        first_wait=9.0,
        elapsed=seconds,
        switches=2,
        loads=1,
        token_ids=(1, 2),
    )
    return replace(run, **more)  # type: ignore[arg-type]


def test_figures_are_sums_over_sums() -> None:
    runs = [run_of(BASELINE, 0, 2.0), run_of(BASELINE, 1, 4.0)]
    runs += [run_of("x", 0, 1.0), run_of("x", 1, 2.0, token_ids=(3,))]
    found = as_json(runs)["a"]["x"]
    assert found["tokens_per_second"] == pytest.approx(20 / 3)
    assert found["over_general_static"] == pytest.approx([2.0, 2.0, 2.0])
    shares = [found[kind] for kind in ("fallback", "load_wait", "prediction")]
    assert shares == pytest.approx([0.2, 0.15, 0.05])
    assert (found["same_tokens"], found["answers"]) == (1, 2)
    assert found["sum_over_elapsed"] == pytest.approx(1.0)
    assert np.isfinite(found["first_wait_seconds"])


def test_what_is_not_there_is_refused(parameters: dict[str, object]) -> None:
    for names, says in ((("static:nobody",), "no draft 'nobody'"), (("oracle",), "strategy")):
        with pytest.raises(SettingsError, match=says):
            compare(ComparisonPlan(parameters, SETS, names), lambda *_: None)


def test_the_command_prints_figures(
    parameters: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, prompts = tmp_path / "p.yaml", tmp_path / "a.jsonl"
    config.write_text(json.dumps({"memspec": {"ros__parameters": parameters}}))
    prompts.write_text(json.dumps({"prompt": "plus"}))
    arguments = ["compare", str(prompts), "--config", str(config), "--max-new-tokens", "8"]
    assert main([*arguments, "--strategies", "memspec", "--form", "paper", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["figures"]["a"]) == {BASELINE, "memspec"}
    assert report["settings"]["lookup"] is False
    assert main([*arguments, "--strategies", "nobody"]) == 2
