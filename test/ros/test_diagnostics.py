"""Levels and keys of the statuses, from states made up here."""

from dataclasses import replace

import pytest
from ros_harness import values

from memspec_core.errors import CheckpointError, MemoryBudgetError
from memspec_core.snapshot import (
    DraftSnapshot,
    DraftState,
    GenerationCounters,
    MemorySnapshot,
    RuntimeSnapshot,
)
from memspec_ros.board import board_facts
from memspec_ros.diagnostics import Limits, NodeState, statuses

LIMITS = Limits(fallback_warn_ratio=0.25, memory_warn_ratio=1.25, temperature_warn=90.0)
OK, WARN, ERROR = b"\x00", b"\x01", b"\x02"
MIB = 1024 * 1024

KEYS = {
    "Drafts": {
        *("capacity", "resident", "active", "wanted", "loading", "hits", "misses", "evictions"),
        *("loads", "load_seconds_p50", "load_seconds_p95", "failures", "strategy", "predictor"),
        "acceptance",
    },
    "Generation": {
        *("goals_accepted", "goals_succeeded", "goals_cancelled", "goals_aborted"),
        *("goals_rejected", "queue", "tokens_per_second_now", "tokens_per_second_mean"),
        *("time_to_first_token", "mean_accepted", "fallback_time_s", "fallback_ratio_60s"),
        *("fallback_ratio", "desired_ratio", "predictor_ratio"),
    },
    "Memory": {
        *("available_mib", "budget_mib", "target_mib", "drafts_mib", "kv_mib", "in_flight_mib"),
        *("predictor_mib", "pressure_level"),
    },
    "Platform": {"device", "dtype", "threads", "torch", "machine"},
}

HEALTHY = RuntimeSnapshot(
    resident_capacity=2,
    scheduling_interval=4,
    strategy="general_static",
    queue_capacity=8,
    loaded=True,
    accepting=True,
    worker_alive=True,
    memory=MemorySnapshot(
        budget_bytes=1000 * MIB,
        target_bytes=200 * MIB,
        available_bytes=4000 * MIB,
        floor_bytes=256 * MIB,
    ),
)


def made_from(snapshot, **fields):
    state = NodeState("active", snapshot, limits=LIMITS)
    made = statuses("memspec", replace(state, **fields))
    return {status.name.removeprefix("memspec: "): status for status in made}


@pytest.mark.parametrize("snapshot", [None, HEALTHY], ids=["unconfigured", "active"])
def test_every_status_has_its_keys_in_every_state(snapshot):
    made = made_from(snapshot)

    assert set(made) == set(KEYS)
    for name, keys in KEYS.items():
        assert keys <= set(values(made[name]))
        assert made[name].level == OK


def test_a_failed_configure_is_an_error():
    made = made_from(None, lifecycle_state="unconfigured", failure=CheckpointError("No folder x."))

    assert made["Generation"].level == ERROR
    assert "No folder x." in made["Generation"].message
    assert made["Memory"].level == OK


def test_out_of_memory_is_an_error_of_memory():
    made = made_from(None, lifecycle_state="unconfigured", failure=MemoryBudgetError("Too big."))

    assert made["Memory"].level == ERROR


def test_a_dead_worker_is_an_error():
    made = made_from(replace(HEALTHY, worker_alive=False, worker_error="It died."))

    assert made["Generation"].level == ERROR
    assert "It died." in made["Generation"].message
    assert made_from(replace(HEALTHY, loaded=False))["Generation"].level == ERROR


def test_a_failed_draft_is_a_warning():
    failed = DraftSnapshot("code", "/x", "", DraftState.FAILED, error="It is truncated.")
    made = made_from(replace(HEALTHY, drafts=(failed,)))

    assert made["Drafts"].level == WARN
    assert "It is truncated." in made["Drafts"].message
    assert values(made["Drafts"])["failed"] == "code"


def test_a_missing_predictor_is_a_warning():
    healthy = made_from(HEALTHY)["Drafts"]
    made = made_from(replace(HEALTHY, predictor_error="There is no predictor in /x."))["Drafts"]

    assert values(healthy)["predictor"] == "none"
    assert made.level == WARN
    assert "There is no predictor in /x." in made.message
    assert values(made)["predictor"] == "missing"
    ranking = made_from(replace(HEALTHY, predicted=("code", "math")))["Drafts"]
    assert values(ranking)["predictor"] == "for code, math"


def test_a_predictor_that_fails_is_a_warning():
    failing = replace(HEALTHY, predicted=("code", "math"), predictor_error="No finite values.")
    made = made_from(failing)["Drafts"]

    assert made.level == WARN
    assert made.message == "All drafts count alike, as the predictor fails: No finite values."
    assert values(made)["predictor"] == "for code, math"


def test_acceptance_is_told_by_draft_and_position():
    used = DraftSnapshot("code", "/x", "", DraftState.ACTIVE, acceptance_by_position=(0.5, 0.25))
    unused = DraftSnapshot("math", "/y", "", DraftState.STORED)
    made = made_from(replace(HEALTHY, drafts=(used, unused)))["Drafts"]

    assert values(made)["acceptance"] == "code 0.50 0.25, math"


def test_fallback_above_the_parameter_is_a_warning():
    counters = GenerationCounters(fallback_ratio_window=0.3)

    assert made_from(replace(HEALTHY, generations=counters))["Generation"].level == WARN
    counters = GenerationCounters(fallback_ratio_window=0.2)
    assert made_from(replace(HEALTHY, generations=counters))["Generation"].level == OK


def test_a_full_queue_is_a_warning():
    assert made_from(replace(HEALTHY, queue_length=8))["Generation"].level == WARN
    assert made_from(replace(HEALTHY, queue_length=7))["Generation"].level == OK


def test_memory_near_its_floor_is_a_warning():
    near = replace(HEALTHY.memory, available_bytes=300 * MIB)
    made = made_from(replace(HEALTHY, memory=near))

    assert made["Memory"].level == WARN
    assert "300 MiB" in made["Memory"].message


def test_how_near_the_floor_is_too_near_is_a_parameter():
    near = replace(HEALTHY, memory=replace(HEALTHY.memory, available_bytes=300 * MIB))
    tolerant = made_from(near, limits=replace(LIMITS, memory_warn_ratio=1.1))

    assert tolerant["Memory"].level == OK


def test_a_hot_board_is_a_warning(monkeypatch):
    facts = {"board": "Jetson", "temperature_cpu_c": "89.9", "temperature_gpu_c": "90.0"}
    monkeypatch.setattr("memspec_ros.diagnostics.board_facts", lambda: facts)

    made = made_from(HEALTHY)["Platform"]
    assert made.level == WARN
    assert "temperature_gpu_c is 90.0" in made.message
    assert "temperature_cpu_c" not in made.message
    assert values(made)["temperature_cpu_c"] == "89.9"
    cooler = made_from(HEALTHY, limits=replace(LIMITS, temperature_warn=90.1))["Platform"]
    assert (cooler.level, cooler.message) == (OK, "OK")


def test_what_was_given_up_for_want_of_memory_is_a_warning():
    short = replace(HEALTHY.memory, pressure_level=1, pressure="Memory is short: drafts went.")
    made = made_from(replace(HEALTHY, memory=short))
    assert (made["Memory"].level, made["Memory"].message) == (WARN, short.pressure)
    values = {value.key: value.value for value in made["Memory"].values}
    assert values["pressure_level"] == "1"


def test_a_jetson_tells_its_mode_clocks_and_temperatures(tmp_path):
    files = {
        "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
        "var/lib/nvpmodel/status": "pmode:0002\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1510400\n",
        "sys/class/devfreq/17000000.ga10b/cur_freq": "624750000\n",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "48500\n",
        "sys/class/thermal/thermal_zone1/type": "gpu-thermal\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)

    assert board_facts(tmp_path) == {
        "board": "NVIDIA Jetson Orin Nano Developer Kit",
        "power_mode": "2",
        "cpu_clock_mhz": "1510",
        "gpu_clock_mhz": "624",
        "temperature_cpu_c": "48.5",
    }


def test_any_other_machine_tells_nothing_of_a_board(tmp_path):
    assert board_facts(tmp_path) == {}
