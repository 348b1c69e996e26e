"""Tokens a second through the action over the core's own, in one run.

    python benchmarks/action_overhead.py [--repeats 9] [--tokens 128] [--stream-period 0.05]

The core runs in this process, the node in one of its own; the same prompt goes through both in
turn. Reported are the tokens over the seconds within iterations; wall time counts from the
submission to the result, and what it holds beside those seconds (the prompt, the goal's start and
end, publishing) weighs more the shorter the answer is. Prints one JSON object: medians, and the
ratio's median and range over the pairs; tokens are those generated.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import rclpy

from memspec_core import GenerationRequest, Runtime, Settings
from memspec_msgs.action import Generate
from memspec_ros.client import NodeClient

PROMPT = "Explain in detail how a robot can find its way through a building."
LOAD_SECONDS = 300.0


class Run(NamedTuple):
    """One answer: its tokens, tokens a second (reported, wall), and seconds beside iterations."""

    tokens: int
    reported: float
    wall: float
    beside_seconds: float


def main() -> int:
    """Measure and print."""
    arguments = _arguments()
    os.environ["ROS_DOMAIN_ID"] = str(random.randrange(1, 102))
    os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    parameters = ("--ros-args", "-p", f"stream_period:={arguments.stream_period}")
    node = subprocess.Popen([sys.executable, "-m", "memspec_ros.node", *parameters])
    rclpy.init()
    what = (arguments.prompt, arguments.tokens)
    client = NodeClient("/memspec", threading.Event(), lambda: node.poll() is not None)
    runtime = Runtime(Settings.from_parameters())
    try:
        client.wait_for_node(LOAD_SECONDS)
        client.configure(LOAD_SECONDS)
        client.activate(LOAD_SECONDS)
        client.wait_for_action(LOAD_SECONDS)
        runtime.load()
        runtime.open()
        pairs = [
            (_through_core(runtime, *what), _through_action(client, *what))
            for _ in range(arguments.repeats + 1)
        ][1:]
    finally:
        runtime.close()
        client.close()
        rclpy.try_shutdown()
        node.send_signal(signal.SIGINT)
        node.wait()
    print(json.dumps(_report(pairs)))
    return 0


def _through_core(runtime: Runtime, prompt: str, tokens: int) -> Run:
    started = time.perf_counter()
    result = runtime.submit(GenerationRequest(prompt=prompt, max_new_tokens=tokens)).result()
    return _run(result.stats, time.perf_counter() - started)


def _through_action(client: NodeClient, prompt: str, tokens: int) -> Run:
    goal = Generate.Goal(prompt=prompt, max_new_tokens=tokens)
    started = time.perf_counter()
    stats = client.generate(goal, lambda text: None).result.stats
    return _run(stats, time.perf_counter() - started)


def _run(stats: Any, seconds: float) -> Run:
    tokens, rate = stats.generated_tokens, stats.tokens_per_second
    return Run(tokens, rate, tokens / seconds, seconds - tokens / rate)


def _report(pairs: list[tuple[Run, Run]]) -> dict[str, object]:
    report: dict[str, object] = {
        "pairs": len(pairs),
        "tokens": statistics.median(action.tokens for _, action in pairs),
    }
    for what in ("reported", "wall"):
        rates = [(getattr(core, what), getattr(action, what)) for core, action in pairs]
        ratios = sorted(action / core for core, action in rates)
        report[what] = {
            "core_tokens_per_second": round(statistics.median(core for core, _ in rates), 2),
            "action_tokens_per_second": round(statistics.median(action for _, action in rates), 2),
            "ratio": round(statistics.median(ratios), 4),
            "ratio_range": [round(ratios[0], 4), round(ratios[-1], 4)],
        }
    report["seconds_beside_iterations"] = {
        "core": round(statistics.median(core.beside_seconds for core, _ in pairs), 4),
        "action": round(statistics.median(action.beside_seconds for _, action in pairs), 4),
    }
    return report


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--stream-period", type=float, default=0.05)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
