"""What drafts do while goals run, as topics, services and files show it."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from action_msgs.msg import GoalStatus
from ros_harness import COUNTING, ROOT, Graph, NodeProcess, new_domain, until, values
from slow_disc_node import HOLD

from memspec_core.measurement.decisions import Decision, digest_of_prompt, hash_of_context
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.prediction.head import HIDDEN_STATES, PredictorPlan, RankingHead, save_head
from memspec_core.request import GenerationRequest
from memspec_msgs.msg import DraftInfo

SUCCEEDED = GoalStatus.STATUS_SUCCEEDED
CANCELED = GoalStatus.STATUS_CANCELED
ABORTED = GoalStatus.STATUS_ABORTED
NAMES = ["code", "math", "law"]
"""Three drafts that are one, in this order of the predictor."""

SETTINGS = {
    "resident_capacity": 2,
    "scheduling_interval": 4,
    "recent_tokens": 64,
    "draft_length": 2,
}
"""A fixed length: what pays on a busy machine decides nothing here."""

PARAMETERS = {
    "drafts.names": NAMES,
    "strategy": "memspec",
    "observation": False,
    "lookup": False,
    "stream_period": 0.0,
    **SETTINGS,
}


def weights_of(folder, name):
    return Path(folder) / name / "draft.safetensors"


def write_drafts(folder):
    """Write the drafts, and return the parameters that name them."""
    for name in NAMES:
        shutil.copytree(ROOT / "models/mixed", Path(folder) / name)
    return {f"drafts.{name}.path": str(Path(folder) / name) for name in NAMES}


def write_predictor(folder):
    """Write a predictor whose order is fixed and whose scores follow the context."""
    manifest = json.loads((ROOT / "models/mixed/manifest.json").read_text())
    hidden = manifest["hidden_size"]
    plan = PredictorPlan(
        drafts=tuple(NAMES),
        inputs="recent",
        encoder=HIDDEN_STATES,
        hidden_size=hidden,
        positions=16,
        prompt_positions=16,
        interval=4,
        target_sha256=manifest["target_sha256"],
        card={},
    )
    noise = np.random.default_rng(0).normal(0.0, 1e-4, (len(NAMES), hidden))
    bias = np.array([2.0, 1.0, 0.0], np.float32)
    acceptance = np.full((len(NAMES), len(NAMES)), 0.5, np.float32)
    save_head(RankingHead(plan, noise.astype(np.float32), bias, acceptance), folder)
    return {"predictor.path": str(folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def ranked(folder):
    """Give a graph with an active node that ranks three drafts and holds two."""
    parameters = PARAMETERS | write_drafts(folder) | write_predictor(folder / "predictor")
    parameters["decisions.path"] = str(folder / "decisions.jsonl")
    command = [str(Path(__file__).with_name("slow_disc_node.py"))]
    domain = new_domain()
    process = NodeProcess(domain, folder, parameters, command)
    with process as node, Graph(domain, node) as graph:
        graph.bring_up()
        graph.hear_decisions()
        yield graph


@pytest.fixture
def graph(ranked):
    """Give the shared node as it was at first."""
    yield ranked
    for name in NAMES:
        assert ranked.pin_draft(name, False).success
    for name, value in SETTINGS.items():
        assert ranked.set_parameter(name, value) == (True, "")


@pytest.fixture(scope="module")
def prompt_ids():
    tokenizer = Tokenizer.of(open_checkpoint("default"))
    return tokenizer.prompt_ids(GenerationRequest(prompt=COUNTING, raw=True))


@contextmanager
def running(graph, **fields):
    """Run a goal of many seconds beside the block, and cancel it afterwards."""
    goal = graph.send_long(**fields)
    goal.wait_feedback()
    yield goal
    assert not goal.ask_result().done(), "the goal ended too early"
    goal.handle.cancel_goal_async()
    assert goal.outcome()[0] == CANCELED


def change(graph, goal, name, value, more=3):
    """Change a parameter while a goal runs, and wait for some decisions after that."""
    until(lambda: len(graph.decisions_of(goal)) > 2)
    assert graph.set_parameter(name, value) == (True, "")
    seen = len(graph.decisions_of(goal))
    until(lambda: len(graph.decisions_of(goal)) > seen + more)


def draft(graph, name):
    return next(d for d in graph.list_drafts() if d.name == name)


def status_says(graph, **fields):
    """Whether the latest status says this."""
    return all(getattr(graph.statuses[-1], name) == value for name, value in fields.items())


# Decisions


def test_each_decision_is_told_and_written(graph, folder):
    record = folder / "decisions.jsonl"
    before = len(record.read_text().splitlines()) if record.exists() else 0
    goal = graph.send(prompt=COUNTING, raw=True, max_new_tokens=40)
    assert goal.outcome()[0] == SUCCEEDED
    written = [Decision.from_json(line) for line in record.read_text().splitlines()[before:]]
    until(lambda: len(graph.decisions_of(goal)) == len(written))

    for told, decision in zip(graph.decisions_of(goal), written, strict=True):
        assert dict(zip(told.drafts, told.scores, strict=True)) == decision.scores
        assert (tuple(told.resident), tuple(told.loading)) == (decision.resident, decision.loading)
        for name in ("context_hash", "place", "strategy", "wanted", "active"):
            assert getattr(told, name) == getattr(decision, name)
        for name in ("prediction_seconds", "load_wait_seconds"):
            assert getattr(told, name) == getattr(decision, name)
        assert told.header.stamp.sec > 0
    assert len(written) > 2
    assert written[0].place == 0
    assert {d.strategy for d in written} == {"memspec"}
    assert {(d.wanted, d.active) for d in written} == {("code", "code")}
    assert all(d.prediction_seconds > 0.0 for d in written)


def test_decisions_bear_the_goal_that_runs(graph):
    """Also the first of a goal that was sent to an idle node, and those of goals that waited."""
    goals = [graph.send(prompt=COUNTING, raw=True, max_new_tokens=12) for _ in range(4)]
    assert {goal.outcome()[0] for goal in goals} == {SUCCEEDED}

    for goal in goals:
        until(lambda goal=goal: len(graph.decisions_of(goal)) > 1)
        places = [decision.place for decision in graph.decisions_of(goal)]
        assert places[0] == 0
        assert places == sorted(set(places))


@pytest.mark.parametrize("named", ["law", "none", ""])
def test_the_draft_that_a_goal_names_runs(graph, named):
    goal = graph.send(prompt=COUNTING, raw=True, max_new_tokens=24, draft=named)
    status, result = goal.outcome()
    expected = named or "code"
    until(lambda: len(graph.decisions_of(goal)) > 1)

    assert status == SUCCEEDED
    assert {(d.wanted, d.active) for d in graph.decisions_of(goal)} == {(expected, expected)}
    used = {usage.draft for usage in result.stats.drafts}
    assert expected in used <= {expected, "none"}


# Parameters that change while a goal runs


def test_the_scheduling_interval_changes_in_a_goal(graph):
    with running(graph, draft="none") as goal:
        change(graph, goal, "scheduling_interval", 7)
        places = [decision.place for decision in graph.decisions_of(goal)]
        until(lambda: status_says(graph, scheduling_interval=7))

    steps = np.diff(places).tolist()
    assert places[0] == 0
    assert sorted(set(steps)) == [4, 7], "a plain iteration gains one token"
    assert steps == sorted(steps)


def test_the_recent_tokens_change_in_a_goal(graph, prompt_ids):
    def seen(decision, token_ids):
        """Return how many recent tokens the strategy saw."""
        for count in (64, 8):
            recent = token_ids[max(0, decision.place - count) : decision.place]
            if decision.context_hash == hash_of_context(digest_of_prompt(prompt_ids), recent):
                return count
        return None

    with running(graph, draft="none") as goal:
        until(lambda: graph.decisions_of(goal)[-1:] and graph.decisions_of(goal)[-1].place > 80)
        change(graph, goal, "recent_tokens", 8)
        decisions = [d for d in graph.decisions_of(goal) if d.place > 64]
    token_ids = list(goal.outcome()[1].token_ids)

    counts = [seen(decision, token_ids) for decision in decisions]
    assert set(counts) == {64, 8}
    assert counts == sorted(counts, reverse=True)


def test_the_draft_length_changes_in_a_goal(graph):
    assert graph.set_parameter("draft_length", 1) == (True, "")
    with running(graph, draft="code") as goal:
        change(graph, goal, "draft_length", 5)
        places = [decision.place for decision in graph.decisions_of(goal)]
    usage = next(u for u in goal.outcome()[1].stats.drafts if u.draft == "code")

    assert np.diff(places)[0] <= 4 * 2
    assert usage.drafted_tokens > usage.iterations


def test_the_capacity_changes_in_a_goal(graph):
    with running(graph) as goal:
        change(graph, goal, "resident_capacity", 3)
        until(lambda: sorted(graph.decisions_of(goal)[-1].resident) == sorted(NAMES))
        change(graph, goal, "resident_capacity", 1, more=1)
        assert {tuple(d.resident) for d in graph.decisions_of(goal)[-1:]} == {("code",)}
        until(lambda: status_says(graph, resident_capacity=1, resident=["code"], active="code"))
        change(graph, goal, "resident_capacity", 2)
        until(lambda: status_says(graph, resident_capacity=2, resident=["code", "math"]))
        assert {d.active for d in graph.decisions_of(goal)} == {"code"}


# Services


def test_states_and_scores_of_drafts_move(graph):
    with running(graph) as goal:
        first = {d.name: d for d in graph.list_drafts()}
        change(graph, goal, "draft_length", 3)
        second = {d.name: d for d in graph.list_drafts()}

        states = [second[name].state for name in NAMES]
        assert states == [DraftInfo.ACTIVE, DraftInfo.RESIDENT, DraftInfo.STORED]
        assert second["code"].score > second["math"].score > second["law"].score > 0.0
        assert all(first[name].score != second[name].score for name in NAMES)
        assert second["code"].uses > first["code"].uses
        assert second["math"].uses == first["math"].uses
        assert 0.0 < second["code"].acceptance <= 1.0
    until(lambda: draft(graph, "code").state == DraftInfo.RESIDENT)


def test_a_pinned_draft_stays_while_others_are_wanted(graph):
    with running(graph) as goal:
        until(lambda: status_says(graph, resident=["code", "math"]))
        assert graph.pin_draft("law", True).success
        until(lambda: status_says(graph, resident=["code", "law"]))
        change(graph, goal, "recent_tokens", 60)  # decisions that want math instead
        assert set(graph.decisions_of(goal)[-1].resident) == {"code", "law"}
        assert draft(graph, "law").pinned
        assert values(graph.next_diagnostics()["Drafts"])["pinned"] == "law"

        assert graph.pin_draft("code", True).success
        refused = graph.pin_draft("math", True)
        assert not refused.success
        assert "resident_capacity is 2" in refused.message

        assert graph.pin_draft("law", False).success
        until(lambda: status_says(graph, resident=["code", "math"]))


# Observers


def test_the_status_tells_each_change_and_a_load_holds_nothing_up(graph, folder):
    with running(graph) as goal:
        change(graph, goal, "resident_capacity", 1)
        until(lambda: status_says(graph, resident=["code"]))
        hold = folder / "math" / HOLD
        hold.touch()
        try:
            change(graph, goal, "resident_capacity", 2)
            until(lambda: status_says(graph, loading=["math"], resident=["code"], active="code"))
            assert draft(graph, "math").state == DraftInfo.LOADING
            assert graph.decisions_of(goal)[-1].loading == ["math"]
            assert values(graph.next_diagnostics()["Drafts"])["loading"] == "math"
            heard = len(goal.feedback)
            goal.wait_feedback(heard + 20)
        finally:
            hold.unlink()
        until(lambda: status_says(graph, loading=[], resident=["code", "math"]))
        assert status_says(graph, active="code", wanted="code")
    until(lambda: status_says(graph, active="", wanted=""))
    assert status_says(graph, resident=["code", "math"])


def test_diagnostics_follow_what_drafts_do(graph):
    before = values(graph.next_diagnostics()["Drafts"])
    for name in ("law", "code"):
        assert graph.send(prompt=COUNTING, raw=True, max_new_tokens=24, draft=name).accepted
    assert graph.send(prompt=COUNTING, raw=True, max_new_tokens=24).outcome()[0] == SUCCEEDED
    made = graph.next_diagnostics()
    drafts, generation = values(made["Drafts"]), values(made["Generation"])
    memory = values(made["Memory"])

    assert made["Drafts"].level == b"\x00"
    assert (drafts["strategy"], drafts["predictor"]) == ("memspec", "for code, math, law")
    for key in ("hits", "misses", "evictions"):
        assert int(drafts[key]) > int(before[key]), key
    for key in ("load_seconds_p50", "load_seconds_p95"):
        assert float(drafts[key]) > 0.0, key
    for key in ("tokens_per_second_mean", "time_to_first_token", "mean_accepted"):
        assert float(generation[key]) > 0.0, key
    for key in ("desired_ratio", "predictor_ratio"):
        assert 0.0 < float(generation[key]) < 1.0, key
    for key in ("drafts_mib", "kv_mib", "target_mib", "used_mib"):
        assert float(memory[key]) > 0.0, key


# What goes wrong


def test_drafts_that_are_damaged_in_mid_goal_and_a_predictor_that_is_missing(start, tmp_path):
    absent = str(tmp_path / "absent")
    paths = write_drafts(tmp_path)
    more = {"resident_capacity": 1, "predictor.path": absent}
    graph = start(**(PARAMETERS | paths | more))
    graph.bring_up()
    graph.hear_decisions()
    warned = graph.next_diagnostics()["Drafts"]
    assert warned.level == b"\x01"
    assert absent in warned.message
    assert values(warned)["predictor"] == "missing"

    goal = graph.send(prompt=COUNTING, raw=True, max_new_tokens=400)
    goal.wait_feedback()
    weights_of(tmp_path, "law").unlink()
    for name in ("math", "code"):  # one that is to come, and the one that runs
        os.truncate(weights_of(tmp_path, name), 1000)
    change(graph, goal, "resident_capacity", 3)
    status, result = goal.outcome()

    assert (status, result.error) == (SUCCEEDED, "")
    assert len(result.token_ids) == 400
    assert {d.active for d in graph.decisions_of(goal)} == {"code"}
    assert set(graph.decisions_of(goal)[0].scores) == {1 / 3}
    until(lambda: status_says(graph, failed=["math", "law"], resident=["code"], loading=[]))
    assert "truncated" in draft(graph, "math").error
    assert "missing" in draft(graph, "law").error
    warned = graph.next_diagnostics()["Drafts"]
    assert warned.level == b"\x01"
    assert "'math' has failed" in warned.message
    assert "'law' has failed" in warned.message

    # Only a goal that insists on such a draft ends with it.
    status, result = graph.send(prompt=COUNTING, raw=True, draft="math").outcome()
    assert status == ABORTED
    assert str(weights_of(tmp_path, "math")) in result.error
    assert graph.send(prompt=COUNTING, raw=True, max_new_tokens=8).outcome()[0] == SUCCEEDED
    assert "Traceback" not in graph.node.output
