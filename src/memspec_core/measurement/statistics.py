"""The statistics of one generation, read from its iterations."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from memspec_core.iteration import Iteration
from memspec_core.request import DraftUsage, GenerationStats


class GenerationRecorder:
    """Adds up the iterations of one generation.

    Every moment of decoding is desired, fallback, load wait or prediction (the paper's
    execution breakdown); prompt processing is apart.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self._totals = GenerationStats(prompt_tokens=prompt_tokens)
        self._usage: dict[str, DraftUsage] = {}
        self._last_draft: str | None = None

    def add(self, iteration: Iteration) -> None:
        """Count one iteration; a closing event that ran nothing adds its times only."""
        seconds, totals = iteration.seconds, self._totals
        desired = 0.0 if iteration.fallback else seconds.decode
        drafted = iteration.ran and not iteration.plain
        switched = drafted and self._last_draft not in (None, iteration.draft)
        if drafted:
            self._last_draft = iteration.draft
        self._totals = replace(
            totals,
            generated_tokens=iteration.generated_tokens,
            iterations=totals.iterations + iteration.ran,
            drafted_tokens=totals.drafted_tokens + iteration.proposed,
            accepted_tokens=totals.accepted_tokens + iteration.accepted,
            desired_seconds=totals.desired_seconds + desired,
            fallback_seconds=totals.fallback_seconds + seconds.decode - desired,
            load_wait_seconds=totals.load_wait_seconds + seconds.load_wait,
            prediction_seconds=totals.prediction_seconds + seconds.prediction,
            prompt_seconds=totals.prompt_seconds + seconds.prompt,
            draft_switches=totals.draft_switches + switched,
        )
        if iteration.ran:
            self._count_usage(iteration)

    def stats(self, time_to_first_token_seconds: float) -> GenerationStats:
        """Return the statistics so far."""
        totals = self._totals
        decoding = decoding_seconds(totals)
        return replace(
            totals,
            mean_accepted=totals.accepted_tokens / totals.iterations if totals.iterations else 0.0,
            tokens_per_second=totals.generated_tokens / decoding if decoding > 0.0 else 0.0,
            time_to_first_token_seconds=time_to_first_token_seconds,
            drafts=tuple(self._usage.values()),
        )

    def _count_usage(self, iteration: Iteration) -> None:
        usage = self._usage.get(iteration.draft, DraftUsage(iteration.draft))
        self._usage[iteration.draft] = replace(
            usage,
            iterations=usage.iterations + 1,
            drafted_tokens=usage.drafted_tokens + iteration.proposed,
            accepted_tokens=usage.accepted_tokens + iteration.accepted,
            generated_tokens=usage.generated_tokens + iteration.committed,
            seconds=usage.seconds + iteration.seconds.decode,
            judged_at=by_position(usage.judged_at, (1,) * iteration.judged),
            accepted_at=by_position(usage.accepted_at, (1,) * iteration.accepted),
        )


def decoding_seconds(stats: GenerationStats) -> float:
    """Return the time of decoding: all four kinds, prompt processing left out."""
    kinds = (stats.desired_seconds, stats.fallback_seconds, stats.load_wait_seconds)
    return sum(kinds) + stats.prediction_seconds


def summed_usage(all_stats: Iterable[GenerationStats]) -> dict[str, DraftUsage]:
    """Add up what each draft did over several generations."""
    total: dict[str, DraftUsage] = {}
    for usage in (usage for stats in all_stats for usage in stats.drafts):
        sofar = total.get(usage.draft, DraftUsage(usage.draft))
        total[usage.draft] = DraftUsage(
            usage.draft,
            sofar.iterations + usage.iterations,
            sofar.drafted_tokens + usage.drafted_tokens,
            sofar.accepted_tokens + usage.accepted_tokens,
            sofar.generated_tokens + usage.generated_tokens,
            sofar.seconds + usage.seconds,
            by_position(sofar.judged_at, usage.judged_at),
            by_position(sofar.accepted_at, usage.accepted_at),
        )
    return total


def by_position(*counts: Sequence[int]) -> tuple[int, ...]:
    """Add up counts position by position; where one has no more positions it counts as 0."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))
