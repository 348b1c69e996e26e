"""The launch file, included twice: a robot whose node is respawned, and one under a manager.

Run by launch_testing (`launch_test` or `pytest`); without it, test/ros tests the same behaviour.
"""

import contextlib
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
import psutil
from launch.actions import (
    IncludeLaunchDescription,
    SetEnvironmentVariable,
    SetLaunchConfiguration,
)
from launch.launch_description_sources import PythonLaunchDescriptionSource

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test" / "ros"))

from lifecycle_manager import LifecycleManager  # noqa: E402
from ros_harness import Graph, default_drafts, new_domain, until  # noqa: E402

UP_SECONDS = 180.0
DOMAIN = new_domain()


def parameters_file():
    file = Path(tempfile.mkdtemp()) / "params.yaml"
    everyone = f"/**:\n  ros__parameters:\n    drafts.names: {default_drafts()}\n"
    # The launch's argument counts, not the file's.
    file.write_text(f"{everyone}/robot2/memspec:\n  ros__parameters:\n    autostart: true\n")
    return str(file)


def included(**arguments):
    source = PythonLaunchDescriptionSource(str(ROOT / "launch/memspec.launch.py"))
    return IncludeLaunchDescription(source, launch_arguments=arguments.items())


@pytest.mark.launch_test
@launch_testing.markers.keep_alive
def generate_test_description():
    params_file = parameters_file()
    return launch.LaunchDescription(
        [
            # A busy machine may take longer than the launch's own 5 s to end them.
            SetLaunchConfiguration("sigterm_timeout", "60"),
            SetEnvironmentVariable("ROS_DOMAIN_ID", str(DOMAIN)),
            SetEnvironmentVariable("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST"),
            # An argument of one inclusion holds for those after it, so that each names its own.
            included(
                params_file=params_file, namespace="robot1", use_respawn="true", autostart="true"
            ),
            included(
                params_file=params_file, namespace="robot2", use_respawn="false", autostart="false"
            ),
            launch_testing.actions.ReadyToTest(),
        ]
    )


def node_process(namespace):
    """Return the process that the launch started for a robot's node."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may just have ended
            if f"__ns:=/{namespace}" in process.cmdline():
                return process
    return None


class TestBringUp(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        unknown = SimpleNamespace(output="the launch shows what the node says")
        cls.first = Graph(DOMAIN, unknown, "robot1/memspec")
        cls.second = Graph(DOMAIN, unknown, "robot2/memspec")

    @classmethod
    def tearDownClass(cls):
        cls.first.close()
        cls.second.close()

    def test_a_robot_comes_up_stays_down_when_told_so_and_comes_up_after_a_crash(self):
        self.first.wait_status("active", UP_SECONDS)
        self.assertTrue(self.first.deactivate())
        self.first.next_diagnostics()
        self.assertEqual(self.first.state(), "inactive")

        crashed = node_process("robot1")
        crashed.kill()
        until(lambda: node_process("robot1") not in (None, crashed), UP_SECONDS)
        self.first.wait_status("active", UP_SECONDS)

    def test_a_robot_without_autostart_waits_for_its_manager(self):
        self.assertEqual(self.second.state(), "unconfigured")
        manager = LifecycleManager(self.second)
        self.assertTrue(manager.startup())
        self.assertTrue(manager.reset())
        self.assertTrue(manager.startup())


@launch_testing.post_shutdown_test()
class TestEnd(unittest.TestCase):
    def test_the_processes_end_with_code_0_but_for_the_crash(self, proc_info):
        launch_testing.asserts.assertExitCodes(proc_info, allowable_exit_codes=[0, -9])

    def test_the_nodes_say_no_traceback(self, proc_output):
        text = "".join(line.text.decode(errors="replace") for line in proc_output)
        self.assertNotIn("Traceback", text)
