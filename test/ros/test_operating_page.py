"""docs/operating.md says what everything that the node publishes means, and nothing else."""

import re
from dataclasses import replace

import pytest
import yaml
from aggregator import OK as OK_LEVEL
from aggregator import STALE, Aggregator
from ros_harness import ROOT
from test_diagnostics import ERROR, HEALTHY, LIMITS, OK, WARN, made_from

from memspec_core.snapshot import DraftSnapshot, DraftState, GenerationCounters, TargetSnapshot
from memspec_ros.diagnostics import NodeState, statuses

PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
PARTS = ("Drafts", "Generation", "Memory", "Platform")
LEVELS = {"OK": OK, "WARN": WARN, "ERROR": ERROR}

BOARD = {
    "board": "Jetson",
    "power_mode": "2",
    "cpu_clock_mhz": "1",
    "gpu_clock_mhz": "1",
    "temperature_cpu_c": "95.0",
}
FAILED = DraftSnapshot("code", "/x", "", DraftState.FAILED, error="It is truncated.")
MEMORY = HEALTHY.memory
STATES = (
    {"snapshot": None},
    {"snapshot": replace(HEALTHY, loaded=False), "lifecycle_state": "configuring"},
    {"snapshot": replace(HEALTHY, loaded=False)},
    {"snapshot": replace(HEALTHY, worker_alive=False)},
    {"snapshot": replace(HEALTHY, worker_error="CUDA out of memory", queue_length=8)},
    {"snapshot": replace(HEALTHY, drafts=(FAILED,), predictor_error="There is none in /x.")},
    {"snapshot": replace(HEALTHY, predicted=("code",), predictor_error="No finite values.")},
    {"snapshot": replace(HEALTHY, generations=GenerationCounters(fallback_ratio_window=0.3))},
    {"snapshot": replace(HEALTHY, memory=replace(MEMORY, available_bytes=MEMORY.floor_bytes))},
    {"snapshot": replace(HEALTHY, memory=replace(MEMORY, target_bytes=2 * MEMORY.budget_bytes))},
    {"snapshot": replace(HEALTHY, memory=replace(MEMORY, pressure="Memory is short: so it is."))},
)


def section(part):
    return PAGE.split(f"\n## {part}\n")[1].split("\n## ")[0]


def documented_keys(part):
    rows = [row for row in section(part).splitlines() if re.match(r"\| `[a-z]", row)]
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    return {name for name in names if " " not in name}


def documented_sentences(part):
    """Return the level of each documented sentence, by a pattern of it."""
    rows = re.findall(r"^\| `([^`]+)` \| (OK|WARN|ERROR) \|", section(part), flags=re.MULTILINE)
    return {re.escape(said).replace(r"\.\.\.", ".+"): LEVELS[level] for said, level in rows}


@pytest.fixture
def published(monkeypatch):
    """Give all statuses that the states above make on a board."""
    monkeypatch.setattr("memspec_ros.diagnostics.board_facts", lambda: BOARD)
    target = TargetSnapshot(pass_seconds=(0.01,) * 16)
    made = []
    for state in STATES:
        fields = {"lifecycle_state": "active", "limits": LIMITS, **state}
        snapshot = fields.pop("snapshot")
        if snapshot is not None:
            snapshot = replace(snapshot, target=target)
        made.append(made_from(snapshot, **fields))
    return made


@pytest.mark.parametrize("part", PARTS)
def test_every_value_is_explained_and_no_other(published, part):
    keys = {pair.key for made in published for pair in made[part].values}
    keys = {re.sub(r"temperature_\w+_c", "temperature_<sensor>_c", key) for key in keys}

    assert documented_keys(part) == keys


@pytest.mark.parametrize("part", PARTS)
def test_every_sentence_has_its_row_and_every_row_its_sentence(published, part):
    rows = documented_sentences(part)
    assert rows
    left = dict(rows)
    for made in published:
        status = made[part]
        said, levels = status.message, []
        for pattern, level in rows.items():
            found = re.search(pattern, said)
            if found:
                levels.append(level)
                left.pop(pattern, None)
        assert levels or said == "OK", f"no row for: {said}"
        assert status.level == max(levels, default=OK), said
    assert left == {}, "never said"


def test_two_robots_under_one_aggregator_have_an_entry_each():
    block = re.search(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[1]
    dashboard = Aggregator(yaml.safe_load(block))
    robots = [statuses(f"robot{n}/memspec", NodeState("unconfigured")) for n in (1, 2)]
    dashboard.hear(robots[0], seconds=0.0)

    levels = dashboard.report(now=1.0)
    assert levels["/Fleet/Robot 1 language"] == OK_LEVEL
    assert levels["/Fleet/Robot 2 language"] == STALE
    dashboard.hear(robots[1], seconds=1.0)
    levels = dashboard.report(now=1.0)
    assert set(levels.values()) == {OK_LEVEL}
    assert len(levels) == 10
    assert dashboard.others == []
