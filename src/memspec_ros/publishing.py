"""Publishing that may fail without harm.

The middleware refuses a message when, for a tenth of a second, it has no room for it. Then rclpy
raises; neither a goal nor a timer may end for that.
"""

from collections.abc import Callable

from rclpy.action.server import RCLError
from rclpy.impl.rcutils_logger import RcutilsLogger

WARN_EVERY_SECONDS = 10.0


def published(publish: Callable[[], None], logger: RcutilsLogger, what: str) -> bool:
    """Call `publish` and return whether it succeeded; a refusal is logged, not raised."""
    try:
        publish()
    except RCLError as error:
        logger.warning(
            f"Could not publish {what}: {error}", throttle_duration_sec=WARN_EVERY_SECONDS
        )
        return False
    return True
