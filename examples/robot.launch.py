"""Memspec, a node that plans with it, and one that speaks what it says; all in one namespace.

ros2 launch memspec_ros robot.launch.py namespace:=robot1 params_file:=/path/to/memspec.yaml
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackageShare

SHARE = FindPackageShare("memspec_ros")


def generate_launch_description():
    namespace = LaunchConfiguration("namespace")
    memspec = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(PathJoinSubstitution([SHARE, "launch", "memspec.launch.py"])),
        launch_arguments={
            "namespace": namespace,
            "params_file": LaunchConfiguration("params_file"),
            "use_respawn": "true",
        }.items(),
    )
    planner = Node(
        package="memspec_ros", executable="plan_node.py", namespace=namespace, output="screen"
    )
    speaker = Node(
        package="memspec_ros", executable="speak.py", namespace=namespace, output="screen"
    )
    default_parameters = PathJoinSubstitution([SHARE, "config", "memspec.yaml"])
    return LaunchDescription(
        [
            DeclareLaunchArgument("namespace", default_value=""),
            DeclareLaunchArgument("params_file", default_value=default_parameters),
            memspec,
            planner,
            speaker,
        ]
    )
