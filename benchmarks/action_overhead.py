"""Tokens a second through the action over the core's own, in one run.

    python benchmarks/action_overhead.py [--repeats 9] [--tokens 128]

The core runs in this process, the node in one of its own; the same prompt goes through both in
turn. Wall time counts from the submission to the result, tokens a second as both report it.
Prints one JSON object: medians, and the ratio's median and range over the pairs.
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

import rclpy

from memspec_core import GenerationRequest, Runtime, Settings
from memspec_msgs.action import Generate
from memspec_ros.client import NodeClient

PROMPT = "Explain in a few sentences how a robot can find its way through a building."
LOAD_SECONDS = 300.0


def main() -> int:
    """Measure and print."""
    arguments = _arguments()
    os.environ["ROS_DOMAIN_ID"] = str(random.randrange(1, 102))
    os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    node = subprocess.Popen([sys.executable, "-m", "memspec_ros.node"])
    rclpy.init()
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
            (_through_core(runtime, arguments.tokens), _through_action(client, arguments.tokens))
            for _ in range(arguments.repeats + 1)
        ][1:]
    finally:
        runtime.close()
        client.close()
        rclpy.try_shutdown()
        node.send_signal(signal.SIGINT)
        node.wait()
    print(json.dumps(_report(pairs, arguments.tokens)))
    return 0


def _through_core(runtime: Runtime, tokens: int) -> tuple[float, float]:
    """Return reported and wall tokens a second."""
    started = time.perf_counter()
    result = runtime.submit(GenerationRequest(prompt=PROMPT, max_new_tokens=tokens)).result()
    seconds = time.perf_counter() - started
    return result.stats.tokens_per_second, len(result.token_ids) / seconds


def _through_action(client: NodeClient, tokens: int) -> tuple[float, float]:
    goal = Generate.Goal(prompt=PROMPT, max_new_tokens=tokens)
    started = time.perf_counter()
    result = client.generate(goal, lambda text: None).result
    seconds = time.perf_counter() - started
    return result.stats.tokens_per_second, len(result.token_ids) / seconds


def _report(
    pairs: list[tuple[tuple[float, float], tuple[float, float]]], tokens: int
) -> dict[str, object]:
    report: dict[str, object] = {"pairs": len(pairs), "tokens": tokens}
    for index, what in enumerate(("reported", "wall")):
        ratios = sorted(action[index] / core[index] for core, action in pairs)
        report[what] = {
            "core_tokens_per_second": round(statistics.median(c[index] for c, _ in pairs), 2),
            "action_tokens_per_second": round(statistics.median(a[index] for _, a in pairs), 2),
            "ratio": round(statistics.median(ratios), 4),
            "ratio_range": [round(ratios[0], 4), round(ratios[-1], 4)],
        }
    return report


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
