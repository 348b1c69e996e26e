"""The node over a middleware that refuses to publish the states and the feedback of goals."""

from rclpy.action.server import RCLError, ServerGoalHandle

from memspec_ros.node import main


def refusing(method):
    def call(self, *arguments):
        method(self, *arguments)
        raise RCLError("cannot publish data")

    return call


ServerGoalHandle._update_state = refusing(ServerGoalHandle._update_state)
ServerGoalHandle.publish_feedback = refusing(ServerGoalHandle.publish_feedback)

if __name__ == "__main__":
    raise SystemExit(main())
