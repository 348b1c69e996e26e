"""The bandits: a draft's worth is learnt by running it (MAB-Sync and MAB-Async).

    index_d = mean_d + c · sqrt(ln t / n_d)        (UCB1; Auer et al., 2002)

mean_d is the mean reward of the n_d iterations that draft d ran, t the sum of all n_d. The reward
is the tokens that an iteration gained, the accepted ones and the target's own, as in BanditSpec;
it goes to the draft that ran, whichever was wanted. Iterations that ran plainly or with a lookup
count for no draft. A draft that never ran comes before all others, in the order of the names, so
that each is explored once.

A draft that cannot be loaded, or never gets to propose, would be wanted for ever: when it was
wanted at `PATIENCE` scheduling points in a row without running, it is passed over, which is to come
last until it runs, or until no draft is left.
"""

import math
from collections.abc import Iterable

from memspec_core.iteration import Iteration
from memspec_core.strategies.base import Context, Ranking

EXPLORATION = 2.0
"""c: the best of the paper's 0.1, 0.5, 1, 2 and 3."""

PATIENCE = 8
"""Scheduling points: at N = 4, a load may take twelve times as long as the paper's."""


class Bandit:
    """UCB over the drafts, for one generation; the next one takes a new bandit."""

    insists = False
    prepares: int | None = 1
    reads_states = 0

    def __init__(self, draft_names: Iterable[str], exploration: float = EXPLORATION) -> None:
        self._exploration = exploration
        self._iterations = dict.fromkeys(draft_names, 0)
        self._tokens = dict.fromkeys(self._iterations, 0)
        self._passed_over: set[str] = set()
        self._wanted: str | None = None
        self._in_vain = 0

    def rank(self, context: Context) -> Ranking:
        """Rank the drafts by their index; the context does not matter."""
        self._lose_patience()
        ranking = Ranking(self._scores())
        self._in_vain = self._in_vain + 1 if ranking.best == self._wanted else 1
        self._wanted = ranking.best
        return ranking

    def observe(self, iteration: Iteration) -> None:
        """Credit what an iteration gained to the draft that ran."""
        draft = iteration.draft
        if draft not in self._iterations or not iteration.ran:
            return
        self._iterations[draft] += 1
        self._tokens[draft] += iteration.accepted + 1
        self._passed_over.discard(draft)
        if draft == self._wanted:
            self._in_vain = 0

    def _lose_patience(self) -> None:
        if self._wanted is not None and self._in_vain >= PATIENCE:
            self._passed_over.add(self._wanted)
            if len(self._passed_over) == len(self._iterations):
                self._passed_over.clear()

    def _scores(self) -> dict[str, float]:
        """Return the index of each draft; above all where it never ran, 0 where passed over."""
        total = sum(self._iterations.values())
        indices = {
            draft: self._index(draft, count, total)
            for draft, count in self._iterations.items()
            if count and draft not in self._passed_over
        }
        unexplored = 1.0 + max(indices.values(), default=0.0)
        return {
            draft: 0.0 if draft in self._passed_over else indices.get(draft, unexplored)
            for draft in self._iterations
        }

    def _index(self, draft: str, count: int, total: int) -> float:
        bonus = self._exploration * math.sqrt(math.log(total) / count)
        return self._tokens[draft] / count + bonus


class MabSync(Bandit):
    """MAB-Sync: decoding stops until the draft that the bandit chose is resident."""

    name = "mab_sync"
    waits = True


class MabAsync(Bandit):
    """MAB-Async: the chosen draft loads while decoding goes on with a resident one."""

    name = "mab_async"
    waits = False
