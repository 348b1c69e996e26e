#!/usr/bin/env python3
"""A task node: asks memspec for a plan for each task, and publishes the plan.

    ros2 run memspec_ros plan_node.py
    ros2 topic pub --once /planner/task std_msgs/msg/String "{data: Fetch the red mug.}"

A newer task cancels the older one's goal. A task that comes before memspec is active waits for it.
"""

from functools import partial

import rclpy
from action_msgs.msg import GoalStatus
from rclpy.action import ActionClient
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from std_msgs.msg import String

from memspec_msgs.action import Generate
from memspec_msgs.msg import ChatMessage

SYSTEM = "You are a helpful assistant for robots."
REQUEST = "List the steps to do this: "
RETRY_SECONDS = 0.5


class Planner(Node):
    """Listens to `~/task`, publishes to `~/plan`; only the newest task counts."""

    def __init__(self):
        super().__init__("planner")
        # Relative: in a robot's namespace it is that robot's memspec.
        memspec = self.declare_parameter("memspec", "memspec").value
        self.declare_parameter("max_new_tokens", 200)
        self.declare_parameter("system", SYSTEM)
        self.declare_parameter("request", REQUEST)
        self._client = ActionClient(self, Generate, f"{memspec}/generate")
        self._plans = self.create_publisher(String, "~/plan", 10)
        self.create_subscription(String, "~/task", self._hear, 10)
        self.create_timer(RETRY_SECONDS, self._ask)
        self._newest = 0  # tasks are told apart by their number
        self._task = ""  # the newest one, until it has its plan
        self._asked = False  # whether its goal has been sent
        self._handle = None  # that goal, once it has been accepted

    def _hear(self, message):
        self._newest += 1
        self._task = message.data.strip()
        self._asked = False
        if self._handle is not None:
            self._handle.cancel_goal_async()
            self._handle = None
        self._ask()

    def _ask(self):
        """Send the task that has no plan yet; while memspec is not there, try again later."""
        if not self._client.server_is_ready():
            # What was asked of a process that has gone is asked again of the next.
            self._asked = False
            self._handle = None
            return
        if self._asked or not self._task:
            return
        self._asked = True
        request = self.get_parameter("request").value + self._task
        goal = Generate.Goal(
            messages=[
                ChatMessage(role="system", content=self.get_parameter("system").value),
                ChatMessage(role="user", content=request),
            ],
            max_new_tokens=self.get_parameter("max_new_tokens").value,
        )
        answer = self._client.send_goal_async(goal)
        answer.add_done_callback(partial(self._on_answer, self._newest))

    def _on_answer(self, number, answer):
        handle = answer.result()
        if number != self._newest:
            if handle.accepted:
                handle.cancel_goal_async()
        elif handle.accepted:
            self._handle = handle
            handle.get_result_async().add_done_callback(partial(self._on_result, number))
        else:
            self._asked = False
            self.get_logger().warning("memspec takes no task yet.", throttle_duration_sec=10.0)

    def _on_result(self, number, response):
        if number != self._newest:
            return  # a newer task has come
        self._task = ""
        self._asked = False
        self._handle = None
        if response.result().status == GoalStatus.STATUS_SUCCEEDED:
            self._plans.publish(String(data=response.result().result.text))
        else:
            self.get_logger().error(f"There is no plan: {response.result().result.error}")


def main():
    """Run the node until it is interrupted."""
    rclpy.init()
    node = Planner()
    try:
        rclpy.spin(node)
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


if __name__ == "__main__":
    main()
