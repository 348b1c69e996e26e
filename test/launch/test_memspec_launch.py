"""The launch file brings the node up, in a namespace, and ends it cleanly.

Run by launch_testing (`launch_test` or `pytest`); without it, test/ros tests the same behaviour.
"""

import os
import random
import tempfile
import time
import unittest
from pathlib import Path

import pytest

# The folder launch/ of this repository alone imports as an empty namespace package.
pytest.importorskip("launch.actions", reason="launch is not installed")
pytest.importorskip("launch_ros", reason="launch_ros is not installed")
pytest.importorskip("launch_testing", reason="launch_testing is not installed")
pytest.importorskip("memspec_msgs.action", reason="memspec_msgs is not built")

import launch
import launch_testing
import launch_testing.actions
import launch_testing.asserts
import launch_testing.markers
import rclpy
from launch.actions import IncludeLaunchDescription, TimerAction
from launch.launch_description_sources import PythonLaunchDescriptionSource
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState

ROOT = Path(__file__).resolve().parents[2]
UP_SECONDS = 180.0

os.environ["ROS_DOMAIN_ID"] = str(random.randrange(1, 100))
os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")


def parameters_file():
    drafts = "[mixed]" if (ROOT / "models/mixed").is_dir() else "['']"
    file = Path(tempfile.mkdtemp()) / "params.yaml"
    file.write_text(f"/**:\n  ros__parameters:\n    drafts.names: {drafts}\n")
    return str(file)


@pytest.mark.launch_test
@launch_testing.markers.keep_alive
def generate_test_description():
    memspec = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(ROOT / "launch/memspec.launch.py")),
        launch_arguments={
            "params_file": parameters_file(),
            "namespace": "robot",
            "log_level": "info",
        }.items(),
    )
    ready = TimerAction(period=1.0, actions=[launch_testing.actions.ReadyToTest()])
    return launch.LaunchDescription([memspec, ready])


class TestBringUp(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        rclpy.init()
        cls.node = rclpy.create_node("launch_tester")

    @classmethod
    def tearDownClass(cls):
        cls.node.destroy_node()
        rclpy.try_shutdown()

    def call(self, service_type, name, request):
        client = self.node.create_client(service_type, f"/robot/memspec/{name}")
        self.assertTrue(client.wait_for_service(UP_SECONDS))
        future = client.call_async(request)
        rclpy.spin_until_future_complete(self.node, future, timeout_sec=60.0)
        return future.result()

    def state(self):
        return self.call(GetState, "get_state", GetState.Request()).current_state.label

    def wait_state(self, label):
        deadline = time.monotonic() + UP_SECONDS
        while self.state() != label:
            self.assertLess(time.monotonic(), deadline, f"the node did not become {label}")
            time.sleep(0.2)

    def test_the_node_becomes_active_and_stays_inactive_when_told_so(self):
        self.wait_state("active")
        deactivate = ChangeState.Request(transition=Transition(id=Transition.TRANSITION_DEACTIVATE))
        self.assertTrue(self.call(ChangeState, "change_state", deactivate).success)
        time.sleep(2.0)
        self.assertEqual(self.state(), "inactive")


@launch_testing.post_shutdown_test()
class TestEnd(unittest.TestCase):
    def test_the_process_ends_with_code_0(self, proc_info):
        launch_testing.asserts.assertExitCodes(proc_info)

    def test_the_node_says_no_traceback(self, proc_output):
        text = "".join(line.text.decode(errors="replace") for line in proc_output)
        self.assertNotIn("Traceback", text)
