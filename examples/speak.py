#!/usr/bin/env python3
"""What a text-to-speech node needs: whole sentences of all that memspec says, as it is said.

    ros2 run memspec_ros speak.py
    ros2 topic echo /speaker/sentence

Put your synthesiser's call in place of the publication.
"""

import rclpy
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from rclpy.qos import QoSProfile
from std_msgs.msg import String

from memspec_msgs.msg import TokenChunk
from memspec_ros.sentences import GoalSentences


class Speaker(Node):
    """Listens to memspec's tokens, publishes each sentence to `~/sentence`."""

    def __init__(self):
        super().__init__("speaker")
        memspec = self.declare_parameter("memspec", "memspec").value
        self._sentences = GoalSentences()
        self._publisher = self.create_publisher(String, "~/sentence", QoSProfile(depth=100))
        # As deep as memspec's own queue: no chunk is lost while a sentence is being spoken.
        tokens = QoSProfile(depth=256)
        self.create_subscription(TokenChunk, f"{memspec}/tokens", self._hear, tokens)

    def _hear(self, chunk):
        for sentence in self._sentences.add(chunk):
            if sentence.strip():
                self._publisher.publish(String(data=sentence.strip()))


def main():
    """Run the node until it is interrupted."""
    rclpy.init()
    node = Speaker()
    try:
        rclpy.spin(node)
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


if __name__ == "__main__":
    main()
