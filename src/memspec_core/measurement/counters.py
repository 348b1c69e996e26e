"""The runtime's counters over its lifetime and over the last minute."""

import threading
from collections import deque
from dataclasses import dataclass, field

from memspec_core.clock import Clock
from memspec_core.iteration import Iteration
from memspec_core.measurement.statistics import by_position
from memspec_core.request import FinishReason, GenerationResult
from memspec_core.snapshot import GenerationCounters

WINDOW_SECONDS = 60.0
_NOW_SECONDS = 2.0


@dataclass
class _Totals:
    accepted: int = 0
    succeeded: int = 0
    cancelled: int = 0
    aborted: int = 0
    rejected: int = 0
    iterations: int = 0
    tokens: int = 0
    accepted_tokens: int = 0
    desired: float = 0.0
    fallback: float = 0.0
    load_wait: float = 0.0
    prediction: float = 0.0
    first_token: float = 0.0


@dataclass
class _Draft:
    iterations: int = 0
    proposed: int = 0
    accepted: int = 0
    judged_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Moment:
    at: float
    tokens: int
    seconds: float
    fallback: float


@dataclass
class RuntimeCounters:
    """Counts generations and iterations; any thread may add and ask."""

    clock: Clock
    _totals: _Totals = field(default_factory=_Totals)
    _drafts: dict[str, _Draft] = field(default_factory=dict)
    _window: deque[_Moment] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_accepted(self) -> None:
        """Count a generation that was taken."""
        with self._lock:
            self._totals.accepted += 1

    def count_rejected(self) -> None:
        """Count a generation that was refused."""
        with self._lock:
            self._totals.rejected += 1

    def count_iteration(self, iteration: Iteration) -> None:
        """Count what one iteration did."""
        spent = iteration.seconds
        fallback = spent.decode if iteration.fallback else 0.0
        seconds = spent.decode + spent.load_wait + spent.prediction
        with self._lock:
            totals = self._totals
            totals.iterations += iteration.ran
            totals.tokens += iteration.committed
            totals.accepted_tokens += iteration.accepted
            totals.desired += spent.decode - fallback
            totals.fallback += fallback
            totals.load_wait += spent.load_wait
            totals.prediction += spent.prediction
            draft = self._drafts.setdefault(iteration.draft, _Draft())
            draft.iterations += iteration.ran
            draft.proposed += iteration.proposed
            draft.accepted += iteration.accepted
            draft.judged_at = by_position(draft.judged_at, (1,) * iteration.judged)
            draft.accepted_at = by_position(draft.accepted_at, (1,) * iteration.accepted)
            now = self.clock.now()
            self._window.append(_Moment(now, iteration.committed, seconds, fallback))
            self._forget_before(now - WINDOW_SECONDS)

    def count_result(self, result: GenerationResult) -> None:
        """Count how a generation ended."""
        with self._lock:
            if result.finish_reason is FinishReason.CANCELLED:
                self._totals.cancelled += 1
            elif result.finish_reason is FinishReason.ABORTED:
                self._totals.aborted += 1
            else:
                self._totals.succeeded += 1
            if result.stats.generated_tokens:
                self._totals.first_token = result.stats.time_to_first_token_seconds

    def acceptance(self, draft: str) -> float:
        """Return accepted over proposed tokens of a draft."""
        with self._lock:
            counts = self._drafts.get(draft, _Draft())
            return counts.accepted / counts.proposed if counts.proposed else 0.0

    def acceptance_by_position(self, draft: str) -> tuple[float, ...]:
        """Return how often the first, second, ... proposal of a draft was right once judged."""
        with self._lock:
            counts = self._drafts.get(draft, _Draft())
            accepted_at = by_position(counts.accepted_at, (0,) * len(counts.judged_at))
            return tuple(map(_ratio, accepted_at, counts.judged_at))

    def uses(self, draft: str) -> int:
        """Return how many iterations a draft ran."""
        with self._lock:
            return self._drafts.get(draft, _Draft()).iterations

    def snapshot(self) -> GenerationCounters:
        """Return all counts and ratios as of now."""
        with self._lock:
            now, totals = self.clock.now(), self._totals
            self._forget_before(now - WINDOW_SECONDS)
            recent = [moment for moment in self._window if moment.at > now - _NOW_SECONDS]
            decoding = totals.desired + totals.fallback + totals.load_wait + totals.prediction
            return GenerationCounters(
                accepted=totals.accepted,
                succeeded=totals.succeeded,
                cancelled=totals.cancelled,
                aborted=totals.aborted,
                rejected=totals.rejected,
                tokens_per_second_now=_ratio(
                    sum(moment.tokens for moment in recent),
                    sum(moment.seconds for moment in recent),
                ),
                tokens_per_second_mean=_ratio(totals.tokens, decoding),
                time_to_first_token_seconds=totals.first_token,
                mean_accepted=_ratio(totals.accepted_tokens, totals.iterations),
                fallback_seconds=totals.fallback,
                fallback_ratio_window=_ratio(
                    sum(moment.fallback for moment in self._window),
                    sum(moment.seconds for moment in self._window),
                ),
                fallback_ratio=_ratio(totals.fallback, decoding),
                desired_ratio=_ratio(totals.desired, decoding),
                predictor_ratio=_ratio(totals.prediction, decoding),
            )

    def _forget_before(self, moment: float) -> None:
        while self._window and self._window[0].at < moment:
            self._window.popleft()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
