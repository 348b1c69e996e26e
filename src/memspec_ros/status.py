"""The topic `~/status`: the node's state, published on each change and latched for late comers."""

from collections.abc import Callable

from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

from memspec_msgs.msg import RuntimeStatus
from memspec_ros.publishing import published

ATTEMPTS = 5
"""No later status may come to make up for one that was refused."""


class StatusPublisher:
    """Publishes what `state` gives, from the executor's threads, whenever a change is told."""

    def __init__(
        self, node: Node, group: CallbackGroup, state: Callable[[], RuntimeStatus]
    ) -> None:
        self._state = state
        self._logger = node.get_logger()
        latched = QoSProfile(
            depth=1,
            reliability=ReliabilityPolicy.RELIABLE,
            durability=DurabilityPolicy.TRANSIENT_LOCAL,
        )
        self._publisher = node.create_publisher(RuntimeStatus, "~/status", latched)
        self._changed = node.create_guard_condition(self._publish, group)

    def tell_change(self) -> None:
        """Have the state published soon; returns at once, from any thread."""
        self._changed.trigger()

    def _publish(self) -> None:
        for _ in range(ATTEMPTS):
            if published(lambda: self._publisher.publish(self._state()), self._logger, "status"):
                return
