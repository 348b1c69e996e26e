"""The parameters that suit a trace and a machine, chosen on some prompts and judged on others.

Every combination of K, N, gamma and, where the trace has the target's states, T is simulated on
one half of the prompts of each domain. The fastest wins; of those that are surely as good, the one
that keeps the fewest drafts in memory and ranks most seldom. Then drafts are left out one by one,
as long as the rest is surely as good as all. What was chosen is compared with the parameters as
they were on the other half, so that having chosen among many does not flatter it; where it is
surely slower there, it is not to be used.

Surely as good: with all of the 95 % interval of the ratio of speeds above 1 - `AS_GOOD`. So few
prompts leave things as they are.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from memspec_core.errors import TraceError
from memspec_core.evaluation.comparison import BASELINE, StrategyRun
from memspec_core.evaluation.comparison_report import figures_of, speed_over
from memspec_core.evaluation.simulator import SimulationPlan, simulate
from memspec_core.measurement.trace import Trace
from memspec_core.request import LOOKUP
from memspec_core.strategies import USUAL_LENGTH

AS_GOOD = 0.01
"""A speed that is lower by no more than this counts as equal: memory is worth as much."""

Progress = Callable[[str, int, int], None]

Parameters = Mapping[str, Any]


@dataclass(frozen=True)
class Space:
    """What is tried; empty: gamma from 1 to what was traced, and T up to what the head reads."""

    capacities: tuple[int, ...] = (1, 2, 3, 4)
    intervals: tuple[int, ...] = (2, 4, 8, 16)
    lengths: tuple[int, ...] = ()
    recents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tuning:
    """What to tune: a strategy on a trace and a machine.

    `plan`: profile, predictor, budget, the drafts to choose from, and the parameters as they are
    now. A draft_length of 0 there, which cannot be simulated, counts as 3.
    """

    trace: Trace
    plan: SimulationPlan
    strategy: str
    space: Space = field(default_factory=Space)
    jobs: int = 1
    seed: int = 0
    progress: Progress = lambda *_: None


@dataclass(frozen=True)
class Worth:
    """What a draft adds: speed with it over speed without, in the tuned form, with its interval."""

    draft: str
    kept: bool
    gain: tuple[float, float, float]


@dataclass(frozen=True)
class Tuned:
    """What came out, on prompts that nothing was chosen on.

    `parameters`: those that were chosen, by the node's names, `drafts.names` among them. Ratios
    of speeds with the ends of their 95 % intervals over prompts: `over_before` over the strategy
    with the parameters as they were, `over_general_static` over the general draft alone with these.
    `considered`: each combination with its tokens a second on the prompts it was chosen by.
    """

    parameters: Parameters
    before: Parameters
    over_before: tuple[float, float, float]
    over_general_static: tuple[float, float, float]
    tokens_per_second: float
    fallback: float
    worth: tuple[Worth, ...]
    considered: tuple[tuple[Parameters, float], ...]
    prompts: int

    @property
    def is_slower(self) -> bool:
        """Whether what was chosen is surely slower than the parameters as they were."""
        return self.over_before[2] < 1.0


def tune(tuning: Tuning) -> Tuned:
    """Choose parameters and drafts; raises what `simulate` does, and `TraceError`."""
    choosing, judging = _halves(tuning.trace, tuning.seed)
    search = _Search(tuning, choosing)
    considered = search.combinations()
    best = _preferred(considered)
    drafts = search.worthwhile(best)
    best = {**best, "resident_capacity": min(best["resident_capacity"], len(drafts))}
    judge = _Search(tuning, judging)
    before = _before(tuning)
    runs = judge.runs(best, drafts)
    base = judge.all_runs(before, search.drafts)
    of_strategy = [run for run in base if run.strategy == tuning.strategy]
    of_general = [run for run in base if run.strategy == BASELINE]
    figures = figures_of(runs)
    return Tuned(
        parameters={**best, "drafts.names": list(drafts)},
        before=before,
        over_before=_ratio(runs, of_strategy),
        over_general_static=_ratio(runs, of_general),
        tokens_per_second=figures["tokens_per_second"],
        fallback=figures["fallback"],
        worth=tuple(judge.worth(draft, best, drafts) for draft in search.drafts),
        considered=tuple((point, _speed(runs)) for point, runs in considered),
        prompts=len(judging.prompts),
    )


class _Search:
    """Simulates one strategy with various parameters and drafts on some prompts."""

    def __init__(self, tuning: Tuning, trace: Trace) -> None:
        self._tuning = tuning
        self._trace = trace
        self.drafts = tuning.plan.drafts or tuple(n for n in trace.drafts if n != LOOKUP)

    def combinations(self) -> list[tuple[Parameters, list[StrategyRun]]]:
        """Return the strategy's runs with each combination."""
        points = list(_points(self._tuning, self.drafts))
        found: list[tuple[Parameters, list[StrategyRun]]] = []
        for number, point in enumerate(points):
            found.append((point, self.runs(point, self.drafts)))
            self._tuning.progress("trying parameters", number + 1, len(points))
        return found

    def worthwhile(self, point: Parameters) -> tuple[str, ...]:
        """Return the drafts that are left once those that add nothing are left out, one by one."""
        kept = self.drafts
        of_all = self.runs(point, kept)
        total = len(kept) - 1
        while len(kept) > 1:
            fewer = [tuple(d for d in kept if d != left_out) for left_out in kept]
            tried = [(some, self.runs(point, some)) for some in fewer]
            self._tuning.progress("leaving drafts out", len(self.drafts) - len(kept) + 1, total)
            rest, runs = max(tried, key=lambda one: _speed(one[1]))
            if not _as_good(runs, of_all):
                break
            kept = rest
        self._tuning.progress("leaving drafts out", total, total)
        return kept

    def worth(self, draft: str, point: Parameters, kept: Sequence[str]) -> Worth:
        """Return what a draft adds to the others that are kept."""
        without = tuple(name for name in kept if name != draft)
        if not without:
            return Worth(draft, draft in kept, (float("nan"),) * 3)
        beside = tuple(name for name in self.drafts if name in kept or name == draft)
        gain = _ratio(self.runs(point, beside), self.runs(point, without))
        return Worth(draft, draft in kept, gain)

    def runs(self, point: Parameters, drafts: Sequence[str]) -> list[StrategyRun]:
        """Return the strategy's runs."""
        strategy = self._tuning.strategy
        return [run for run in self.all_runs(point, drafts) if run.strategy == strategy]

    def all_runs(self, point: Parameters, drafts: Sequence[str]) -> list[StrategyRun]:
        """Return the strategy's runs and those of the baseline."""
        plan = replace(
            self._tuning.plan,
            strategies=(self._tuning.strategy,),
            parameters={**self._tuning.plan.parameters, **point},
            drafts=tuple(drafts),
        )
        return simulate(self._trace, plan, jobs=self._tuning.jobs)


def _points(tuning: Tuning, drafts: Sequence[str]) -> list[Parameters]:
    """Return the combinations to try; K no larger than there are drafts, or than fit."""
    plan, space = tuning.plan, tuning.space
    most = len(drafts)
    if plan.budget_bytes:
        smallest = min(plan.profile.of(draft).draft_bytes for draft in drafts)
        most = max(1, min(most, int(plan.budget_bytes // smallest)))
    known = min(tuning.trace.header.length, len(plan.profile.verify_seconds) - 1)
    lists: dict[str, Sequence[int]] = {
        "resident_capacity": sorted({min(k, most) for k in space.capacities}),
        "scheduling_interval": space.intervals,
        "draft_length": space.lengths or range(1, known + 1),
    }
    if plan.head is not None and tuning.trace.header.states:
        positions = plan.head.plan.positions
        lists["recent_tokens"] = space.recents or sorted({max(1, positions // 2), positions})
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def _preferred(considered: Sequence[tuple[Parameters, list[StrategyRun]]]) -> Parameters:
    """Return what is surely as good as the best, with the fewest drafts and rankings."""
    _, best = max(considered, key=lambda one: _speed(one[1]))
    good = [(point, runs) for point, runs in considered if _as_good(runs, best)]
    point, _ = min(
        good,
        key=lambda one: (
            one[0]["resident_capacity"],
            -one[0]["scheduling_interval"],
            -_speed(one[1]),
        ),
    )
    return point


def _before(tuning: Tuning) -> Parameters:
    """Return the parameters as they were, the draft length as one that can be simulated."""
    traced = tuple(name for name in tuning.trace.drafts if name != LOOKUP)
    length = tuning.plan.parameters.get("draft_length", 0) or min(
        USUAL_LENGTH, tuning.trace.header.length
    )
    plan = replace(tuning.plan, parameters={**tuning.plan.parameters, "draft_length": length})
    settings = plan.settings(traced)
    return {
        "resident_capacity": settings.resident_capacity,
        "scheduling_interval": settings.scheduling_interval,
        "draft_length": settings.draft_length,
        "recent_tokens": settings.recent_tokens,
    }


def _halves(trace: Trace, seed: int) -> tuple[Trace, Trace]:
    """Split the prompts of each domain at random; raises `TraceError` for too few."""
    halves: tuple[list[Any], list[Any]] = ([], [])
    order = list(trace.prompts)
    random.Random(seed).shuffle(order)
    for domain in trace.domains:
        for number, prompt in enumerate(p for p in order if p.domain == domain):
            halves[number % 2].append(prompt)
    if not halves[1]:
        raise TraceError(
            "The trace has one prompt a domain; choosing and judging need two at the least."
        )
    return Trace(trace.header, halves[0]), Trace(trace.header, halves[1])


def _speed(runs: Sequence[StrategyRun]) -> float:
    speed: float = figures_of(runs)["tokens_per_second"]
    return speed


def _as_good(runs: Sequence[StrategyRun], best: Sequence[StrategyRun]) -> bool:
    _, low, _ = speed_over(runs, best)
    return low >= 1.0 - AS_GOOD


def _ratio(runs: Sequence[StrategyRun], base: Sequence[StrategyRun]) -> tuple[float, float, float]:
    mean, low, high = speed_over(runs, base)
    return mean, low, high
