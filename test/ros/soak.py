"""A robot's worst weeks in an hour: many goals, clients, cancels, faults, transitions and signals.

    scripts/in_environment python test/ros/soak.py [--goals 10000] [--cycles 100] [--starts 20]

Prints what was counted and measured as one JSON object, and writes it to --output where that is
given. Exit code 1 where a limit of `soak_limits.py` is exceeded. `test_soak.py` runs the short
form, `make soak` the long one.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Duration
from faulty_node import FAIL
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from ros_harness import COUNTING, Goal, Graph, NodeProcess, new_domain, until, wait
from soak_limits import violations

from memspec_msgs.action import Generate
from memspec_msgs.msg import TokenChunk

CLIENTS = 8
STORM = 24
QUEUE_SIZE = 4
STATES = {
    GoalStatus.STATUS_SUCCEEDED: "succeeded",
    GoalStatus.STATUS_CANCELED: "cancelled",
    GoalStatus.STATUS_ABORTED: "aborted",
}
DRAFTS = ["general", "code", "math", "medical", "law", "robot"]
PROMPTS = ("What is a robot?", "def add(a, b):", "Solve x + 2 = 5.", "May a tenant paint a wall?")
FAULTS = ("RuntimeError", "MemoryError")
MIB = 1024 * 1024


@dataclass
class Tally:
    """What came of the goals, and the seconds that things took."""

    counts: Counter = field(default_factory=Counter)
    seconds: dict = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what, number=1):
        with self.lock:
            self.counts[what] += number

    def took(self, what, seconds):
        with self.lock:
            self.seconds.setdefault(what, []).append(seconds)

    def report(self):
        return {
            "counts": dict(self.counts),
            "milliseconds": {
                what: {
                    "number": len(taken),
                    "p50": 1e3 * quantile(taken, 0.5),
                    "p99": 1e3 * quantile(taken, 0.99),
                    "most": 1e3 * max(taken),
                }
                for what, taken in self.seconds.items()
            },
        }


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Client:
    """One action client; all of a soak share a ROS node and its executor."""

    def __init__(self, graph, tally):
        self.graph = graph
        self.tally = tally
        self.action = graph.action_client()
        assert self.action.wait_for_server(60.0)

    def send(self, **fields):
        self.tally.count("goals")
        began = time.monotonic()
        goal = Goal(self.graph, self.action, Generate.Goal(**fields))
        goal.handle_future.add_done_callback(
            lambda _: self.tally.took("accept", time.monotonic() - began)
        )
        return goal

    def finish(self, goal):
        """Wait for the end of a goal that was accepted, and count it."""
        status, result = goal.outcome(120.0)
        self.tally.count(STATES[status])
        if "injected" in result.error:
            self.tally.count("ended by a fault")
        return status, result

    def cancel(self, goal):
        """Cancel a goal, and take the time until its client has the result."""
        ended = goal.ask_result()
        began = time.monotonic()
        goal.handle.cancel_goal_async()
        ended.add_done_callback(lambda _: self.tally.took("cancel", time.monotonic() - began))
        self.tally.count("cancels")


def any_goal(chance):
    """Return the fields of a short goal of some kind."""
    fields = {"prompt": chance.choice(PROMPTS), "max_new_tokens": chance.randint(1, 8)}
    fields["priority"] = chance.choice((0, 0, 0, -1, 5))
    if chance.random() < 0.05:
        fields["time_limit"] = Duration(nanosec=chance.randrange(1, 200_000_000))
    if chance.random() < 0.05:
        fields["temperature"] = -1.0  # is rejected
    return fields


def client_life(client, goals, chance, folder):
    """Send goals one after the other; cancel some, and have some fail."""
    for _ in range(goals):
        if chance.random() < 0.02:
            inject(folder, chance.choice(FAULTS))
            client.tally.count("faults injected")
        cancels = chance.random() < 0.2
        goal = client.send(**(any_goal(chance) | ({"max_new_tokens": 200} if cancels else {})))
        if not goal.accepted:
            client.tally.count("rejected")
            time.sleep(0.02)  # as a client that is refused should
            continue
        goal.ask_result()
        if cancels:
            time.sleep(chance.random() * 0.2)
            client.cancel(goal)
        client.finish(goal)


def inject(folder, fault):
    """Have the next iteration fail; the file is there whole or not at all."""
    new = folder / f"{FAIL}.{threading.get_ident()}"
    new.write_text(fault)
    new.rename(folder / FAIL)


def all_at_once(clients, goals, folder, seed):
    """Have all clients together send so many goals."""
    lives = [
        threading.Thread(
            target=client_life, args=(client, goals // CLIENTS, random.Random(seed + n), folder)
        )
        for n, client in enumerate(clients)
    ]
    for life in lives:
        life.start()
    for life in lives:
        life.join()
    (folder / FAIL).unlink(missing_ok=True)


def cancel_storms(client, storms):
    """Send many goals at once, and cancel all of them at once."""
    for _ in range(storms):
        goals = [client.send(prompt=COUNTING, raw=True) for _ in range(STORM)]
        accepted = [goal for goal in goals if goal.accepted]
        client.tally.count("rejected", STORM - len(accepted))
        for goal in accepted:
            client.cancel(goal)
        for goal in accepted:
            client.finish(goal)


def goals_across_transitions(graph, client, rounds):
    """Deactivate in mid-goal, and activate again, while another client goes on sending goals."""
    done = threading.Event()

    def send_on():
        while not done.is_set():
            goal = client.send(prompt="Hi", max_new_tokens=2)
            if goal.accepted:
                client.finish(goal)
            else:
                client.tally.count("rejected")

    sender = threading.Thread(target=send_on)
    sender.start()
    for _ in range(rounds):
        goal = client.send(prompt=COUNTING, raw=True, max_new_tokens=2000, draft="none", priority=9)
        if goal.accepted:
            goal.wait_feedback()
            goal.ask_result()
        else:
            client.tally.count("rejected")
        began = time.monotonic()
        assert graph.deactivate()
        client.tally.took("deactivate", time.monotonic() - began)
        if goal.accepted:
            client.finish(goal)
        assert graph.activate()
    done.set()
    sender.join()


def one_client(client, goals):
    """Beside a goal that runs, send another, and cancel both: what one client waits for.

    Every client of a process hears the feedback of all goals, so that others beside it would take
    its time and the decoder's cores.
    """
    for _ in range(goals):
        running = client.send(prompt=COUNTING, raw=True, max_new_tokens=2000, draft="none")
        running.wait_feedback()
        began = time.monotonic()
        waiting = client.send(prompt="Hi", max_new_tokens=2)
        assert waiting.accepted
        client.tally.took("accept, one client", time.monotonic() - began)
        waiting.ask_result()
        client.cancel(waiting)
        ended = running.ask_result()
        client.tally.count("cancels")
        began = time.monotonic()
        running.handle.cancel_goal_async()
        wait(ended)
        client.tally.took("cancel, one client", time.monotonic() - began)
        client.finish(waiting)
        _, result = client.finish(running)
        if result.stats.tokens_per_second:
            client.tally.took("iteration", 1.0 / result.stats.tokens_per_second)


@contextmanager
def bad_subscribers(domain, node):
    """Listen to the tokens slowly, and beside that come and go."""
    with Graph(domain, node, "elsewhere") as graph:
        ros, fickle = graph.ros, []

        def come_or_go():
            if fickle:
                ros.destroy_subscription(fickle.pop())
            else:
                fickle.append(
                    ros.create_subscription(TokenChunk, "/memspec/tokens", lambda _: None, 10)
                )

        ros.create_subscription(TokenChunk, "/memspec/tokens", lambda _: time.sleep(0.1), 1)
        ros.create_timer(0.5, come_or_go)
        yield


def resources(node):
    process = psutil.Process(node.process.pid)
    return {
        "mib": process.memory_info().rss / MIB,
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
    }


def lifecycle_cycles(graph, client, cycles):
    """Return the memory after each cleanup, in MiB."""
    after = []
    for _ in range(cycles):
        assert graph.configure(), graph.node.output
        assert graph.activate()
        goal = client.send(prompt="Hi", max_new_tokens=4)
        if goal.accepted:
            client.finish(goal)
        assert graph.deactivate()
        assert graph.cleanup()
        after.append(graph.node.resident_bytes() / MIB)
    return after


def end_in_mid_goal(graph, client):
    """End the node by SIGINT while a goal runs; return the seconds and whether all was well."""
    goal = client.send(prompt=COUNTING, raw=True, max_new_tokens=2000, draft="none")
    goal.wait_feedback()
    goal.ask_result()
    seconds = ended_by(graph.node, signal.SIGINT, client.tally)
    client.finish(goal)
    return seconds


def ended_by(node, number, tally):
    """Send a signal; return the seconds to the end, and count an end that is not as it should."""
    said = len(node.output)
    began = time.monotonic()
    node.send_signal(number)
    code = node.wait(60.0)
    seconds = time.monotonic() - began
    expected = -number if number == signal.SIGKILL else 0
    if code != expected or "Traceback" in node.output[said:]:
        tally.count("bad ends")
    return seconds


def random_ends(starts, folder, chance, tally):
    """Start nodes that configure by themselves, and end each by a signal at some moment."""
    for _ in range(starts):
        number = chance.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL))
        with NodeProcess(new_domain(), folder, {"autostart": True}) as node:
            # From the moment on at which Python can have a signal handler.
            until(lambda node=node: b"_rclpy_pybind11" in maps(node))
            time.sleep(chance.random() * 8.0)
            seconds = ended_by(node, number, tally)
            tally.count(f"ended by {number.name}")
            if number != signal.SIGKILL:
                tally.took("exit", seconds)


def maps(node):
    return Path(f"/proc/{node.process.pid}/maps").read_bytes()


def soak(goals, cycles, starts, folder, seed=0):
    """Run it all, and return the report."""
    began = time.monotonic()
    tally = Tally()
    domain = new_domain()
    command = [str(Path(__file__).with_name("faulty_node.py"))]
    parameters = {"drafts.names": DRAFTS, "queue_size": QUEUE_SIZE}
    with (
        NodeProcess(domain, folder, parameters, command) as node,
        Graph(domain, node) as graph,
    ):
        graph.bring_up()
        clients = [Client(graph, tally) for _ in range(CLIENTS)]
        client = clients[0]
        time.sleep(1.0)  # until the server has found all of them
        storms, rounds = max(1, goals // 500), max(2, goals // 100)
        with bad_subscribers(domain, node):
            all_at_once(clients, max(40, goals // 10), folder, seed + 100)
            before = resources(node)
            course = [before["mib"]]
            for part in range(4):
                all_at_once(clients, goals // 4, folder, seed + 10 * part)
                course.append(resources(node)["mib"])
            cancel_storms(client, storms)
            goals_across_transitions(graph, client, rounds)
            after = resources(node)
        assert graph.deactivate()
        assert graph.cleanup()
        memory = lifecycle_cycles(graph, client, cycles)
        graph.client(ChangeState, "change_state")
        assert graph.transit(Transition.TRANSITION_CONFIGURE)
        assert graph.activate()
        tally.took("exit in mid-goal", end_in_mid_goal(graph, client))
        expected = sum(node.output.count(f"{fault}: an injected fault") for fault in FAULTS)
        problems = node.output.count("Traceback") - expected
    random_ends(starts, folder, random.Random(seed), tally)
    domain = new_domain()
    last = NodeProcess(domain, folder, {"autostart": True, "drafts.names": DRAFTS})
    with last, Graph(domain, last) as graph:
        graph.wait_status("active", 180.0)
        client = Client(graph, tally)
        time.sleep(1.0)  # until the server has found it
        one_client(client, max(5, goals // 20))
    return tally.report() | {
        "before": before,
        "after": after,
        "mib_over_the_goals": course,
        "cycles": cycles,
        "mib_after_cleanup": memory,
        "tracebacks_beside_faults": problems,
        "faults_told": expected,
        "seconds": time.monotonic() - began,
        "load_average": os.getloadavg()[1],
    }


def main():
    parser = argparse.ArgumentParser(description="Soak the node.")
    parser.add_argument("--goals", type=int, default=10_000)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--logs", type=Path, help="keep the logs of the nodes in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(exist_ok=True)
        report = soak(options.goals, options.cycles, options.starts, folder, options.seed)
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    exceeded = violations(report)
    for sentence in exceeded:
        print(f"soak: {sentence}", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    raise SystemExit(main())
