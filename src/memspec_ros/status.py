"""The topic `~/status`: the node's state, published on each change and latched for late comers."""

from collections.abc import Callable

from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

from memspec_msgs.msg import RuntimeStatus


class StatusPublisher:
    """Publishes what `state` gives, from the executor's threads, whenever a change is told."""

    def __init__(
        self, node: Node, group: CallbackGroup, state: Callable[[], RuntimeStatus]
    ) -> None:
        self._state = state
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
        self._publisher.publish(self._state())
