"""The command line of the package's commands: their own arguments, and those of ROS beside them."""

import argparse
import sys
from collections.abc import Sequence

ROS_ARGUMENTS = "--ros-args"

EXIT_USAGE = 2


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's options, and the whole command line, for `start_ros`.

    Exits with code 2 and a sentence where it cannot be read.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    return parser.parse_args(_without_ros(parser, given)), given


def start_ros(command: str, given: list[str]) -> None:
    """Initialise rclpy with the arguments of ROS in a command line; signals stay as they are.

    Exits with code 2 and a sentence where ROS cannot start like this.
    """
    import rclpy
    from rclpy.signals import SignalHandlerOptions

    try:
        rclpy.init(args=given, signal_handler_options=SignalHandlerOptions.NO)
    except Exception as error:  # of classes that rclpy keeps to itself
        print(f"{command}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from error


def _without_ros(parser: argparse.ArgumentParser, given: list[str]) -> list[str]:
    # ROS is slow to import; --help and wrong input are told without it.
    if ROS_ARGUMENTS not in given:
        return given
    from rclpy.utilities import remove_ros_args

    try:
        return list(remove_ros_args(args=given))
    except Exception as error:
        parser.error(str(error))
