"""Fixtures of the tests over real processes. Without ROS 2 they are left out; pytest says so."""

import os

import pytest

os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")

try:
    import rclpy  # noqa: F401

    # The folder src/memspec_msgs alone imports as an empty namespace package.
    from memspec_msgs.action import Generate  # noqa: F401
except ImportError as error:
    WITHOUT_ROS = str(error)
    collect_ignore_glob = ["test_*.py"]
else:
    WITHOUT_ROS = ""
    from ros_harness import Graph, NodeProcess, new_domain

    @pytest.fixture(scope="module")
    def active(tmp_path_factory):
        """Give a graph with an active node, shared by the tests of a module."""
        domain = new_domain()
        folder = tmp_path_factory.mktemp("node")
        with NodeProcess(domain, folder) as node, Graph(domain, node) as graph:
            graph.bring_up()
            yield graph

    @pytest.fixture
    def start(tmp_path):
        """Give a function that starts a node of the test's own, and a graph around it."""
        running = []

        def start_node(*command, **parameters):
            domain = new_domain()
            node = NodeProcess(domain, tmp_path, parameters, *command)
            running.append(node)
            graph = Graph(domain, node)
            running.append(graph)
            return graph

        yield start_node
        for thing in reversed(running):
            thing.close()


def pytest_report_header():
    return f"test/ros is left out: {WITHOUT_ROS}" if WITHOUT_ROS else None


def pytest_collection_modifyitems(items):
    for item in items:
        if "/test/ros/" in str(item.path):
            item.add_marker(pytest.mark.ros)
