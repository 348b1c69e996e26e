"""A demonstration: starts the node, brings it up, asks it something and shows what the draft did.

Run as `python -m memspec_ros.demo ["a prompt"]`. The node is a process of its own, in a ROS domain
that is kept to this machine, so that nothing else on the network is met.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memspec_ros.arguments import parsed, start_ros

if TYPE_CHECKING:
    from memspec_ros.client import NodeClient, Outcome

PROMPT = "Explain in a few sentences how a robot can find its way through a building."
START_SECONDS = 60.0
LOAD_SECONDS = 600.0
STOP_SECONDS = 30.0
DOMAINS = range(1, 102)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; return its exit code."""
    options, given = parsed(_parser(), arguments)
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    os.environ.update(_private_domain())
    with tempfile.TemporaryDirectory(prefix="memspec_demo_") as folder:
        log = Path(folder) / "node.log"
        _say("Starting the node memspec (a process of its own, in a private ROS domain) ...")
        with log.open("w", encoding="utf-8") as output:
            node = subprocess.Popen(
                [sys.executable, "-m", "memspec_ros.node", *_node_arguments(options)],
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is ours alone; we end the node when we are done.
                start_new_session=True,
            )
        try:
            done = _show(options, given, node, interrupted)
        finally:
            code = _stop(node)
        if not done and not interrupted.is_set():
            _say("The node said:")
            print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
    if interrupted.is_set():
        return 130
    return 0 if done and code == 0 else 1


def _show(
    options: argparse.Namespace,
    given: list[str],
    node: "subprocess.Popen[bytes]",
    interrupted: threading.Event,
) -> bool:
    import rclpy

    from memspec_ros.client import ClientError, NodeClient

    start_ros("demo", given)
    try:
        client = NodeClient("/memspec", interrupted, lambda: node.poll() is not None)
        try:
            if not _bring_up(client):
                return False
            outcome = _ask(client, options.prompt, options.max_new_tokens)
        finally:
            client.close()
    except ClientError as error:
        _say(str(error))
        return False
    finally:
        rclpy.try_shutdown()
    if outcome.aborted:
        _say(f"The goal was aborted: {outcome.result.error}")
    return not outcome.aborted


def _bring_up(client: "NodeClient") -> bool:
    began = time.monotonic()
    client.wait_for_node(START_SECONDS)
    _say(f"It is there after {time.monotonic() - began:.1f} s; its state is {client.state()}.")
    _say("Transition configure: it loads the target and the drafts ...")
    began = time.monotonic()
    if not client.configure(LOAD_SECONDS):
        _say("Configure failed.")
        return False
    _say(f"Models loaded in {time.monotonic() - began:.1f} s.")
    _say("Transition activate: it accepts goals.")
    if not client.activate(START_SECONDS):
        _say("Activate failed.")
        return False
    client.wait_for_action(START_SECONDS)
    return True


def _ask(client: "NodeClient", prompt: str, max_new_tokens: int) -> "Outcome":
    from memspec_msgs.action import Generate
    from memspec_ros.summary import table

    _say(f"Goal to the action /memspec/generate: {prompt}")
    print()
    goal = Generate.Goal(prompt=prompt, max_new_tokens=max_new_tokens)
    outcome = client.generate(goal, lambda text: print(text, end="", flush=True))
    print("\n")
    _say("What it took, and what the draft did:")
    for line in table(outcome.result.stats, outcome.result.finish_reason):
        print(f"    {line}")
    print()
    return outcome


def _stop(node: "subprocess.Popen[bytes]") -> int:
    if node.poll() is None:
        _say("Stopping the node (SIGINT) ...")
        node.send_signal(signal.SIGINT)
    try:
        code = node.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        node.kill()
        code = node.wait()
    _say(f"The node has ended with exit code {code}.")
    return code


def _node_arguments(options: argparse.Namespace) -> list[str]:
    if not options.params_file:
        return []
    return ["--ros-args", "--params-file", options.params_file]


def _private_domain() -> dict[str, str]:
    domain = {"ROS_DOMAIN_ID": str(random.choice(DOMAINS))}
    if os.environ.get("ROS_DISTRO") == "humble":
        return {**domain, "ROS_LOCALHOST_ONLY": "1"}
    return {**domain, "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}


def _say(line: str) -> None:
    print(f"[demo] {line}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="what to ask")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--params-file", metavar="YAML", help="parameters of the node")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
