"""What the core logs, told by a logger of ROS."""

import logging

import pytest
import rclpy
from rclpy.context import Context
from rclpy.logging import LoggingSeverity, get_logger
from rclpy.signals import SignalHandlerOptions
from ros_harness import new_domain

from memspec_ros.core_log import CORE, CoreLog
from memspec_ros.node import MemSpecNode

CORE_PART = logging.getLogger(f"{CORE}.part")


@pytest.fixture
def told(capfd):
    """Attach a handler, and give a function that returns what was printed since."""
    logger = get_logger("core_log_of_tests")
    logger.set_level(LoggingSeverity.DEBUG)
    handler = CoreLog(logger)
    handler.attach()
    yield lambda: capfd.readouterr().err
    handler.detach()


def test_each_record_has_its_severity_each_time(told):
    for _ in range(2):
        for level in ("debug", "info", "warning", "error", "critical"):
            getattr(CORE_PART, level)("said as %s", level)
    said = told()

    for severity, level in (
        ("DEBUG", "debug"),
        ("INFO", "info"),
        ("WARN", "warning"),
        ("ERROR", "error"),
        ("FATAL", "critical"),
    ):
        lines = [line for line in said.splitlines() if line.endswith(f"said as {level}")]
        assert len(lines) == 2, said
        assert all(f"[{severity}]" in line for line in lines), said


def test_a_traceback_is_told(told):
    try:
        raise OSError("no disc")
    except OSError:
        CORE_PART.exception("It failed")

    said = told()
    assert said.count("Traceback") == 1
    assert said.index("It failed") < said.index("OSError: no disc")


def test_the_level_of_the_node_counts(told):
    get_logger("core_log_of_tests").set_level(LoggingSeverity.WARN)
    CORE_PART.info("quiet")
    CORE_PART.warning("loud")

    said = told()
    assert "quiet" not in said
    assert "loud" in said


def test_no_record_raises(told):
    CORE_PART.warning("%d", "not a number")
    CORE_PART.warning("a file %s", "bad\udcff")

    assert "a file bad\\udcff" in told()


def test_no_line_is_printed_twice(told):
    root = logging.getLogger()
    other = logging.StreamHandler()
    second = CoreLog(get_logger("second_node_of_tests"))
    root.addHandler(other)
    second.attach()
    try:
        CORE_PART.error("once")
    finally:
        second.detach()
        root.removeHandler(other)

    assert told().count("once") == 1


def test_the_handler_goes_with_the_node():
    core = logging.getLogger(CORE)
    before = (core.level, core.propagate, list(core.handlers))
    context = Context()
    rclpy.init(
        args=[],
        context=context,
        domain_id=new_domain(),
        signal_handler_options=SignalHandlerOptions.NO,
    )
    try:
        node = MemSpecNode(context=context)
        assert any(isinstance(handler, CoreLog) for handler in core.handlers)
        node.destroy_node()
    finally:
        context.shutdown()

    assert (core.level, core.propagate, core.handlers) == before
