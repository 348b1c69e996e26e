"""The topic `~/decisions`: why each goal runs, loads and lets go which drafts."""

from collections.abc import Callable

from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile, ReliabilityPolicy
from unique_identifier_msgs.msg import UUID

from memspec_core.measurement.decisions import Decision
from memspec_msgs.msg import SchedulingDecision
from memspec_ros.conversions import decision_message
from memspec_ros.publishing import published

DEPTH = 256
"""Decisions kept for a slow subscriber: seconds of a fast target."""


class DecisionStream:
    """A managed publisher: silent unless the node is active. `goal` gives the goal that runs."""

    def __init__(self, node: LifecycleNode, goal: Callable[[], UUID]) -> None:
        self._clock = node.get_clock()
        self._logger = node.get_logger()
        self._goal = goal
        self._publisher = node.create_lifecycle_publisher(
            SchedulingDecision,
            "~/decisions",
            QoSProfile(depth=DEPTH, reliability=ReliabilityPolicy.RELIABLE),
        )

    def publish(self, decision: Decision) -> None:
        """Publish a decision, if anybody listens.

        It is called between two iterations, by the thread that decodes, and a message costs as
        much there as a chunk of `~/tokens` does.
        """
        if self._publisher.get_subscription_count() == 0:
            return
        message = decision_message(self._goal(), decision, self._clock.now().to_msg())
        published(lambda: self._publisher.publish(message), self._logger, "a decision")
