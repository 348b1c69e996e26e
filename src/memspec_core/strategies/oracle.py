"""The oracles, which know the answer beforehand: Oracle-Static and Oracle-Dynamic."""

from collections.abc import Sequence

from memspec_core.iteration import Iteration
from memspec_core.strategies.base import Context, Ranking
from memspec_core.strategies.known_answer import KnownAnswer, Situation, fresh
from memspec_core.strategies.planning import Plan, Step, plan
from memspec_core.strategies.static import StaticStrategy


class OracleStatic(StaticStrategy):
    """Oracle-Static: the one draft that finishes the known answer soonest, its load left out.

    `draft_names` [d] belong to the columns of the foresight's gains; equals keep their order.
    """

    name = "oracle_static"
    insists = False

    def __init__(self, draft_names: Sequence[str], known: KnownAnswer) -> None:
        best = min(range(len(draft_names)), key=known.static_seconds)
        super().__init__(draft_names[best])


class OracleDynamic:
    """Oracle-Dynamic: follows the best schedule of the known answer under the memory constraint.

    It plans when it is made, since an oracle's knowledge costs nothing. Where a generation has
    gone another way than planned, it plans the rest anew, and takes for resident what ran last and,
    as far as there is room, what it asked for last.
    """

    name = "oracle_dynamic"
    insists = False
    waits = False
    prepares: int | None = None
    reads_states = 0

    def __init__(
        self, draft_names: Sequence[str], known: KnownAnswer, width: int | None = None
    ) -> None:
        self._names = tuple(draft_names)
        self._known = known
        self._width = width
        self._plan = plan(known, width=width)
        self._last: Step | None = None
        self._ran: int | None = None
        self._seen: dict[int, int] = {}

    def rank(self, context: Context) -> Ranking:
        """Rank the active draft, those that are to stay, and those that are to load; no others."""
        step = self._foreseen(context.place)
        if step is None and context.place < len(self._known.gains):
            step = self._planned(context.place).steps[context.place]
        self._last = step or self._last  # longer than the known answer: stay
        order = self._last.order if self._last else ()
        return Ranking({self._names[draft]: float(-rank) for rank, draft in enumerate(order)})

    def observe(self, iteration: Iteration) -> None:
        """Note which draft has read the answer up to where."""
        if iteration.ran and iteration.draft in self._names:
            self._ran = self._names.index(iteration.draft)
            self._seen[self._ran] = iteration.generated_tokens

    def _foreseen(self, place: int) -> Step | None:
        """Return the plan's step here, if what ran so far is what was planned."""
        as_planned = self._last is None or self._last.active == self._ran
        return self._plan.steps.get(place) if as_planned else None

    def _planned(self, place: int) -> Plan:
        situation = None if self._last is None else self._situation(self._last)
        self._plan = plan(self._known, place, situation, self._width)
        return self._plan

    def _situation(self, last: Step) -> Situation:
        ran = last.active if self._ran is None else self._ran
        resident = dict.fromkeys((ran, *last.order))
        seen = [
            (draft, self._seen.get(draft, fresh(self._known)))
            for draft in list(resident)[: self._known.capacity]
        ]
        return Situation(ran, tuple(sorted(seen)))
