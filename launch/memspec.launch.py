"""Starts the node memspec and brings it up by lifecycle events.

The node is configured when its process has started, also after a respawn, and activated when it
has been configured. A deactivation by someone else is left as it is.
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, EmitEvent, RegisterEventHandler
from launch.conditions import IfCondition
from launch.event_handlers import OnProcessStart
from launch.events import matches_action
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from launch_ros.substitutions import FindPackageShare
from lifecycle_msgs.msg import Transition

RESPAWN_SECONDS = 2.0


def generate_launch_description():
    node = LifecycleNode(
        package="memspec_ros",
        executable="memspec_node",
        name=LaunchConfiguration("name"),
        namespace=LaunchConfiguration("namespace"),
        parameters=[LaunchConfiguration("params_file")],
        arguments=["--ros-args", "--log-level", LaunchConfiguration("log_level")],
        respawn=LaunchConfiguration("use_respawn"),
        respawn_delay=RESPAWN_SECONDS,
        output="screen",
        emulate_tty=True,
    )
    autostart = IfCondition(LaunchConfiguration("autostart"))
    configure = RegisterEventHandler(
        OnProcessStart(
            target_action=node,
            on_start=[_transition(node, Transition.TRANSITION_CONFIGURE)],
        ),
        condition=autostart,
    )
    activate = RegisterEventHandler(
        OnStateTransition(
            target_lifecycle_node=node,
            start_state="configuring",
            goal_state="inactive",
            entities=[_transition(node, Transition.TRANSITION_ACTIVATE)],
        ),
        condition=autostart,
    )
    # The handlers come first, so that no event of the node is missed.
    return LaunchDescription([*_arguments(), configure, activate, node])


def _transition(node, transition_id):
    return EmitEvent(
        event=ChangeState(lifecycle_node_matcher=matches_action(node), transition_id=transition_id)
    )


def _arguments():
    default_parameters = PathJoinSubstitution(
        [FindPackageShare("memspec_ros"), "config", "memspec.yaml"]
    )
    return [
        DeclareLaunchArgument(
            "params_file", default_value=default_parameters, description="YAML of parameters"
        ),
        DeclareLaunchArgument(
            "autostart",
            default_value="true",
            choices=["true", "false"],
            description="configure and activate; false leaves that to a lifecycle manager",
        ),
        DeclareLaunchArgument("name", default_value="memspec", description="name of the node"),
        DeclareLaunchArgument("namespace", default_value="", description="namespace of the node"),
        DeclareLaunchArgument(
            "use_respawn",
            default_value="false",
            choices=["true", "false"],
            description="start the process again, and bring it up, if it ends by itself",
        ),
        DeclareLaunchArgument(
            "log_level",
            default_value="info",
            choices=["debug", "info", "warn", "error", "fatal"],
            description="least severe messages to log",
        ),
    ]
