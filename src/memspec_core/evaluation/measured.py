"""A hardware profile of the machine at hand, from what a comparison's runs saw.

| number | from |
|---|---|
| passes | calibration, corrected by the passes of the runs, as the planner has them |
| a draft's step | what iterations of its kind took where no draft was loaded, less the pass |
| catching up | what first iterations after a switch took beyond the usual, by unread token |
| a load | the mean of those that were waited for: MAB-Sync's, or else the first ones |
| a prediction | the mean of the predicting strategies' scheduling points |
| how loads vary | the mean background load of each answer, or else the first loads |
| loads' stretch | the mean load in the background, over that |
| slowdown by loads | what iterations took beyond their usual time, of that of loads beside them |

All but the passes and steps depend on the strategies that ran; what did not occur stays at what
calibration says, or at no cost.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from memspec_core.errors import SettingsError
from memspec_core.evaluation.comparison import Answered
from memspec_core.evaluation.machine import cpu_name
from memspec_core.evaluation.profiles import Profile
from memspec_core.iteration import Iteration
from memspec_core.request import LOOKUP, PLAIN
from memspec_core.runtime import Runtime
from memspec_core.settings import Settings
from memspec_core.snapshot import RuntimeSnapshot
from memspec_core.strategies import PREDICTING, MabSync
from memspec_core.strategies.utility import DraftCosts

LEAST_UNREAD = 1000
"""Tokens that say what reading them takes; with fewer it is what the planner assumes."""

LEAST_LOADS = 6
"""Loads that say how loads vary."""

MOST = 10.0
"""The slowdown and the stretch that a profile can have at the most."""

LEAST_BYTES_PER_SECOND = 1e8
"""Of the memory, for one that was not measured: the least that a profile can have."""


@dataclass
class MachineObserver:
    """Collects what answers took; those that count are taken.

    `settings`: those of the runs. Raises `SettingsError` if their draft length is not fixed.
    """

    settings: Settings
    counts: Callable[[Answered], bool] = lambda _: True
    _answers: list[Answered] = field(default_factory=list)
    _costs: DraftCosts | None = None
    _snapshot: RuntimeSnapshot | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        if not self.settings.draft_length:
            raise SettingsError(
                "draft_length is 0; a machine is measured with a fixed one (--form paper has 3)."
            )

    def answered(self, answer: Answered) -> None:
        """Keep an answer that counts."""
        if self.counts(answer):
            self._answers.append(answer)

    def ended(self, runtime: Runtime) -> None:
        """Keep what the runtime has measured."""
        self._costs, self._snapshot = runtime.draft_costs(), runtime.snapshot()

    def profile(self, name: str) -> Profile:
        """Return the profile under a name, once the comparison has ended."""
        assert self._costs is not None
        assert self._snapshot is not None
        target = self._snapshot.target
        sizes = {draft.name: float(draft.bytes) for draft in self._snapshot.drafts}
        length = self.settings.draft_length
        rows = range(max(len(target.pass_seconds), length + 1))
        passes = [self._costs.iteration_seconds(LOOKUP, row) for row in rows]
        passes = [max(passes[: row + 1]) for row in rows]
        kinds = {draft.name: draft.kind for draft in self._snapshot.drafts}
        iterations = {
            draft: self._iteration_seconds([d for d in kinds if kinds[d] == kind], length)
            for draft, kind in kinds.items()
        }
        # The planner's costs are of the last iterations; all of them may have been quicker.
        reckoned = statistics.fmean(self._costs.iteration_seconds(d, length) for d in sizes)
        scale = min(1.0, statistics.fmean(iterations.values()) / reckoned)
        passes = [seconds * scale for seconds in passes]
        steps = {
            draft: max(0.0, seconds - passes[length]) / length
            for draft, seconds in iterations.items()
        }
        catch_up = self._catch_up_seconds(iterations)
        size, load = statistics.median(sizes.values()), self._load_seconds()
        return Profile(
            name=name,
            description=f"measured on {cpu_name()}, {target.threads} threads, target in "
            f"{target.dtype}",
            memory_bytes_per_second=max(target.read_bytes_per_second, LEAST_BYTES_PER_SECOND),
            storage_bytes_per_second=size / load,
            draft_bytes=size,
            verify_seconds=tuple(passes),
            draft_step_seconds=statistics.median(steps.values()),
            catch_up_seconds=catch_up,
            prompt_seconds=self._prompt_seconds(),
            prediction_seconds=self._prediction_seconds(),
            load_slowdown=self._load_slowdown(iterations, catch_up),
            load_deviation=self._load_deviation(),
            load_stretch=min(max(1 / MOST, self._background_load_seconds(load) / load), MOST),
            drafts={
                draft: {
                    "draft_bytes": sizes[draft],
                    "draft_step_seconds": steps[draft],
                }
                for draft in sizes
            },
        )

    def sources(self) -> dict[str, str]:
        """Return where each number of the profile is from."""
        answers = f"{len(self._answers)} answers of memspec compare"
        return {
            "memory_bytes_per_second": "calibration: reading memory with all threads",
            "storage_bytes_per_second": f"draft_bytes over the mean wait for a load in {answers}",
            "draft_bytes": "the median draft, its KV cache included",
            "verify_seconds": f"calibration, corrected by the passes of {answers}",
            "draft_step_seconds": f"{answers}: iterations without loads, less their passes; median",
            "catch_up_seconds": f"{answers}: first iterations after a switch, by unread token; a "
            "draft that is waited for has read most of the context when it lands",
            "prompt_seconds": f"{answers}: reading the prompt, by token",
            "prediction_seconds": f"{answers}: mean scheduling point with a predictor",
            "load_slowdown": f"{answers}: what iterations took beyond that beside loads",
            "load_deviation": f"{answers}: the mean load of each in the background",
            "load_stretch": f"{answers}: the mean load in the background over the usual one",
            "drafts": f"as the usual numbers, from {answers}",
        }

    def _iteration_seconds(self, drafts: Sequence[str], length: int) -> float:
        """Return what an iteration took where one of some drafts ran on and nothing was loaded.

        Drafts of a kind are taken together: an oracle would choose those that seem quicker by
        chance.
        """
        assert self._costs is not None
        seconds = [
            iteration.seconds.decode
            for answer in self._answers
            if answer.run.loads <= 1
            for before, iteration in _successive(answer)
            if before == iteration.draft in drafts and iteration.proposed == length
        ]
        if not seconds:
            return statistics.fmean(self._costs.iteration_seconds(d, length) for d in drafts)
        return statistics.fmean(seconds)

    def _catch_up_seconds(self, iterations: Mapping[str, float]) -> float:
        """Return what a token takes that a draft has not read when it runs; of all drafts."""
        assert self._costs is not None
        usual = statistics.median(self._costs.catch_up_seconds(draft, 1) for draft in iterations)
        extra, unread = 0.0, 0
        for answer in self._answers:
            for draft, unseen, iteration in _with_unseen(answer):
                if unseen and draft in iterations:
                    extra += iteration.seconds.decode - iterations[draft]
                    unread += unseen
        return min(max(0.0, extra / unread), usual) if unread >= LEAST_UNREAD else usual

    def _first_waits(self) -> list[float]:
        """Return what first loads took while nothing else ran."""
        return [answer.run.first_wait for answer in self._answers if answer.run.first_wait > 0]

    def _load_seconds(self) -> float:
        """Return what a load takes that is waited for.

        A draft that MAB-Sync waits for reads the context meanwhile, which first ones cannot.
        """
        waiting = [a.run for a in self._answers if a.run.strategy == MabSync.name]
        loads = sum(run.loads - 1 for run in waiting)
        if loads > 0:
            return sum(run.load_wait for run in waiting) / loads
        waits = self._first_waits()
        return statistics.fmean(waits) if waits else 1e-3

    def _load_deviation(self) -> float:
        """Return how much loads vary: those in the background, or else the first ones.

        Of the latter the spread of the middle two thirds, which a few late ones leave as it is.
        """
        means = [
            ((answer.load_seconds - answer.run.first_wait) / (answer.run.loads - 1), answer.run)
            for answer in self._background()
        ]
        if len(means) >= LEAST_LOADS:
            loads = sum(run.loads - 1 for _, run in means)
            mean = sum(seconds * (run.loads - 1) for seconds, run in means) / loads
            # A mean of n loads varies less than a load, by the root of n.
            squares = sum((seconds - mean) ** 2 * (run.loads - 1) for seconds, run in means)
            return min(2.0, math.sqrt(squares / (len(means) - 1)) / mean) if mean > 0 else 0.0
        waits = self._first_waits()
        if len(waits) < LEAST_LOADS:
            return 0.0
        sixths = statistics.quantiles(map(math.log, waits), n=6, method="inclusive")
        return min(2.0, (sixths[-1] - sixths[0]) / 2)

    def _prompt_seconds(self) -> float:
        spent = sum(answer.iterations[0].seconds.prompt for answer in self._answers)
        return spent / max(1, sum(len(answer.prompt_ids) for answer in self._answers))

    def _prediction_seconds(self) -> float:
        points = [
            iteration.seconds.prediction
            for answer in self._answers
            if answer.run.strategy in PREDICTING
            for iteration in answer.iterations
            if iteration.seconds.prediction > 0
        ]
        return statistics.fmean(points) if points else 0.0

    def _background(self) -> Iterator[Answered]:
        """Yield the answers that loaded more than the first draft, and did not wait for it."""
        for answer in self._answers:
            if answer.run.loads > 1 and answer.run.strategy != MabSync.name:
                yield answer

    def _background_load_seconds(self, waited: float) -> float:
        answers = list(self._background())
        loads = sum(answer.run.loads - 1 for answer in answers)
        spent = sum(answer.load_seconds - answer.run.first_wait for answer in answers)
        return spent / loads if loads else waited

    def _load_slowdown(self, iterations: Mapping[str, float], catch_up: float) -> float:
        """Return how many times as long decoding takes beside a load."""
        extra = loading = 0.0
        for answer in self._background():
            loading += answer.load_seconds - answer.run.first_wait
            extra += sum(
                iteration.seconds.decode - iterations[draft] - unseen * catch_up
                for draft, unseen, iteration in _with_unseen(answer)
                if draft in iterations
            )
        lost = extra / loading if loading > 0 else 0.0
        return 1.0 / (1.0 - min(max(lost, 0.0), 1.0 - 1.0 / MOST))


def _successive(answer: Answered) -> Iterator[tuple[str, Iteration]]:
    """Yield each iteration with the draft that ran before it."""
    for before, iteration in pairwise(answer.iterations):
        yield before.draft, iteration


def _with_unseen(answer: Answered) -> Iterator[tuple[str, int, Iteration]]:
    """Yield each iteration of a draft with the tokens that it had to read first."""
    seen: dict[str, int] = {}
    place = 0
    for iteration in answer.iterations:
        draft = iteration.draft
        if draft not in (PLAIN, LOOKUP):
            # The first draft reads the prompt before the first iteration.
            start = 0 if not seen else -len(answer.prompt_ids)
            yield draft, place - seen.get(draft, start), iteration
            seen[draft] = iteration.generated_tokens
        place = iteration.generated_tokens
