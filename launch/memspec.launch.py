"""Starts the node memspec, which brings itself up: also after a respawn, and in any namespace.

Include it as often as there are namespaces or names. A deactivation by someone else is left as it
is.
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

RESPAWN_SECONDS = 2.0


def generate_launch_description():
    autostart = ParameterValue(LaunchConfiguration("autostart"), value_type=bool)
    node = Node(
        package="memspec_ros",
        executable="memspec_node",
        name=LaunchConfiguration("name"),
        namespace=LaunchConfiguration("namespace"),
        parameters=[LaunchConfiguration("params_file"), {"autostart": autostart}],
        arguments=["--ros-args", "--log-level", LaunchConfiguration("log_level")],
        respawn=LaunchConfiguration("use_respawn"),
        respawn_delay=RESPAWN_SECONDS,
        output="screen",
        emulate_tty=True,
    )
    return LaunchDescription([*_arguments(), node])


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
