"""MemSpec and Prediction-Only: drafts ranked by what the context makes one expect (Algorithm 1)."""

import logging
from collections.abc import Callable, Sequence

from memspec_core.errors import PredictorError
from memspec_core.iteration import Iteration
from memspec_core.prediction.predictor import Predictor
from memspec_core.strategies.base import Context, Outlook, Ranking

_LOG = logging.getLogger(__name__)


class MemSpec:
    """Follows a predictor, and has the K best drafts made ready.

    Without a predictor, or where it cannot score a context, all drafts count alike, in the order in
    which they are named. After each use of the predictor `on_fault` is told why it could not, or
    nothing where it could.
    """

    name = "memspec"
    insists = False
    waits = False
    prepares: int | None = None

    def __init__(
        self,
        draft_names: Sequence[str],
        predictor: Predictor | None,
        on_fault: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._names = tuple(draft_names)
        self._predictor = predictor
        self._on_fault = on_fault
        self._warned = False
        self.reads_states = 0 if predictor is None else predictor.positions

    def rank(self, context: Context) -> Ranking:
        """Rank the candidate drafts for a context; those that were not trained for come last."""
        if self._predictor is None or context.prompt_state is None:
            return self._uniform()
        try:
            foresight = self._predictor.foresee(context.prompt_state, context.recent_state)
        except PredictorError as error:
            self._warn_once(error)
            self._on_fault(str(error))
            return self._uniform()
        self._on_fault("")
        scores = {name: foresight.scores.get(name, 0.0) for name in self._names}
        if foresight.topics is None:
            return Ranking(scores)
        return Ranking(scores, Outlook(foresight.topics, self._predictor.tokens_with))

    def observe(self, iteration: Iteration) -> None:
        """Let what the target accepted correct the predictor."""
        if self._predictor is not None:
            self._predictor.observe(iteration.draft, iteration.proposed, iteration.accepted)

    def _warn_once(self, error: PredictorError) -> None:
        """Log the first fault alone: a predictor that is broken fails at every scheduling point."""
        if not self._warned:
            _LOG.warning("All drafts count alike where the predictor fails: %s", error)
        self._warned = True

    def _uniform(self) -> Ranking:
        return Ranking(dict.fromkeys(self._names, 1.0 / max(1, len(self._names))))


class PredictionOnly(MemSpec):
    """Follows the same predictor, and loads a draft only when it is the one to run."""

    name = "prediction_only"
    prepares = 1
