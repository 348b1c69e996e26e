"""Training a predictor on traces whose best answer is known, and judging it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memspec_core.cli.main import main
from memspec_core.errors import MemSpecError, TraceError
from memspec_core.evaluation.ranking import (
    ALWAYS,
    BEST_A_PROMPT,
    BEST_AN_INTERVAL,
    CHANCE,
    DOMAIN,
)
from memspec_core.evaluation.ranking_report import table
from memspec_core.evaluation.scheduling import (
    FixedRanker,
    Hits,
    Schedule,
    domain_mask,
    follow,
    points,
    tied_points,
    utility,
)
from memspec_core.measurement.trace import (
    TracedPrompt,
    TraceHeader,
    claim_trace,
    part_file,
    read_trace,
    write_part,
)
from memspec_core.models.target import Target
from memspec_core.prediction.head import load_head
from memspec_core.prediction.predictor import Predictor
from memspec_core.training.contexts import StateEncoder, TextEncoder, context_at, vector_at
from memspec_core.training.predictor import (
    HELD_OUT,
    OBSERVED,
    PredictorTraining,
    split_by_prompt,
    train_predictor,
)

DRAFTS = ("code", "math", "law")
SCHEDULE = Schedule(DRAFTS, (0, 1, 2), length=3, interval=2)
ANSWER = 48
HIDDEN = 6


def traced(
    topics: Sequence[int], seed: int, domain: str = "code/train", noise: float = 0.3
) -> TracedPrompt:
    """An answer whose place t is of topics[t]: that draft is right there, and the states say so."""
    random = np.random.default_rng(seed)
    accepted = np.zeros((len(topics), len(DRAFTS) + 1), np.uint8)
    accepted[np.arange(len(topics)), topics] = 8
    means = np.eye(HIDDEN)[np.asarray(topics)]
    states = means + noise * random.standard_normal(means.shape)
    return TracedPrompt(
        domain=domain,
        prompt_ids=random.integers(0, 99, 5).astype(np.int32),
        token_ids=random.integers(0, 99, len(topics)).astype(np.int32),
        accepted=accepted,
        matched=np.zeros(len(topics), np.uint8),
        states=states.astype(np.float16),
        prompt_state=(np.eye(HIDDEN)[topics[0]]).astype(np.float16),
    )


def steady(prompts: int = 10) -> list[TracedPrompt]:
    """Each domain's draft is right throughout."""
    return [
        traced([index] * ANSWER, seed=10 * n + index, domain=f"{name}/train")
        for n in range(prompts)
        for index, name in enumerate(DRAFTS)
    ]


def changing(prompts: int = 12) -> list[TracedPrompt]:
    """The topic changes in mid-answer, to one that the prompt does not tell."""
    random = np.random.default_rng(7)
    first = [n % len(DRAFTS) for n in range(prompts * len(DRAFTS))]
    return [
        traced(
            [topic] * ANSWER + [int(random.integers(len(DRAFTS)))] * ANSWER,
            seed=n,
            domain=DRAFTS[topic],
        )
        for n, topic in enumerate(first)
    ]


@pytest.fixture
def header(target: Target) -> TraceHeader:
    return TraceHeader(
        target_sha256=target.checkpoint.sha256(),
        prompts_sha256="p",
        drafts=dict.fromkeys((*DRAFTS, "lookup"), ""),
        length=8,
        max_new_tokens=ANSWER,
        states=True,
    )


def written(folder: Path, header: TraceHeader, prompts: Sequence[TracedPrompt]) -> Path:
    claim_trace(folder, header)
    write_part(part_file(folder, 0), prompts)
    return folder


def plan_for(trace: Path, target_folder: Path, **changes: object) -> PredictorTraining:
    plan = PredictorTraining(
        trace=trace, folder=trace.parent / "predictor", target=str(target_folder), interval=2
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def silent(what: str, done: int, total: int) -> None:
    """Show nothing."""


# Scheduling points


def test_utility_is_tokens_an_iteration_of_the_interval() -> None:
    gained = np.array([[4, 1], [1, 2], [1, 1], [1, 3], [2, 1]])
    assert utility(gained, 0, 2).tolist() == [5 / 2, 3 / 2]
    assert utility(gained, 3, 2).tolist() == [2 / 2, 2 / 1]  # the end comes first


def test_points_follow_the_best_draft() -> None:
    prompt = traced([0] * 8 + [1] * 8, seed=0)
    assert [(p.place, p.next_place) for p in points(prompt, SCHEDULE)] == [(0, 8), (8, 16)]
    assert [p.best.tolist() for p in points(prompt, SCHEDULE)] == [
        [True, False, False],
        [False, True, False],
    ]


def test_ties_are_counted() -> None:
    nobody = traced([3] * 4, seed=0)  # the lookup alone is right
    assert tied_points([nobody], SCHEDULE) == (2, 2, 3.0)


def test_following_counts_as_decoding_does() -> None:
    prompt = traced([0] * 8 + [1] * 8, seed=0, domain="math")
    found = follow(prompt, SCHEDULE, FixedRanker(np.array([3.0, 1.0, 2.0])))
    assert (found.tokens, found.iterations, len(found.points)) == (16, 2 + 8, 5)
    assert found.points[0] == Hits(False, True, True, False, False)
    assert found.points[1] == Hits(False, False, False, False, False)


@pytest.mark.parametrize(
    ("domain", "meant"),
    [
        ("math", [False, True, False]),
        ("math/train", [False, True, False]),
        ("lower_case/law", [False, False, True]),
        ("code+law", [True, False, True]),
        ("mixed/code+math", [True, True, False]),
    ],
)
def test_domains_name_drafts(domain: str, meant: list[bool]) -> None:
    assert domain_mask(domain, DRAFTS).tolist() == meant


def test_a_domain_without_a_draft() -> None:
    with pytest.raises(TraceError, match=r"'train'.*code, math, law"):
        domain_mask("train", DRAFTS)


# Training


def test_a_known_optimum_is_found(header: TraceHeader, target_folder: Path, tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", header, steady())
    report = train_predictor(plan_for(trace, target_folder), silent)
    assert report["chosen"] == "both, domain"
    judged = report["sets"][HELD_OUT]
    assert judged["prompts"] == 6
    assert judged["tied_points"] == 0
    for name in (report["chosen"], report["chosen"] + OBSERVED):
        row = judged["rows"][name]
        assert row["first"][0] == row["domain_first"][0] == row["among_two"][0] == 1.0
        assert row["tokens_an_iteration"][0] == 4.0
    for name in (DOMAIN, BEST_A_PROMPT, BEST_AN_INTERVAL):
        assert judged["rows"][name]["tokens_an_iteration"][0] == 4.0
    # A third of the prompts at 4 tokens, two thirds at 1: 3 · 48 tokens in 12 + 2 · 48 iterations.
    always = judged["rows"][ALWAYS + "code"]["tokens_an_iteration"][0]
    assert always == pytest.approx(3 * 48 / (12 + 2 * 48))
    assert judged["rows"][CHANCE]["first"][0] == pytest.approx(1 / 3, abs=0.08)


def test_what_is_recent_tells_where_the_topic_changed(
    header: TraceHeader, target_folder: Path, tmp_path: Path
) -> None:
    trace = written(tmp_path / "trace", header, changing())
    report = train_predictor(
        plan_for(trace, target_folder, labels="utility", inputs="recent"), silent
    )
    rows = report["sets"][HELD_OUT]["rows"]
    assert rows["recent, utility"]["first"][0] > 0.7 > rows["prompt, utility"]["first"][0]
    assert (
        rows["recent, utility"]["tokens_an_iteration"][0]
        > rows["prompt, utility"]["tokens_an_iteration"][0]
    )


def test_what_is_written_is_what_was_judged(
    header: TraceHeader, target_folder: Path, tmp_path: Path
) -> None:
    prompts = steady()
    trace = written(tmp_path / "trace", header, prompts)
    report = train_predictor(plan_for(trace, target_folder), silent)
    head = load_head(tmp_path / "predictor", header.target_sha256)
    assert head.plan.drafts == DRAFTS
    assert head.plan.interval == 2
    card = head.plan.card
    chosen = report["sets"][HELD_OUT]["rows"]["both, domain"]["first"]
    assert card["figures"][HELD_OUT]["both, domain"]["first"] == list(chosen)
    context = context_at(StateEncoder(prompts), prompts[1], 20)
    found = Predictor(head, observation=False, length=3).scores(*context)
    assert max(found.items(), key=lambda i: i[1])[0] == "math"
    assert np.allclose(np.diag(head.acceptance), 1.0)
    assert np.allclose(head.acceptance.sum(), 3.0)


def test_the_same_seed_gives_the_same_bytes(
    header: TraceHeader, target_folder: Path, tmp_path: Path
) -> None:
    trace = written(tmp_path / "trace", header, steady(5))
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        train_predictor(plan_for(trace, target_folder, folder=folder), silent)
    one, two = ({p.name: p.read_bytes() for p in f.iterdir()} for f in folders)
    assert one == two


def test_no_prompt_is_on_both_sides() -> None:
    prompts = steady()
    kept, held = split_by_prompt(prompts, 0.2, seed=3)
    assert len(kept) + len(held) == len(prompts)
    assert not {id(p) for p in kept} & {id(p) for p in held}
    assert {p.domain for p in held} == {p.domain for p in prompts}
    assert [id(p) for p in split_by_prompt(prompts, 0.2, seed=4)[1]] != [id(p) for p in held]


def test_further_traces_are_judged_too(
    header: TraceHeader, target_folder: Path, tmp_path: Path
) -> None:
    trace = written(tmp_path / "trace", header, steady())
    further = written(tmp_path / "further", replace(header, prompts_sha256="q"), changing(2))
    report = train_predictor(plan_for(trace, target_folder, evaluations=(further,)), silent)
    assert list(report["sets"]) == [HELD_OUT, "further"]
    assert report["sets"]["further"]["prompts"] == 6


def test_a_text_encoder_reads_the_recent_tokens_once() -> None:
    texts: list[str] = []

    def encode(text: str) -> np.ndarray:
        texts.append(text)
        return np.full(2, len(text), np.float32)

    prompt = replace(traced([0] * 9, seed=0), token_ids=np.arange(9, dtype=np.int32))
    encoder = TextEncoder(encode, 2, lambda ids: "".join(map(str, ids)), positions=3)
    for _ in range(2):
        assert vector_at(encoder, prompt, "recent", 5).tolist() == [3.0, 3.0]
    assert texts.count("234") == 1


# Bad input


def refusal(plan: PredictorTraining) -> str:
    with pytest.raises(MemSpecError) as caught:
        train_predictor(plan, silent)
    assert not plan.folder.exists()
    return str(caught.value)


def test_a_trace_without_states(header: TraceHeader, target_folder: Path, tmp_path: Path) -> None:
    bare = [replace(p, states=None, prompt_state=None) for p in steady(2)]
    trace = written(tmp_path / "trace", header, bare)
    assert "--states" in refusal(plan_for(trace, target_folder))


def test_states_that_are_not_finite(
    header: TraceHeader, target_folder: Path, tmp_path: Path
) -> None:
    prompts = steady(2)
    assert prompts[0].states is not None
    prompts[0].states[3, 1] = np.nan
    trace = written(tmp_path / "trace", header, prompts)
    assert "not finite" in refusal(plan_for(trace, target_folder))


def test_a_trace_of_another_target(
    header: TraceHeader, target_folder: Path, tmp_path: Path
) -> None:
    other = replace(header, target_sha256="0" * 64)
    trace = written(tmp_path / "trace", other, steady(2))
    assert "another target" in refusal(plan_for(trace, target_folder))


def test_a_trace_that_is_not_there(target_folder: Path, tmp_path: Path) -> None:
    assert "not the record of a trace" in refusal(plan_for(tmp_path / "trace", target_folder))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"drafts": ("code", "none")}, "code, math, law, lookup"),
        ({"drafts": ("code",)}, "two drafts"),
        ({"drafts": ("code", "math")}, "domain 'law/train'"),
        ({"length": 9}, "8 proposals"),
    ],
)
def test_what_was_not_traced(
    header: TraceHeader,
    target_folder: Path,
    tmp_path: Path,
    changes: dict[str, object],
    says: str,
) -> None:
    trace = written(tmp_path / "trace", header, steady(2))
    assert says in refusal(plan_for(trace, target_folder, **changes))


def test_a_domain_with_one_prompt(header: TraceHeader, target_folder: Path, tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", header, steady(1))
    assert "one prompt only" in refusal(plan_for(trace, target_folder))


def test_a_further_trace_of_other_drafts(
    header: TraceHeader, target_folder: Path, tmp_path: Path
) -> None:
    trace = written(tmp_path / "trace", header, steady(2))
    drafts = dict.fromkeys((*DRAFTS, "lookup"), "x")
    further = written(tmp_path / "further", replace(header, drafts=drafts), steady(2))
    plan = plan_for(trace, target_folder, evaluations=(further,))
    assert "other drafts" in refusal(plan)


def test_states_survive_a_trace_file(header: TraceHeader, tmp_path: Path) -> None:
    prompts = steady(1)
    found = read_trace(written(tmp_path / "trace", header, prompts)).prompts
    for one, other in zip(found, prompts, strict=True):
        assert np.array_equal(np.asarray(one.prompt_state), np.asarray(other.prompt_state))
        assert np.array_equal(np.asarray(one.states), np.asarray(other.states))


def test_where_every_point_is_tied_nothing_is_said_of_untied_ones(
    header: TraceHeader, target_folder: Path, tmp_path: Path
) -> None:
    nobody = [traced([3] * 8, seed=n, domain=DRAFTS[n % 3]) for n in range(6)]
    trace = written(tmp_path / "trace", header, nobody)
    report = train_predictor(plan_for(trace, target_folder), silent)
    row = report["sets"][HELD_OUT]["rows"]["both, domain"]
    assert row["first"][0] == 1.0
    assert "first_untied" not in row
    assert "untied first" in table(report)


# The command


def test_the_command_prints_a_table_or_json(
    header: TraceHeader, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "trace", header, steady(3))
    command = ["train-predictor", str(trace), "--target", str(target_folder), "--out"]
    assert main([*command, str(tmp_path / "one")]) == 0
    out = capsys.readouterr().out
    assert "both, domain, observed" in out
    assert "code/train" in out
    assert main([*command, str(tmp_path / "two"), "--json", "--inputs", "recent"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["chosen"] == "recent, domain"


def test_wrong_input_is_one_line(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train-predictor", str(tmp_path / "no"), "--target", str(target_folder)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_text_encoder_that_is_not_installed(
    header: TraceHeader, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memspec_core.prediction.minilm._PACKAGE", "no_such_package")
    trace = written(tmp_path / "trace", header, steady(2))
    assert "pip install" in refusal(plan_for(trace, target_folder, encoder="minilm"))
