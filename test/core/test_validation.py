"""The simulator beside real runs of tiny models, and the machine as the runs measure it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memspec_core.cli.main import main
from memspec_core.errors import SettingsError, TraceError
from memspec_core.evaluation.comparison import (
    BASELINE,
    PAPER_FORM,
    Answered,
    ComparisonPlan,
    compare,
)
from memspec_core.evaluation.measured import MachineObserver
from memspec_core.evaluation.profiles import load_profile
from memspec_core.evaluation.validation import Agreement, table, validate
from memspec_core.training.prompts import PromptSet
from memspec_core.training.traces import TracePlan, collect_trace

SETS = (PromptSet("a", ("plus", "minus", "times")),)
TOKENS = 24


def plan_with(parameters: dict[str, object], trace: Path | None, *names: str) -> ComparisonPlan:
    return ComparisonPlan(
        {**parameters, **PAPER_FORM}, SETS, names, max_new_tokens=TOKENS, trace=trace
    )


def test_the_same_prompts_are_run_and_simulated(
    parameters: dict[str, object],
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace"
    collect_trace(TracePlan(parameters, SETS, trace, 3, TOKENS), lambda *_: None)
    plan = plan_with(parameters, trace, "mab_sync", "oracle_dynamic")
    found = validate(plan, lambda *_: None)
    assert [one.strategy for one in found.agreements] == [BASELINE, "mab_sync", "oracle_dynamic"]
    assert {one.answers for one in found.agreements} == {1}  # every other prompt
    assert len(found.runs) == 9
    for one in found.agreements:
        assert one.simulated_tokens_per_second > 0
    # The simulated run of a static strategy takes the iterations of the real one.
    real = [r for r in found.runs if r.strategy == BASELINE and r.prompt == 1]
    profile, static = found.profile, found.agreements[0]
    first = plan.settings().draft_names[0]
    seconds = real[0].iterations * profile.of(first).iteration_seconds(3)
    assert static.simulated_tokens_per_second == pytest.approx(real[0].tokens / seconds)
    assert "mab_sync" in table(found)
    told = json.loads(json.dumps(found.to_json()))["agreements"][0]
    speed = told["simulated_tokens_per_second"] / told["real_tokens_per_second"]
    fallback = told["simulated_fallback"] - told["real_fallback"]
    assert told["holds"] == (0.9 <= speed <= 1.1 and abs(fallback) <= 0.03)

    twice = validate(replace(plan, repeats=2, strategies=()), lambda *_: None)
    assert twice.agreements[0].answers == 3  # each prompt measures once and is compared once
    assert twice.agreements[0].simulated_tokens_per_second > 0

    with pytest.raises(SettingsError, match="needs a trace"):
        validate(replace(plan, trace=None, strategies=("mab_sync",)), lambda *_: None)
    with pytest.raises(TraceError, match="no states"):
        validate(plan_with(parameters, trace, "memspec"), lambda *_: None)
    other = replace(plan, prompt_sets=(PromptSet("a", ("plus", "equals")),), strategies=())
    with pytest.raises(TraceError, match="lacks 1 of 1 prompts"):
        validate(other, lambda *_: None)
    one = replace(plan, prompt_sets=(PromptSet("a", ("plus",)),), strategies=())
    with pytest.raises(SettingsError, match="two prompts"):
        validate(one, lambda *_: None)


def test_what_may_differ() -> None:
    def agreement(simulated: float, fallback: float) -> Agreement:
        return Agreement("x", 1, 100.0, simulated, 0.10, fallback)

    assert agreement(109.0, 0.125).holds
    assert not agreement(111.0, 0.10).holds
    assert not agreement(100.0, 0.14).holds
    assert agreement(90.5, 0.08).speed_error == pytest.approx(-0.095)


def test_the_machine_is_measured_by_the_runs(parameters: dict[str, object]) -> None:
    sets = (PromptSet("a", ("plus",)),)
    plan = replace(plan_with(parameters, None, "mab_async"), prompt_sets=sets)
    seen: list[Answered] = []
    observer = MachineObserver(plan.settings(), lambda answer: seen.append(answer) is None)
    compare(plan, lambda *_: None, observer)
    profile = observer.profile("here")
    assert tuple(profile.drafts) == plan.settings().draft_names
    assert profile.load_seconds > 0
    assert list(profile.verify_seconds) == sorted(profile.verify_seconds)
    assert profile.prediction_seconds == 0.0  # nothing predicted
    # The warm-up's answers, one a draft, and those of two strategies.
    assert [answer.run.prompt_set for answer in seen] == [""] * len(profile.drafts) + ["a"] * 2
    for answer in seen:
        assert answer.load_seconds > 0
        assert answer.iterations[-1].generated_tokens == answer.run.tokens
    with pytest.raises(SettingsError, match="draft_length is 0"):
        MachineObserver(ComparisonPlan(parameters, sets, ()).settings())


def test_the_command_writes_a_profile_and_validates(
    parameters: dict[str, object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, prompts = tmp_path / "p.yaml", tmp_path / "a.jsonl"
    config.write_text(json.dumps({"memspec": {"ros__parameters": parameters}}))
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in SETS[0].texts))
    trace, profile = tmp_path / "trace", tmp_path / "mine.json"
    collect_trace(TracePlan(parameters, SETS, trace, 3, TOKENS), lambda *_: None)
    arguments = ["compare", str(prompts), "--config", str(config), "--max-new-tokens", "8"]
    arguments += ["--strategies", "mab_async", "--write-profile", str(profile)]
    assert main(arguments) == 2  # draft_length is 0
    arguments += ["--form", "paper", "--validate", "--trace", str(trace)]
    assert main([*arguments, "--json"]) == 0
    assert load_profile(str(profile)).name == "mine"
    report = json.loads(capsys.readouterr().out)
    assert [one["strategy"] for one in report["agreements"]] == [BASELINE, "mab_async"]
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
