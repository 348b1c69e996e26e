"""The launch file of the examples: a task becomes a plan, and its sentences are spoken.

Run by launch_testing (`launch_test` or `pytest`); without it, test/ros tests each example alone.
"""

import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

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
from launch.actions import (
    IncludeLaunchDescription,
    SetEnvironmentVariable,
    SetLaunchConfiguration,
)
from launch.launch_description_sources import PythonLaunchDescriptionSource
from std_msgs.msg import String

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test" / "ros"))

from ros_harness import Graph, default_drafts, new_domain, until  # noqa: E402

UP_SECONDS = 180.0
DOMAIN = new_domain()


@pytest.mark.launch_test
@launch_testing.markers.keep_alive
def generate_test_description():
    params_file = Path(tempfile.mkdtemp()) / "params.yaml"
    params_file.write_text(f"/**:\n  ros__parameters:\n    drafts.names: {default_drafts()}\n")
    robot = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(ROOT / "examples/robot.launch.py")),
        launch_arguments={"params_file": str(params_file)}.items(),
    )
    return launch.LaunchDescription(
        [
            # A busy machine may take longer than the launch's own 5 s to end them.
            SetLaunchConfiguration("sigterm_timeout", "60"),
            SetEnvironmentVariable("ROS_DOMAIN_ID", str(DOMAIN)),
            SetEnvironmentVariable("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST"),
            robot,
            launch_testing.actions.ReadyToTest(),
        ]
    )


class TestRobot(unittest.TestCase):
    def test_a_task_given_while_models_load_becomes_a_plan(self):
        unknown = SimpleNamespace(output="the launch shows what the node says")
        with Graph(DOMAIN, unknown) as graph:
            plans, sentences = [], []
            graph.ros.create_subscription(String, "/planner/plan", plans.append, 10)
            graph.ros.create_subscription(String, "/speaker/sentence", sentences.append, 100)
            tasks = graph.ros.create_publisher(String, "/planner/task", 10)
            until(lambda: tasks.get_subscription_count() > 0, UP_SECONDS)
            tasks.publish(String(data="Fetch the red mug from the kitchen."))
            until(lambda: plans and sentences, UP_SECONDS)
            self.assertNotEqual(plans[0].data.strip(), "")


@launch_testing.post_shutdown_test()
class TestEnd(unittest.TestCase):
    def test_all_processes_end_with_code_0(self, proc_info):
        launch_testing.asserts.assertExitCodes(proc_info)

    def test_no_process_says_a_traceback(self, proc_output):
        text = "".join(line.text.decode(errors="replace") for line in proc_output)
        self.assertNotIn("Traceback", text)
