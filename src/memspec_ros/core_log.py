"""What the core logs, told by the node: on /rosout, with its stamp and at its log level.

The core knows nothing of ROS and logs by Python's `logging`, which nobody else would show.
"""

import logging

from rclpy.impl.rcutils_logger import RcutilsLogger

CORE = "memspec_core"
"""The logger above all of the core's."""


class CoreLog(logging.Handler):
    """Hands the core's records to a node's logger, between `attach` and `detach`.

    Of several nodes in a process the first one tells them: a record does not say whose it is.
    """

    def __init__(self, logger: RcutilsLogger) -> None:
        super().__init__()
        self._core = logging.getLogger(CORE)
        self._kept = (self._core.level, self._core.propagate)
        self._logger = logger

    def attach(self) -> None:
        """Take over what the core logs, so that no other handler prints it again."""
        if any(isinstance(handler, CoreLog) for handler in self._core.handlers):
            return
        self._kept = (self._core.level, self._core.propagate)
        self._core.addHandler(self)
        self._core.setLevel(logging.DEBUG)  # the node's logger has the level that counts
        self._core.propagate = False

    def detach(self) -> None:
        """Leave the core's logger as it was."""
        if self not in self._core.handlers:
            return
        self._core.removeHandler(self)
        level, self._core.propagate = self._kept
        self._core.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Tell one record, its traceback included; raises nothing, as handlers should."""
        try:
            # A file's name may hold bytes that are no text.
            text = self.format(record).encode("utf-8", "backslashreplace").decode("utf-8")
            self._tell(record.levelno, text)
        except Exception:
            self.handleError(record)

    def _tell(self, level: int, text: str) -> None:
        # A call for each: rclpy refuses another severity from the same place in the source.
        if level >= logging.CRITICAL:
            self._logger.fatal(text)
        elif level >= logging.ERROR:
            self._logger.error(text)
        elif level >= logging.WARNING:
            self._logger.warning(text)
        elif level >= logging.INFO:
            self._logger.info(text)
        else:
            self._logger.debug(text)
