"""One draft for the whole generation: General-Static, and a draft that a request names."""

from collections.abc import Sequence

from memspec_core.iteration import Iteration
from memspec_core.request import LOOKUP, PLAIN
from memspec_core.strategies.base import Context, Ranking


class StaticStrategy:
    """Always the same draft; "none" and "lookup" want none in memory."""

    name = "static"
    insists: bool = True
    waits = False
    prepares: int | None = None
    reads_states = 0

    def __init__(self, draft: str) -> None:
        self._ranking = Ranking({} if draft in (PLAIN, LOOKUP) else {draft: 1.0})

    def rank(self, context: Context) -> Ranking:
        """Rank the one draft alone."""
        return self._ranking

    def observe(self, iteration: Iteration) -> None:
        """Nothing that happens changes the choice."""


class GeneralStatic(StaticStrategy):
    """General-Static: the draft named "general", or else the first one; plain if there is none."""

    name = "general_static"
    insists = False

    def __init__(self, draft_names: Sequence[str]) -> None:
        first = next(iter(draft_names), PLAIN)
        super().__init__("general" if "general" in draft_names else first)
