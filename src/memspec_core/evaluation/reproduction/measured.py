"""What each setting's figures are computed from, measured or simulated part by part."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from memspec_core.evaluation.acceptance import (
    Walk,
    dynamic_walk,
    gains,
    permuted,
    static_oracle,
    walk,
)
from memspec_core.evaluation.comparison import BASELINE, ORACLES, PAPER_FORM, StrategyRun
from memspec_core.evaluation.profiles import Profile
from memspec_core.evaluation.ranking import CHANCE, PredictorRanker
from memspec_core.evaluation.ranking import figures as ranking_figures
from memspec_core.evaluation.reproduction.estimates import Answers, answers_of, answers_of_walks
from memspec_core.evaluation.reproduction.folder import Output
from memspec_core.evaluation.scheduling import RankerFor, Schedule
from memspec_core.evaluation.sensitivity import Curve
from memspec_core.evaluation.simulator import SIMULATED_STRATEGIES, SimulationPlan, simulate
from memspec_core.measurement.trace import Trace, TracedPrompt
from memspec_core.prediction.head import RankingHead
from memspec_core.prediction.predictor import Predictor
from memspec_core.training.contexts import StateEncoder, context_at

INTERVALS = (2, 4, 8, 16)
CAPACITIES = (2, 3, 4)
LENGTHS = (32, 64, 128, 256)
SWEPT = ("prediction_only", "mab_async", "memspec")
"""Strategies of the sweeps over N, K and the output's length, beside the baseline."""

STATIC, DYNAMIC = ORACLES

Progress = Callable[[str, int, int], None]

Recalls = Mapping[str, Mapping[str, Sequence[float]]]
"""By ranking: the figures of `ranking`, each as [value, lower, upper]."""


class Point(NamedTuple):
    """Where runs were made: N, K, and tokens of an answer at the most."""

    interval: int = 4
    capacity: int = 2
    tokens: int = 128

    @property
    def label(self) -> str:
        """A name for files."""
        return f"n{self.interval}_k{self.capacity}_t{self.tokens}"


@dataclass(frozen=True)
class Measured:
    """One setting.

    `points`: answers at each point, `base` being that of most figures. `control`: the oracles'
    null control at the base, of answers where the drafts' parts are exchanged at random at each
    place. `reach` and `reach_control`: General-Static and the oracles with all drafts resident,
    tokens and iterations only. `best_draft`: by domain, how many times the tokens an iteration
    of the general draft its best draft has. `recalls`: of rankings, as in Table 2.
    """

    name: str
    base: Point
    points: Mapping[Point, Answers]
    drafts: tuple[str, ...]
    length: int
    control: Answers | None = None
    reach: Answers | None = None
    reach_control: Answers | None = None
    best_draft: Mapping[str, float] | None = None
    recalls: Recalls | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict)
    profile: Profile | None = None
    machine: str = ""

    @property
    def answers(self) -> Answers:
        """The answers at the base."""
        return self.points[self.base]


@dataclass(frozen=True)
class Simulated:
    """A setting to simulate: prompts with drafts, the general one first, on a profile."""

    name: str
    trace: Trace
    profile: Profile
    length: int
    head: RankingHead
    jobs: int

    @property
    def base(self) -> Point:
        """Where most figures are made: the paper's parameters, as far as the answers reach."""
        return Point(tokens=min(Point().tokens, self.trace.header.max_new_tokens))

    @property
    def points(self) -> tuple[Point, ...]:
        """All points that are simulated, each once."""
        base = self.base
        return tuple(
            dict.fromkeys(
                (
                    base,
                    *(base._replace(interval=n) for n in INTERVALS),
                    *(base._replace(capacity=k) for k in CAPACITIES),
                    *(base._replace(tokens=t) for t in self.lengths),
                )
            )
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of answers that the trace tells of: three, the longest among them."""
        longest = self.trace.header.max_new_tokens
        return (*sorted({*(n for n in LENGTHS if n < longest), longest}),)[-3:]

    def plan(
        self, point: Point, strategies: Sequence[str], drafts: tuple[str, ...] = ()
    ) -> SimulationPlan:
        """Return the plan of a point, in the paper's form; with some drafts of a wider trace."""
        parameters = {
            **PAPER_FORM,
            "draft_length": self.length,
            "scheduling_interval": point.interval,
            "resident_capacity": point.capacity,
        }
        return SimulationPlan(
            profile=self.profile,
            strategies=tuple(strategies),
            parameters=parameters,
            head=self.head,
            max_new_tokens=point.tokens,
            drafts=drafts,
        )


def measure_simulated(setting: Simulated, output: Output, progress: Progress) -> Measured:
    """Simulate a setting at all its points, taking over what is done."""

    def simulated(label: str, trace: Trace, point: Point, strategies: Sequence[str]) -> Answers:
        plan = setting.plan(point, strategies)
        shown = named(progress, f"{setting.name} {label}")
        rows = output.part(
            f"{setting.name}_{label}",
            lambda: as_rows(simulate(trace, plan, shown, setting.jobs)),
        )
        return answers_of(of_rows(rows))

    def at(point: Point) -> Answers:
        strategies = SIMULATED_STRATEGIES if point == setting.base else SWEPT
        return simulated(point.label, setting.trace, point, strategies)

    measured = Measured(
        name=setting.name,
        base=setting.base,
        points={point: at(point) for point in setting.points},
        drafts=setting.trace.drafts,
        length=setting.length,
        control=simulated("control", exchanged(setting.trace), setting.base, ORACLES),
        profile=setting.profile,
    )
    return with_reach(measured, setting, output)


def with_reach(measured: Measured, setting: Simulated, output: Output) -> Measured:
    """Add what the trace tells of drafts where all are resident."""

    def walked(label: str, trace: Trace) -> Answers:
        return reach(setting, trace, f"{setting.name}_{label}", output)

    return replace(
        measured,
        reach=walked("reach", setting.trace),
        reach_control=walked("reach_control", exchanged(setting.trace)),
        best_draft=output.part(f"{setting.name}_drafts", lambda: best_draft(setting)),
    )


def exchanged(trace: Trace) -> Trace:
    """Return the null control: all drafts' parts exchanged at random at each place."""
    return permuted(trace, range(len(trace.drafts)))


def named(progress: Progress, name: str) -> Progress:
    """Return what shows a part under a name of its own."""
    return lambda _, done, total: progress(name, done, total)


def reach(setting: Simulated, trace: Trace, part: str, output: Output) -> Answers:
    """Return what the oracles gain where all drafts are resident, as walks over the places."""

    def walked() -> dict[str, list[list[int]]]:
        walks = _walks(setting, trace)
        return {n: [w.tokens.tolist(), w.iterations.tolist()] for n, w in walks.items()}

    found = output.part(part, walked)
    walks = {name: Walk(*map(np.array, numbers)) for name, numbers in found.items()}
    return answers_of_walks([prompt.domain for prompt in trace.prompts], walks)


def _walks(setting: Simulated, trace: Trace) -> dict[str, Walk]:
    prompts = [cut(prompt, setting.base.tokens) for prompt in trace.prompts]
    columns = range(len(trace.drafts))
    return {
        BASELINE: walk(prompts, lambda p: gains(p, 0, setting.length)),
        STATIC: walk(prompts, static_oracle(columns, setting.length)),
        DYNAMIC: dynamic_walk(prompts, columns, setting.length, setting.base.interval),
    }


def best_draft(setting: Simulated) -> dict[str, float]:
    """Return by domain how many times the general draft's tokens an iteration its best one has."""
    found = {}
    for domain in setting.trace.domains:
        prompts = [p for p in setting.trace.prompts if p.domain == domain]
        rates = [
            walk(prompts, lambda p, c=column: gains(p, c, setting.length)).tokens_an_iteration  # type: ignore[misc]
            for column in range(len(setting.trace.drafts))
        ]
        found[domain] = max(rates) / rates[0]
    return found


def recalls(setting: Simulated) -> dict[str, Any]:
    """Return how often the ranking that is simulated has the best draft first, or among two.

    Drafts must bear the names of domains.
    """
    drafts = setting.trace.drafts
    schedule = Schedule(drafts, tuple(range(len(drafts))), setting.length, setting.base.interval)
    plan = setting.head.plan
    name = plan.card.get("inputs", plan.inputs)
    rankers = {name: _ranker(setting, schedule)}
    rows = ranking_figures(setting.trace.prompts, schedule, rankers)["rows"]
    return {key: rows[key] for key in (name, CHANCE)}


def _ranker(setting: Simulated, schedule: Schedule) -> RankerFor:
    head = setting.head
    encoder = StateEncoder(setting.trace.prompts, head.plan.positions)
    return lambda prompt: PredictorRanker(
        Predictor(head, observation=False, length=setting.length),
        schedule.drafts,
        lambda place: context_at(encoder, prompt, place),
    )


def cut(prompt: TracedPrompt, tokens: int) -> TracedPrompt:
    """Return a prompt with the beginning of its answer only."""
    return replace(
        prompt,
        token_ids=prompt.token_ids[:tokens],
        accepted=prompt.accepted[:tokens],
        matched=prompt.matched[:tokens],
    )


def as_rows(runs: Iterable[StrategyRun]) -> list[dict[str, Any]]:
    """Return runs as JSON."""
    return [asdict(run) for run in runs]


def of_rows(rows: Iterable[Mapping[str, Any]]) -> list[StrategyRun]:
    """Return the runs that `as_rows`, or `memspec compare --json`, wrote."""
    return [StrategyRun(**{**row, "token_ids": ()}) for row in rows]
