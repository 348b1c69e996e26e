"""The topic `~/tokens`: what every goal generates, for whoever listens."""

from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions
from unique_identifier_msgs.msg import UUID

from memspec_core.request import FinishReason
from memspec_msgs.msg import TokenChunk
from memspec_ros.coalescing import Piece
from memspec_ros.conversions import chunk_from_piece, last_chunk
from memspec_ros.publishing import published

DEPTH = 256
"""Chunks kept for a slow subscriber: several seconds of a fast target."""


class TokenStream:
    """A managed publisher: silent unless the node is active. One chunk a piece of an answer."""

    def __init__(self, node: LifecycleNode) -> None:
        self._clock = node.get_clock()
        self._logger = node.get_logger()
        self._publisher = node.create_lifecycle_publisher(
            TokenChunk,
            "~/tokens",
            QoSProfile(depth=DEPTH, reliability=ReliabilityPolicy.RELIABLE),
            qos_overriding_options=QoSOverridingOptions.with_default_policies(),
        )

    def publish(self, goal_id: UUID, piece: Piece) -> None:
        """Publish a piece of a goal's answer, if anybody listens.

        Making and sending a chunk costs about as much as a feedback message does, on the cores
        that decode.
        """
        if self._publisher.get_subscription_count() == 0:
            return
        stamp = self._clock.now().to_msg()
        self._publish(chunk_from_piece(goal_id, piece, stamp))

    def publish_end(self, goal_id: UUID, sequence: int, reason: FinishReason) -> None:
        """Publish that a goal has ended, where its last piece did not."""
        stamp = self._clock.now().to_msg()
        self._publish(last_chunk(goal_id, sequence, reason, stamp))

    def _publish(self, chunk: TokenChunk) -> None:
        published(lambda: self._publisher.publish(chunk), self._logger, "a chunk")
