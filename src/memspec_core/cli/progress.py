"""A bar for work that takes long, with the time that is left."""

import sys
from types import TracebackType

from tqdm import tqdm


class Progress:
    """One bar at a time on the standard error, a new one for each thing that is being done."""

    def __init__(self) -> None:
        self._what = ""
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> "Progress":
        """Show nothing yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def show(self, what: str, done: int, total: int) -> None:
        """Say what is being done, how much of it is done, and how much there is."""
        if self._bar is None or what != self._what:
            if self._bar is not None:
                self._bar.close()
            # What was there before must not count as done in no time.
            self._bar = tqdm(desc=what, total=total, initial=done, file=sys.stderr, mininterval=1.0)
            self._what = what
        self._bar.update(done - self._bar.n)
