"""A real node in a process of its own, and a client side to talk to it.

Every node has its own ROS domain, kept to this machine.
"""

import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import psutil
import rclpy
import yaml
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.msg import Parameter, ParameterValue
from rcl_interfaces.srv import DescribeParameters, GetParameters, SetParameters
from rclpy.action import ActionClient
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter as RosParameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions

from memspec_msgs.action import Generate
from memspec_msgs.msg import RuntimeStatus, SchedulingDecision, TokenChunk
from memspec_msgs.srv import ListDrafts, PinDraft

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
LOAD_SECONDS = 180.0

COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"
"""A raw prompt that the embedded target continues for hundreds of tokens."""

_claims = []


def new_domain():
    """Return a ROS domain that no other run of these tests on this machine uses."""
    for domain in random.sample(range(1, 102), 101):
        claim = (Path(tempfile.gettempdir()) / f"memspec_test_domain_{domain}").open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            claim.close()
        else:
            _claims.append(claim)
            return domain
    raise RuntimeError("every ROS domain is in use")


def default_drafts():
    """Return the value of drafts.names for the drafts that the project brings along."""
    return ["mixed"] if (ROOT / "models/mixed").is_dir() else [""]


def environment(domain):
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "ROS_DOMAIN_ID": str(domain),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


class NodeProcess:
    """The node, started with some parameters."""

    def __init__(self, domain, folder, parameters=None, command=("-m", "memspec_ros.node")):
        given = {"drafts.names": default_drafts(), **(parameters or {})}
        self.log = Path(folder) / f"node_{domain}.log"
        params_file = Path(folder) / f"params_{domain}.yaml"
        params_file.write_text(yaml.safe_dump({"/**": {"ros__parameters": given}}))
        ros_arguments = ["--ros-args", "--params-file", str(params_file)]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command, *ros_arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(domain),
                cwd=folder,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    @property
    def alive(self):
        return self.process.poll() is None

    def resident_bytes(self):
        return psutil.Process(self.process.pid).memory_info().rss

    def send_signal(self, number=signal.SIGINT):
        self.process.send_signal(number)

    def wait(self, seconds=PATIENCE):
        return self.process.wait(seconds)

    def close(self):
        if self.alive:
            self.send_signal()
        try:
            self.wait(30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Goal:
    """One goal as its client sees it; to make one is to send it."""

    def __init__(self, graph, action, message):
        self.feedback = []
        self._graph = graph
        self._result_future = None
        self.handle_future = graph.from_executor(
            lambda: action.send_goal_async(message, feedback_callback=self.hear)
        )

    def hear(self, message):
        self.feedback.append(message.feedback)

    @property
    def handle(self):
        return wait(self.handle_future)

    @property
    def accepted(self):
        return self.handle.accepted

    def ask_result(self):
        if self._result_future is None:
            self._result_future = self._graph.from_executor(self.handle.get_result_async)
        return self._result_future

    def outcome(self, seconds=PATIENCE):
        """Return the terminal status and the result."""
        response = wait(self.ask_result(), seconds)
        return response.status, response.result

    def wait_feedback(self, count=1, seconds=PATIENCE):
        until(lambda: len(self.feedback) >= count, seconds)


class Graph:
    """A node of the test's own that talks to the tested node."""

    def __init__(self, domain, node, name="memspec"):
        self.domain = domain
        self.node = node
        self.name = name
        self.context = Context()
        rclpy.init(
            args=[],
            context=self.context,
            domain_id=domain,
            signal_handler_options=SignalHandlerOptions.NO,
        )
        self.ros = rclpy.create_node("tester", context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.ros)
        self.clients = {}
        self.diagnostics = []
        self.statuses = []
        self.chunks = []
        self.decisions = []
        latched = QoSProfile(
            depth=10,
            reliability=ReliabilityPolicy.RELIABLE,
            durability=DurabilityPolicy.TRANSIENT_LOCAL,
        )
        subscribe = self.ros.create_subscription
        subscribe(DiagnosticArray, "/diagnostics", self.diagnostics.append, 10)
        subscribe(RuntimeStatus, f"/{name}/status", self.statuses.append, latched)
        subscribe(TokenChunk, f"/{name}/tokens", self.chunks.append, 256)
        self.action = self.action_client()
        self._closed = threading.Event()
        self._spinning = threading.Thread(target=self._spin, daemon=True)
        self._spinning.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _spin(self):
        while not self._closed.is_set():
            self._spin_once()

    def _spin_once(self):
        """Go on whatever is raised: rclpy meets action clients that are still being made."""
        try:
            self.executor.spin_once(timeout_sec=0.1)
        except Exception:
            traceback.print_exc()

    def from_executor(self, ask):
        """Return what a request returns that is sent by the thread that takes the answers.

        Answers to an action client of rclpy may come before another thread has noted what it
        waits for, and are lost then (ros2/rclpy#1123).
        """
        return wait(self.executor.create_task(ask))

    def close(self):
        self._closed.set()
        self._spinning.join(5.0)
        if self.context.ok():
            self.context.shutdown()

    def action_client(self):
        """Return a client of the action that keeps up with many goals at once."""
        many = QoSProfile(depth=256)
        return ActionClient(
            self.ros,
            Generate,
            f"/{self.name}/generate",
            goal_service_qos_profile=many,
            result_service_qos_profile=many,
            feedback_sub_qos_profile=many,
        )

    def client(self, service_type, service):
        key = (service_type, service)
        if key not in self.clients:
            client = self.ros.create_client(service_type, f"/{self.name}/{service}")
            assert client.wait_for_service(PATIENCE), f"no service {service}: {self.node.output}"
            # Until the server has found us as well, its answers are lost.
            time.sleep(0.5)
            self.clients[key] = client
        return self.clients[key]

    def call(self, service_type, service, request):
        """Call a service that may be called twice, in case its first answer is lost."""
        client = self.client(service_type, service)
        for _ in range(5):
            future = client.call_async(request)
            if answered(future, 10.0):
                return future.result()
        raise AssertionError(f"no answer of {service}: {self.node.output}")

    def state(self):
        return self.call(GetState, "get_state", GetState.Request()).current_state.label

    def transit_async(self, transition):
        request = ChangeState.Request(transition=Transition(id=transition))
        return self.client(ChangeState, "change_state").call_async(request)

    def transit(self, transition, seconds=LOAD_SECONDS):
        return wait(self.transit_async(transition), seconds).success

    def configure(self):
        return self.transit(Transition.TRANSITION_CONFIGURE)

    def activate(self):
        return self.transit(Transition.TRANSITION_ACTIVATE)

    def deactivate(self):
        return self.transit(Transition.TRANSITION_DEACTIVATE)

    def cleanup(self):
        return self.transit(Transition.TRANSITION_CLEANUP)

    def bring_up(self):
        assert self.configure(), self.node.output
        assert self.activate(), self.node.output
        assert self.action.wait_for_server(PATIENCE)
        time.sleep(0.5)
        # The topic's match comes a moment after the action's.
        until(lambda: self.ros.count_publishers(f"/{self.name}/tokens") > 0)

    def set_parameter(self, name, value):
        """Return whether the node took the value, and its reason."""
        message = Parameter(name=name, value=parameter_value(value))
        request = SetParameters.Request(parameters=[message])
        result = self.call(SetParameters, "set_parameters", request).results[0]
        return result.successful, result.reason

    def get_parameter(self, name):
        request = GetParameters.Request(names=[name])
        value = self.call(GetParameters, "get_parameters", request).values[0]
        return RosParameter.from_parameter_msg(Parameter(name=name, value=value)).value

    def describe_parameter(self, name):
        request = DescribeParameters.Request(names=[name])
        return self.call(DescribeParameters, "describe_parameters", request).descriptors[0]

    def list_drafts(self):
        return self.call(ListDrafts, "list_drafts", ListDrafts.Request()).drafts

    def pin_draft(self, draft, pin):
        return self.call(PinDraft, "pin_draft", PinDraft.Request(draft=draft, pin=pin))

    def send(self, **fields):
        """Send a goal; fields that are not given are those of the test's long goal."""
        return Goal(self, self.action, Generate.Goal(**fields))

    def send_long(self, **fields):
        """Send a goal that runs for many seconds unless something ends it."""
        return self.send(**{"prompt": COUNTING, "raw": True, "max_new_tokens": 2000, **fields})

    def hear_decisions(self):
        """Have the node publish its scheduling decisions, which it does only for listeners."""
        topic = f"/{self.name}/decisions"
        self.ros.create_subscription(SchedulingDecision, topic, self.decisions.append, 256)
        until(lambda: self.ros.count_publishers(topic) > 0)
        time.sleep(0.5)  # until the node has found the subscription as well

    def decisions_of(self, goal):
        """Return the scheduling decisions of a goal that have come so far."""
        goal_id = goal.handle.goal_id
        return [decision for decision in self.decisions if decision.goal_id == goal_id]

    def wait_status(self, state, seconds=PATIENCE):
        until(lambda: self.statuses and self.statuses[-1].lifecycle_state == state, seconds)
        return self.statuses[-1]

    def next_diagnostics(self, seconds=PATIENCE):
        """Return the statuses that are published next, by the last word of their names."""
        seen = len(self.diagnostics)
        # The one after next was certainly made after this call.
        until(lambda: len(self.diagnostics) >= seen + 2, seconds)
        return {status.name.split()[-1]: status for status in self.diagnostics[-1].status}


def values(status):
    """Return the values of a diagnostic status by key."""
    return {pair.key: pair.value for pair in status.values}


def parameter_value(value):
    if isinstance(value, ParameterValue):
        return value
    return RosParameter("any", value=value).get_parameter_value()


def answered(future, seconds):
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(seconds)


def wait(future, seconds=PATIENCE):
    assert answered(future, seconds), f"no answer within {seconds} s"
    return future.result()


def until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.02)
