"""The simulator: the runtime's own loop on a simulated machine."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from core.test_prediction import make_head
from memspec_core.cli.main import main
from memspec_core.errors import ProfileError, SettingsError, TraceError
from memspec_core.evaluation.acceptance import dynamic_walk, gains, static_oracle, walk
from memspec_core.evaluation.comparison import StrategyRun
from memspec_core.evaluation.foretold import Foretold, NearMisses, Recall
from memspec_core.evaluation.paperlike import DRAFTS, PaperLike, paper_like_trace
from memspec_core.evaluation.paperlike_head import paper_like_head
from memspec_core.evaluation.profiles import Profile, load_profile
from memspec_core.evaluation.ranking import PredictorRanker
from memspec_core.evaluation.scheduling import Schedule, follow
from memspec_core.evaluation.simulated import SimulatedClock, SimulatedDraft, SimulatedLoader
from memspec_core.evaluation.simulation_record import SimulationRecord
from memspec_core.evaluation.simulator import (
    SIMULATED_STRATEGIES,
    SimulationPlan,
    Simulator,
    simulate,
)
from memspec_core.evaluation.timeline import timeline
from memspec_core.iteration import Iteration
from memspec_core.measurement.record import read_record
from memspec_core.measurement.trace import (
    Trace,
    TracedPrompt,
    TraceHeader,
    claim_trace,
    part_file,
    write_part,
)
from memspec_core.prediction.predictor import Predictor
from memspec_core.request import FinishReason
from memspec_core.strategies import Context, Ranking, StaticStrategy
from memspec_core.strategies.planning import plan as best_schedule
from memspec_core.training.contexts import StateEncoder, context_at

SECONDS = Profile(
    name="seconds",
    description="an iteration of three proposals takes a second, a load two and a half",
    memory_bytes_per_second=1e9,
    storage_bytes_per_second=1e6,
    draft_bytes=2.5e6,
    verify_seconds=(0.5, 0.6, 0.65, 0.7, 0.8),
    draft_step_seconds=0.1,
    catch_up_seconds=0.0,
    prompt_seconds=0.01,
    prediction_seconds=0.05,
    load_slowdown=1.0,
)


@cache
def traced(prompts: int = 2, seed: int = 0) -> Trace:
    return paper_like_trace(PaperLike(prompts=prompts, tokens=96, seed=seed))


def plan_for(profile: Profile = SECONDS, **changes: object) -> SimulationPlan:
    parameters = {"draft_length": 3, "scheduling_interval": 4, **changes}
    return SimulationPlan(profile, parameters=parameters, recall=Recall())


def by_strategy(runs: Sequence[StrategyRun]) -> dict[str, list[StrategyRun]]:
    found: dict[str, list[StrategyRun]] = {}
    for run in runs:
        found.setdefault(run.strategy, []).append(run)
    return found


def small_trace(
    accepted: Sequence[Sequence[int]], drafts: Sequence[str], matched: Sequence[int] = ()
) -> Trace:
    """Return a trace of one answer; where the lookup matched, all of its proposals are right."""
    header = TraceHeader("t", "p", dict.fromkeys((*drafts, "lookup"), ""), 3, 99, states=False)
    found = np.array(matched or [0] * len(accepted), np.uint8)
    table = np.column_stack([np.array(accepted, np.uint8), np.where(found > 0, 3, 0)])
    prompt = TracedPrompt(
        domain=drafts[0],
        prompt_ids=np.arange(10, dtype=np.int32),
        token_ids=np.arange(len(accepted), dtype=np.int32),
        accepted=table.astype(np.uint8),
        matched=found,
    )
    return Trace(header, [prompt])


def iterations(
    trace: Trace, strategy: object, profile: Profile = SECONDS, **changes: object
) -> list[Iteration]:
    plan = plan_for(profile, **changes)
    names = [name for name in trace.drafts if name != "lookup"]
    columns = {name: column for column, name in enumerate(names)}
    simulator = Simulator(plan, plan.settings(names), columns, lookup=trace.drafts.index("lookup"))
    return simulator.iterations(strategy, trace.prompts[0])  # type: ignore[arg-type]


class Wants:
    """Wants one draft first, then always another, and the first as the next best."""

    name = "wants"
    insists = waits = False
    prepares: int | None = None
    reads_states = 0

    def __init__(self, first: str, then: str) -> None:
        self._first, self._then = first, then

    def rank(self, context: Context) -> Ranking:
        return Ranking({self._first: 1.0} | ({self._then: 2.0} if context.place else {}))

    def observe(self, iteration: Iteration) -> None:
        """Learn nothing."""


# One answer, by hand


def test_an_answer_takes_its_tokens_from_the_trace_and_its_time_from_the_profile() -> None:
    trace = small_trace([[3, 0]] * 4 + [[1, 0]] * 4 + [[9, 0]], ("general", "code"))
    events = iterations(trace, StaticStrategy("general"))
    assert [event.committed for event in events] == [4, 2, 2, 1]
    assert [event.accepted for event in events] == [3, 1, 1, 1]
    assert [event.proposed for event in events] == [3] * 4
    assert [event.seconds.decode for event in events] == pytest.approx([1.0] * 4)
    assert events[0].seconds.load_wait == pytest.approx(2.5)
    assert events[0].seconds.prompt == pytest.approx(0.1)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert not any(event.fallback for event in events)


def test_plain_decoding() -> None:
    trace = small_trace([[3]] * 5, ("general",))
    events = iterations(trace, StaticStrategy("none"))
    assert [event.committed for event in events] == [1] * 5
    assert [event.seconds.decode for event in events] == pytest.approx([0.5] * 5)
    assert all(event.plain for event in events)


def test_a_draft_lands_in_simulated_time_and_runs_from_the_next_point_on() -> None:
    trace = small_trace([[0, 0]] * 12, ("general", "code"))
    strategy = Wants("general", "code")
    events = iterations(trace, strategy, scheduling_interval=2)
    # Wanted from the second point on; loads for 2.5 s, so two intervals of 2 s go by.
    assert [event.draft for event in events] == ["general"] * 6 + ["code"] * 6
    assert [event.fallback for event in events] == [False] * 2 + [True] * 4 + [False] * 6


def test_a_load_slows_decoding_while_it_lasts() -> None:
    trace = small_trace([[0, 0]] * 12, ("general", "code"))
    slow = replace(SECONDS, load_slowdown=1.25)
    events = iterations(trace, Wants("general", "code"), slow, scheduling_interval=2)
    seconds = [event.seconds.decode for event in events]
    assert seconds[:4] == pytest.approx([1, 1, 1.25, 1.25])
    assert seconds[4] == pytest.approx(1.0)  # 2.5 s have passed just now
    assert seconds[5:] == pytest.approx([1.0] * 7)


def test_a_draft_first_reads_what_it_has_not_seen() -> None:
    trace = small_trace([[0, 0]] * 12, ("general", "code"))
    reading = replace(SECONDS, catch_up_seconds=0.01)
    events = iterations(trace, Wants("general", "code"), reading, scheduling_interval=2)
    assert events[0].seconds.prompt == pytest.approx(0.1 + 0.01 * 10)
    decode = [event.seconds.decode for event in events]
    first = [event.draft for event in events].index("code")
    assert decode[first] == pytest.approx(1.0 + 0.01 * (10 + first))
    assert decode[:first] + decode[first + 1 :] == pytest.approx([1.0] * 11)


def test_a_lookup_that_is_sure_goes_before_the_draft_and_costs_its_rows() -> None:
    matched = [4, 0, 0, 0, 2, 0, 3, 0, 0, 0]
    trace = small_trace([[1, 0]] * 10, ("general", "code"), matched)
    reading = replace(SECONDS, catch_up_seconds=0.01)
    events = iterations(trace, StaticStrategy("general"), reading, lookup=True)
    assert [event.draft for event in events] == ["lookup", "general", "lookup"]
    assert [event.committed for event in events] == [4, 2, 4]
    # Passes of four rows, and three steps; the draft reads what the lookup gave.
    assert [e.seconds.decode for e in events] == pytest.approx([0.7, 1.0 + 4 * 0.01, 0.7])
    assert not any(event.fallback for event in events)
    events = iterations(trace, StaticStrategy("general"), reading)
    assert {event.draft for event in events} == {"general"}


def test_the_lookup_alone() -> None:
    trace = small_trace([[1, 0]] * 6, ("general", "code"), [0, 2, 0, 0, 0, 1])
    plan = replace(plan_for(), strategies=("static:lookup", "oracle_dynamic"))
    runs = {run.strategy: run for run in simulate(trace, plan)}
    alone = runs["static:lookup"]
    assert (alone.iterations, alone.loads, alone.first_wait) == (3, 0, 0.0)
    assert alone.seconds == pytest.approx(0.5 + 0.7 + 0.7)
    beside = replace(plan, parameters={**plan.parameters, "lookup": True})
    found = {run.strategy: run for run in simulate(trace, beside)}
    assert found["static:lookup"] == alone
    assert found["general_static"].iterations == runs["general_static"].iterations


def test_the_oracle_follows_its_plan_beside_the_lookup() -> None:
    prompt = traced(1).prompts[0]
    matched = np.where(np.arange(96) % 7 == 0, 4, 0).astype(np.uint8)
    accepted = np.column_stack([prompt.accepted, np.where(matched, 3, 0)]).astype(np.uint8)
    header = replace(traced(1).header, drafts=dict.fromkeys((*DRAFTS, "lookup"), ""))
    trace = Trace(header, [replace(prompt, accepted=accepted, matched=matched)])
    plan = replace(plan_for(lookup=True), strategies=("oracle_dynamic",))
    oracle = by_strategy(simulate(trace, plan))["oracle_dynamic"][0]
    columns = {name: column for column, name in enumerate(DRAFTS)}
    simulator = Simulator(plan, plan.settings(DRAFTS), columns, lookup=len(DRAFTS))
    planned = best_schedule(simulator.known_answer(trace.prompts[0]))
    assert 0 < oracle.seconds < planned.seconds  # it does not count that lookups take no steps


def test_a_draft_that_is_not_like_the_others() -> None:
    trace = small_trace([[0, 0]] * 12, ("general", "code"))
    own = {"code": {"draft_step_seconds": 0.2, "draft_bytes": 1e6}, "general": {}}
    events = iterations(trace, Wants("general", "code"), replace(SECONDS, drafts=own))
    # Wanted from the second point on, and there at the third, a second after.
    assert [event.draft for event in events] == ["general"] * 8 + ["code"] * 4
    decode = [event.seconds.decode for event in events]
    assert decode == pytest.approx([1.0] * 8 + [1.3] * 4)
    assert events[0].seconds.load_wait == pytest.approx(2.5)


def test_memory_may_hold_fewer_drafts_than_the_capacity() -> None:
    plan = replace(plan_for(resident_capacity=3), strategies=("memspec",))
    roomy = by_strategy(simulate(traced(), plan))["memspec"]
    tight = by_strategy(simulate(traced(), replace(plan, budget_bytes=5.1e6)))["memspec"]
    two = replace(plan, parameters={**plan.parameters, "resident_capacity": 2})
    assert tight == by_strategy(simulate(traced(), two))["memspec"]
    assert sum(run.fallback for run in tight) > sum(run.fallback for run in roomy)


def test_a_load_beside_decoding_may_take_longer_than_one_that_is_waited_for() -> None:
    stretched = replace(SECONDS, load_stretch=2.0)
    clock = SimulatedClock()
    loader = SimulatedLoader(stretched, 7, clock)
    loader.start("a")
    loader.start("b")
    assert loader.busy_seconds == pytest.approx(10.0)
    clock.seconds = 3.0
    assert loader.wait().name == "a"
    assert clock.seconds == pytest.approx(4.0)
    assert loader.busy_seconds == pytest.approx(5.0)
    trace = small_trace([[0, 0]] * 14, ("general", "code"))
    events = iterations(trace, Wants("general", "code"), stretched, scheduling_interval=2)
    assert events[0].seconds.load_wait == pytest.approx(2.5)
    assert [event.draft for event in events] == ["general"] * 8 + ["code"] * 6


def test_loads_may_vary() -> None:
    clock = SimulatedClock()
    loader = SimulatedLoader(replace(SECONDS, load_deviation=0.3), 7, clock, seed=5)
    ends = []
    for name in map(str, range(400)):
        loader.start(name)
        ends.append(loader.busy_seconds)
    taken = np.diff([0.0, *ends])
    assert np.mean(taken) == pytest.approx(2.5, rel=0.05)
    assert np.std(np.log(taken)) == pytest.approx(0.3, abs=0.03)


def test_drafts_and_loader() -> None:
    clock = SimulatedClock()
    loader = SimulatedLoader(SECONDS, 7, clock)
    loader.start("a")
    clock.seconds = 1.0
    loader.start("b")
    assert loader.busy_seconds == pytest.approx(4.0)
    assert loader.finished() == []
    clock.seconds = 2.5
    assert [load.name for load in loader.finished()] == ["a"]
    landed = loader.wait()
    assert clock.seconds == 5.0
    assert isinstance(landed.draft, SimulatedDraft)
    assert (landed.draft.name, landed.draft.place) == ("b", -7)
    for call in (landed.draft.propose, landed.draft.read, landed.draft.rollback):
        with pytest.raises(NotImplementedError):
            call(*(None,) * (3 if call == landed.draft.propose else 1))  # type: ignore[arg-type]


# All strategies


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "profile",
    [
        SECONDS,
        replace(SECONDS, catch_up_seconds=0.004, load_slowdown=1.2),
        replace(SECONDS, storage_bytes_per_second=2.5e5, catch_up_seconds=0.001),
        replace(SECONDS, load_stretch=1.5, load_slowdown=1.5),
    ],
    ids=["paper", "interference", "slow storage", "slow beside decoding"],
)
def test_the_dynamic_oracle_takes_what_it_planned_and_nothing_is_faster(
    capacity: int, profile: Profile
) -> None:
    plan = replace(plan_for(profile, resident_capacity=capacity), recall=Recall(1.0, 1.0))
    trace = traced(1)
    runs = by_strategy(simulate(trace, plan))
    columns = {name: column for column, name in enumerate(DRAFTS)}
    simulator = Simulator(plan, plan.settings(DRAFTS), columns)
    for index, prompt in enumerate(trace.prompts):
        planned = best_schedule(simulator.known_answer(prompt))
        oracle = runs["oracle_dynamic"][index]
        assert oracle.seconds == pytest.approx(planned.seconds)
        for name, found in runs.items():
            assert found[index].seconds >= planned.bound_seconds - 1e-6, name
            if capacity <= 2:
                assert found[index].seconds >= oracle.seconds - 1e-6, name


def test_the_parts_add_up_and_only_the_synchronous_bandit_waits() -> None:
    runs = simulate(traced(), plan_for())
    assert [run.strategy for run in runs[:3]] == ["general_static", "memspec", "mab_sync"]
    assert {run.strategy for run in runs} == set(SIMULATED_STRATEGIES)
    for run in runs:
        assert run.tokens == 96
        assert run.seconds == pytest.approx(run.elapsed)
        assert run.first_wait == pytest.approx(2.5)
        assert (run.load_wait > 0) == (run.strategy == "mab_sync")
        assert (run.prediction > 0) == (run.strategy in ("memspec", "prediction_only"))
    static = by_strategy(runs)["oracle_static"]
    assert {run.loads for run in static} == {1}
    assert {run.fallback for run in static} == {0.0}


def test_static_runs_are_walks_over_the_trace() -> None:
    trace = traced()
    plan = replace(plan_for(), strategies=("static:law", "oracle_static"))
    found = by_strategy(simulate(trace, plan))
    law = walk(trace.prompts, lambda prompt: gains(prompt, DRAFTS.index("law"), 3))
    assert [run.iterations for run in found["static:law"]] == law.iterations.tolist()
    best = walk(trace.prompts, static_oracle(range(5), 3))
    assert [run.iterations for run in found["oracle_static"]] == best.iterations.tolist()
    assert len(found["general_static"]) == 10


def test_with_room_for_all_and_loads_that_take_no_time_the_oracle_is_the_unbounded_one() -> None:
    trace = traced()
    plan = plan_for(replace(SECONDS, draft_bytes=1e4, storage_bytes_per_second=1e12))
    plan = replace(
        plan,
        strategies=("oracle_dynamic",),
        parameters={**plan.parameters, "resident_capacity": 5},
    )
    runs = by_strategy(simulate(trace, plan))["oracle_dynamic"]
    unbounded = dynamic_walk(trace.prompts, range(5), 3, 4)
    assert [run.iterations for run in runs] == unbounded.iterations.tolist()


def test_a_trained_predictor_reads_the_traced_states() -> None:
    """The head knows code and math by the first two of three numbers of a state."""
    trace = small_trace([[3, 0]] * 40 + [[0, 3]] * 40, ("math", "code"))
    states = np.repeat(np.array([[0, 9, 0], [9, 0, 0]], np.float16), 40, axis=0)
    prompt = replace(trace.prompts[0], states=states, prompt_state=np.array([0, 9, 0], np.float16))
    plan = replace(
        plan_for(observation=False, scheduling_interval=1),
        recall=None,
        head=make_head(),
        strategies=("memspec", "static:code", "static:math"),
    )
    runs = {run.strategy: run for run in simulate(replace(trace, prompts=[prompt]), plan)}
    assert runs["static:code"].iterations == runs["static:math"].iterations == 10 + 40
    assert runs["memspec"].switches == 1
    assert runs["memspec"].iterations < 35  # it sees the change after some tokens


def test_processes_change_nothing() -> None:
    assert simulate(traced(), plan_for(), jobs=2) == simulate(traced(), plan_for())


def test_a_record_changes_nothing_and_holds_each_answer(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record = SimulationRecord(path, lambda ids: "".join(f"{token}," for token in ids))
    plan = replace(plan_for(), strategies=("memspec", "mab_sync"))
    runs = simulate(traced(), plan, jobs=2, record=record)
    assert runs == simulate(traced(), plan)
    recorded = read_record(path)
    for run, generation in zip(runs, recorded, strict=True):
        iterations = [one.iteration for one in generation.iterations]
        assert generation.beginning.strategy == run.strategy
        assert generation.beginning.prompt == run.prompt_set
        assert generation.beginning.profile == "seconds"
        assert len(iterations) == run.iterations
        assert "".join(iteration.text for iteration in iterations) == "0," * run.tokens
        found = timeline(generation, "seconds")
        assert found.fallback_share == pytest.approx(run.fallback / run.seconds)
        assert found.end == pytest.approx(run.elapsed - generation.events[0].prediction_seconds)


def test_progress_and_limits() -> None:
    seen: list[tuple[str, int, int]] = []
    plan = replace(plan_for(), strategies=("mab_async",), max_new_tokens=30)
    runs = simulate(traced(), plan, lambda *what: seen.append(what))
    assert {run.tokens for run in runs} == {30}
    assert seen[-1] == ("simulating", 10, 10)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"draft_length": 0}, SettingsError, "draft_length is 0"),
        ({"draft_length": 8}, ProfileError, "passes of up to 5 rows"),
        ({"resident_capacity": 0}, SettingsError, "resident_capacity"),
    ],
)
def test_what_cannot_be_simulated(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        simulate(traced(), plan_for(**changes))


def test_strategies_and_traces_that_are_refused() -> None:
    for name in ("best", "static:poetry"):
        with pytest.raises(SettingsError, match=f"Unknown strategy '{name}'"):
            simulate(traced(), replace(plan_for(), strategies=(name,)))
    trace = small_trace([[1]] * 3, ("general",))
    with pytest.raises(TraceError, match="draft_length is 4"):
        simulate(trace, plan_for(draft_length=4))
    with pytest.raises(TraceError, match="no column of the lookup"):
        simulate(traced(), plan_for(lookup=True))


# Foretelling, and generated traces


def test_a_foretold_ranking_has_the_recall_that_was_asked_for() -> None:
    gained = np.array([[1, 2, 3, 4, 5]] * 3000)
    for recall in (Recall(0.7, 0.9), Recall(1.0, 1.0), Recall(0.0, 0.5)):
        strategy = Foretold("memspec", None, DRAFTS, gained, recall, seed=1)
        orders = [strategy.rank(Context((), place=place)).order for place in range(2000)]
        first = np.mean([order[0] == "medical" for order in orders])
        among_two = np.mean(["medical" in order[:2] for order in orders])
        assert first == pytest.approx(recall.top_one, abs=0.03)
        assert among_two == pytest.approx(recall.top_two, abs=0.03)
        assert all(sorted(order) == sorted(DRAFTS) for order in orders)


def test_near_misses_come_in_runs_where_two_drafts_are_nearly_equal() -> None:
    gained = np.array([[1, 2, 3, 4, 5]] * 6000)

    def orders(near: NearMisses, step: int) -> list[tuple[str, ...]]:
        strategy = Foretold("memspec", None, DRAFTS, gained, near, seed=1)
        return [strategy.rank(Context((), place=place)).order for place in range(0, 6000, step)]

    def missed(near: NearMisses, step: int = 1) -> list[bool]:
        return [order[0] != "medical" for order in orders(near, step)]

    # The best one leads by a token in the coming tokens and by one in the answer.
    assert 0.1 < np.mean(missed(NearMisses(noise=2.0, lost=0.0))) < 0.22
    assert not any(missed(NearMisses(noise=0.3, lost=0.0)))
    runs = missed(NearMisses(noise=4.0, memory_tokens=50.0, lost=0.0))
    changes = np.mean(np.diff(np.array(runs, int)) != 0)
    assert changes < 0.25 * np.mean(runs)
    assert orders(NearMisses(), 4) == orders(NearMisses(), 4)
    lost = orders(NearMisses(lost=1.0), 1)
    assert not any("medical" in order[:2] for order in lost)
    assert all(sorted(order) == sorted(DRAFTS) for order in lost)


def test_it_foretells_the_coming_passage() -> None:
    gained = np.array([[3, 1]] * 40 + [[1, 3]] * 40)
    strategy = Foretold("memspec", None, ("a", "b"), gained, Recall(1.0, 1.0), seed=0)
    assert strategy.rank(Context((), place=0)).best == "a"
    assert strategy.rank(Context((), place=40)).best == "b"
    assert strategy.rank(Context((), place=80)).best in ("a", "b")
    with pytest.raises(SettingsError, match="recalls are"):
        Recall(0.9, 0.5)


def test_generated_traces_have_the_papers_contrasts() -> None:
    trace = paper_like_trace(PaperLike(prompts=40))
    assert trace.domains == DRAFTS
    rates = [
        walk(trace.prompts, lambda prompt: gains(prompt, 0, 4)).tokens_an_iteration,
        walk(trace.prompts, static_oracle(range(5), 4)).tokens_an_iteration,
        dynamic_walk(trace.prompts, range(5), 4, 4).tokens_an_iteration,
    ]
    general, static, dynamic = rates
    assert static / general == pytest.approx(1.403, abs=0.06)
    assert dynamic / static == pytest.approx(1.257, abs=0.04)
    again = paper_like_trace(PaperLike(prompts=40)).prompts[7]
    np.testing.assert_array_equal(again.accepted, trace.prompts[7].accepted)
    assert again.states is not None
    assert again.states.shape == (128, len(DRAFTS))
    # A run of right proposals is one shorter a place later.
    accepted = again.accepted.astype(int)
    assert (accepted[1:] >= accepted[:-1] - 1).all()
    assert accepted[-1].max() <= 1


def test_the_predictor_of_generated_traces_is_as_good_as_the_papers() -> None:
    like = PaperLike(prompts=40)
    head = paper_like_head(like)
    schedule = Schedule(DRAFTS, tuple(range(5)), 4, 4)
    encoder = StateEncoder((trace := paper_like_trace(like)).prompts, head.plan.positions)

    def ranker(prompt: TracedPrompt) -> PredictorRanker:
        predictor = Predictor(head, observation=False, length=4)
        return PredictorRanker(predictor, DRAFTS, lambda place: context_at(encoder, prompt, place))

    points = [p for t in trace.prompts for p in follow(t, schedule, ranker(t)).points]
    assert np.mean([point.first for point in points]) == pytest.approx(0.716, abs=0.04)
    assert np.mean([point.among_two for point in points]) == pytest.approx(0.957, abs=0.04)


# The command


def test_the_command_simulates_all_combinations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = traced()
    claim_trace(tmp_path, trace.header)
    write_part(part_file(tmp_path, 0), trace.prompts)
    arguments = ["simulate", str(tmp_path), "--prompts", "1", "-K", "2,3", "-N", "4,8"]
    arguments += ["--strategies", "mab_async,oracle_static", "--jobs", "1"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["profile"]["name"] == "orin_nano"
    points = [(p["resident_capacity"], p["scheduling_interval"]) for p in report["points"]]
    assert points == [(2, 4), (2, 8), (3, 4), (3, 8)]
    figures = report["points"][0]["figures"]["all"]
    assert list(figures) == ["general_static", "mab_async", "oracle_static"]
    assert figures["general_static"]["answers"] == 5
    assert main(arguments) == 0
    assert "resident_capacity 3, scheduling_interval 8" in capsys.readouterr().out


def test_the_command_on_a_generated_trace(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "paper-like", "--prompts", "1", "--jobs", "1"]
    arguments += ["--max-new-tokens", "40", "--json"]
    assert main([*arguments, "--recall", "1,1", "--strategies", "memspec"]) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    figures = json.loads(capsys.readouterr().out)["points"][0]["figures"]["all"]
    assert set(figures) == set(SIMULATED_STRATEGIES)
    assert figures["memspec"]["tokens"] == 5 * 40


def test_the_command_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.jsonl"
    arguments = ["simulate", "paper-like", "--prompts", "1", "--strategies", "memspec"]
    assert main([*arguments, "--max-new-tokens", "20", "--record", str(path)]) == 0
    assert len(read_record(path)) == 5 * 2
    assert main([*arguments, "--record", str(tmp_path)]) == 2


def test_the_command_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--profile", "moon"], ["--recall", "0.9,0.1"], ["--lengths", "0"]):
        assert main(["simulate", "paper-like", "--prompts", "1", *wrong]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert main(["simulate", "nowhere"]) == 2


def test_every_profile_runs() -> None:
    for name in ("orin_nano", "orin_nano_super", "agx_orin", "two_cores"):
        plan = replace(plan_for(load_profile(name)), strategies=("memspec",))
        assert all(run.seconds > 0 for run in simulate(traced(1), plan))
