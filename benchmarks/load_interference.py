"""What loading a draft costs decoding: in a thread, as it is done, and in a process beside it.

    python benchmarks/load_interference.py [--draft mixed] [--loads 30] [--threads 0]

A step is one draft-and-verify iteration of fixed size: four proposals, and a pass of five rows.
Steps that overlap a load are compared with steps that do not; loads are warm (the system holds the
file in its page cache) or cold (it was told to drop it) in turn. The process reads and packs as the
thread does, with a target of its own, but hands nothing over: what it reports is a lower bound.
Prints one JSON object, times in milliseconds.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from memspec_core.clock import SystemClock
from memspec_core.measurement.bandwidth import read_bandwidth
from memspec_core.models.draft import WEIGHTS, DraftPlan, plan_draft, shared_taps
from memspec_core.models.pieces import Pace, forget
from memspec_core.models.target import Target, plan_target
from memspec_core.residency.loader import DraftLoader
from memspec_core.residency.pace import LoadPace, load_rate
from memspec_core.settings import DEFAULT, MIB
from memspec_core.speculation.feature import FeatureDraft
from memspec_core.speculation.proposal import Draft

CONTEXT_TOKENS = 512
PROPOSALS = 4
QUIET_STEPS = 20
READ_BYTES = 64 * MIB


class Steps:
    """Draft-and-verify iterations of one size after one context."""

    def __init__(self, target: Target, plan: DraftPlan) -> None:
        self._target = target
        self._tokens = [(37 * i) % 4000 + 100 for i in range(CONTEXT_TOKENS)]
        target.read(self._tokens)
        self._decoder, self._rows = plan.load_feature(target)
        assert target.cache.features is not None
        self._features = target.cache.features
        self._decoder.feed(self._tokens[1:], self._features, self._rows)

    def run(self) -> float:
        """Run one; return its seconds."""
        started = time.perf_counter()
        known, token = len(self._tokens), self._tokens[-1]
        proposed = self._decoder.roll([token], self._features, self._rows, PROPOSALS)
        self._rows.truncate(known - 1)
        hidden = self._target.decoder.forward([token, *proposed], self._target.cache)
        self._target.decoder.logits(hidden).argmax(dim=-1).tolist()
        self._target.cache.truncate(known)
        return time.perf_counter() - started


def main() -> int:
    """Measure and print."""
    arguments = _arguments()
    torch.set_num_threads(1)
    target, plan = _models(arguments.draft, arguments.threads)
    rate = read_bandwidth(target.backend.threads, size_bytes=READ_BYTES)
    steps = Steps(target, plan)
    report: dict[str, Any] = {
        "draft": arguments.draft,
        "file_mib": round((plan.path / WEIGHTS).stat().st_size / MIB, 2),
        "read_gb_per_second": round(rate / 1e9, 2),
        "load_mb_per_second": round(load_rate(rate) / 1e6, 1),
    }
    thread, process = _Thread(target, plan, rate), _Process(arguments.draft, rate)
    try:
        for loader in (thread, process):
            for is_warm in (True, False):
                measured = _measured(steps, loader, plan, arguments.loads, is_warm)
                report[f"{loader.name}, {'warm' if is_warm else 'cold'}"] = measured
    finally:
        thread.close()
        process.close()
    print(json.dumps(report, indent=1))
    return 0


class _Thread:
    name = "thread"

    def __init__(self, target: Target, plan: DraftPlan, read_bytes_per_second: float) -> None:
        def load(name: str, pace: Pace) -> Draft:
            layers, rows = plan.load_feature(target, pace)
            size = target.decoder.config.vocabulary_size
            return FeatureDraft(name, layers, rows, size, target.cache)

        self._loader = DraftLoader(load, SystemClock())
        self._loader.limit_rate(read_bytes_per_second)

    def start(self) -> None:
        self._loader.start("draft")

    def seconds(self) -> float | None:
        ended = self._loader.finished()
        return ended[0].seconds if ended else None

    def close(self) -> None:
        self._loader.close()


class _Process:
    name = "process"

    def __init__(self, draft: str, read_bytes_per_second: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end, draft, read_bytes_per_second))
        self._process.start()
        self._connection.recv()

    def start(self) -> None:
        self._connection.send(True)

    def seconds(self) -> float | None:
        return self._connection.recv() if self._connection.poll() else None

    def close(self) -> None:
        self._connection.send(False)
        self._process.join()


def _serve(connection: Connection, draft: str, read_bytes_per_second: float) -> None:
    torch.set_num_threads(1)
    target, plan = _models(draft, 1)
    rate = load_rate(read_bytes_per_second)
    plan.load_feature(target)
    connection.send(0.0)
    while connection.recv():
        started = time.perf_counter()
        plan.load_feature(target, LoadPace(rate, lambda: False, SystemClock()))
        connection.send(time.perf_counter() - started)


def _measured(
    steps: Steps, loader: "_Thread | _Process", plan: DraftPlan, loads: int, is_warm: bool
) -> dict[str, float]:
    quiet, beside, lost, load_seconds = [], [], [], []
    file = plan.path / WEIGHTS
    for _ in range(loads):
        some = [steps.run() for _ in range(QUIET_STEPS)]
        quiet += some[2:]  # after a load the caches are cold
        _prepare(file, is_warm)
        loader.start()
        during = []
        while (seconds := loader.seconds()) is None:
            during.append(steps.run())
        load_seconds.append(seconds)
        beside += during
        lost.append(sum(during) - len(during) * statistics.median(some))
    return {
        "load_p50": _milliseconds(load_seconds, 0.50),
        "load_p95": _milliseconds(load_seconds, 0.95),
        "step_p50": _milliseconds(quiet, 0.50),
        "step_p95": _milliseconds(quiet, 0.95),
        "step_p50_beside_load": _milliseconds(beside, 0.50),
        "step_p95_beside_load": _milliseconds(beside, 0.95),
        "slowdown": round(statistics.mean(beside) / statistics.mean(quiet) - 1.0, 3),
        "lost_a_load": _milliseconds(lost, 0.50),
    }


def _prepare(file: Path, is_warm: bool) -> None:
    if is_warm:
        file.read_bytes()
    else:
        forget(file)


def _models(draft: str, threads: int) -> tuple[Target, DraftPlan]:
    plan = plan_target(
        DEFAULT,
        dtype="stored",
        device=torch.device("cpu"),
        context_tokens=2 * CONTEXT_TOKENS,
        threads=threads or os.cpu_count() or 1,
    )
    name, _, path = draft.partition("=")
    chosen = plan_draft(name, path or DEFAULT, plan)
    return plan.with_taps(shared_taps([chosen])).load(), chosen


def _milliseconds(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft", default="mixed", help="a feature draft: NAME or NAME=FOLDER")
    parser.add_argument("--loads", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0, help="of decoding; 0 for all cores")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
