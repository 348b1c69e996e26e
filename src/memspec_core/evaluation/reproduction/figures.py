"""Every figure of the paper, computed from what a setting measured."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memspec_core.evaluation.comparison import BASELINE
from memspec_core.evaluation.ranking import CHANCE
from memspec_core.evaluation.reproduction import claims
from memspec_core.evaluation.reproduction.claims import Claim
from memspec_core.evaluation.reproduction.estimates import (
    Answers,
    Estimate,
    Measure,
    acceptance_over,
    arithmetic,
    at_point,
    geometric,
    latency_part_over,
    load_in_iterations,
    share,
    side_by_side,
    throughput_over,
    time_part_over,
    tokens_an_iteration,
)
from memspec_core.evaluation.reproduction.measured import DYNAMIC, STATIC, Measured, Point

MEMSPEC, PREDICTION_ONLY = "memspec", "prediction_only"
MAB_ASYNC, MAB_SYNC = "mab_async", "mab_sync"

MEAN = "mean"
"""The group of the mean over domains."""

OWN_TIME = "share of its time"
"""The group of what parts of a strategy's time are of all of it."""

BARS, STACKS, LINES = "bars", "stacks", "lines"
TIMES, SHARE = "×", "%"

TIME_PARTS = ("desired", "fallback", "load_wait", "prediction")
LATENCY_PARTS = ("prompt_seconds", "first_wait", "decoding")

ITERATION = "iteration"
RESIDENT = "switch, resident"
LOAD = "switch, with a load"

TOP_ONE, TOP_TWO = "best first", "best among two"
UNTIED = ", where one alone is best"


@dataclass(frozen=True)
class Value:
    """One number of a figure: a strategy's (or another series') in a group along the axis.

    `unit`: times, or a share. `part`: of a stacked bar, else empty. `control`: the null control of
    an oracle, or chance. `tabled`: whether the report's table has it too.
    """

    series: str
    group: str
    estimate: Estimate
    claim: Claim | None = None
    unit: str = TIMES
    part: str = ""
    control: Estimate | None = None
    tabled: bool = True


@dataclass(frozen=True)
class Panel:
    """A figure in one setting: `drawn` values, and further `told` ones that only tables have."""

    setting: str
    drawn: tuple[Value, ...]
    told: tuple[Value, ...] = ()

    @property
    def values(self) -> tuple[Value, ...]:
        """All values."""
        return (*self.drawn, *self.told)

    def find(self, series: str, group: str = MEAN, part: str = "") -> Value | None:
        """Return a value, None where it is missing."""
        wanted = (series, group, part)
        return next((v for v in self.values if (v.series, v.group, v.part) == wanted), None)

    def mean(self, series: str, group: str = MEAN, part: str = "") -> float:
        """Return the mean of a value that is there."""
        found = self.find(series, group, part)
        if found is None:
            raise KeyError((series, group, part))
        return found.estimate.mean


@dataclass(frozen=True)
class Form:
    """How a figure is made and drawn.

    `needs`: strategies without which there is no such figure. `compute` returns None where a
    setting lacks something else. `x_name`: how tables name a place on the axis.
    """

    key: str
    name: str
    about: str
    kind: str
    y_label: str
    x_label: str
    needs: tuple[str, ...]
    compute: Callable[[Measured], Panel | None]
    x_name: str = "{}"

    def build(self, measured: Measured) -> Panel | None:
        """Return the figure in a setting, None where this lacks what it takes."""
        if not set(self.needs) <= set(measured.answers.sums):
            return None
        return self.compute(measured)


def ratio(one: str, base: str) -> str:
    """Name the ratio of two strategies."""
    return f"{one} / {base}"


def acceptance_by_draft_choice(measured: Measured) -> Panel | None:
    """Figure 1: tokens an iteration with the oracles' drafts, all of them resident."""
    answers, control = measured.reach, measured.reach_control
    if answers is None or control is None:
        return None
    claimed = {
        STATIC: claims.STATIC_ACCEPTANCE,
        DYNAMIC: claims.DYNAMIC_ACCEPTANCE,
    }
    series = (BASELINE, STATIC, DYNAMIC)
    drawn = _over_baseline(answers, control, series, acceptance_over, claimed, by_domain=True)
    step = _between(
        answers, control, acceptance_over, DYNAMIC, STATIC, claims.DYNAMIC_OVER_STATIC_ACCEPTANCE
    )
    return Panel(measured.name, drawn, (step,))


def cost_of_switching(measured: Measured) -> Panel:
    """Figure 2: what a switch takes, in times of an iteration.

    Measured where one draft ran and nothing else was loaded; in simulations it is what was set. A
    resident draft reads what it has missed, here the tokens of one interval.
    """
    answers, profile = measured.answers, measured.profile
    rows = {ITERATION: Estimate(1.0, 1.0, 1.0)}
    if profile is None:
        one = STATIC if STATIC in answers.sums else BASELINE
        rows[LOAD] = arithmetic(answers, load_in_iterations(one))
    else:
        iteration = profile.iteration_seconds(measured.length)
        tokens = arithmetic(answers, tokens_an_iteration(BASELINE)).mean * measured.base.interval
        rows[RESIDENT] = _known(profile.catch_up_seconds * tokens / iteration)
        rows[LOAD] = _known(profile.load_seconds / iteration)
    drawn = (
        Value(name, MEAN, found, claims.LOAD_IN_ITERATIONS if name == LOAD else None)
        for name, found in rows.items()
    )
    return Panel(measured.name, tuple(drawn))


def acceptance_of_bandits(measured: Measured) -> Panel:
    """Figure 3: tokens an iteration of the strategies that explore."""
    claimed = {STATIC: claims.STATIC_ACCEPTANCE, MAB_SYNC: claims.MAB_SYNC_ACCEPTANCE}
    series = (BASELINE, STATIC, MAB_SYNC, MAB_ASYNC)
    return Panel(
        measured.name,
        _over_baseline(measured.answers, measured.control, series, acceptance_over, claimed),
    )


def time_of_bandits(measured: Measured) -> Panel:
    """Figure 4: where the time of the strategies that explore goes."""
    claimed = {(MAB_ASYNC, "fallback"): claims.MAB_ASYNC_FALLBACK_FIGURE_4}
    return _breakdown(measured, (BASELINE, STATIC, MAB_SYNC, MAB_ASYNC), BASELINE, claimed)


def throughput(measured: Measured) -> Panel:
    """Figure 6: tokens a second of decoding."""
    answers, control = measured.answers, measured.control
    claimed = {
        STATIC: claims.STATIC_THROUGHPUT,
        MAB_ASYNC: claims.MAB_ASYNC_THROUGHPUT,
        DYNAMIC: claims.DYNAMIC_THROUGHPUT,
        MEMSPEC: claims.MEMSPEC_THROUGHPUT,
    }
    series = (BASELINE, STATIC, MAB_ASYNC, DYNAMIC, MEMSPEC)
    pairs = (
        (MEMSPEC, MAB_ASYNC, claims.MEMSPEC_OVER_MAB_ASYNC),
        (DYNAMIC, STATIC, claims.DYNAMIC_OVER_STATIC_THROUGHPUT),
        (MEMSPEC, DYNAMIC, claims.MEMSPEC_OVER_ORACLE_DYNAMIC),
    )
    return Panel(
        measured.name,
        _over_baseline(answers, control, series, throughput_over, claimed, by_domain=True),
        tuple(
            _between(answers, control, throughput_over, one, base, claim)
            for one, base, claim in pairs
            if {one, base} <= set(answers.sums)
        ),
    )


def time_of_memspec(measured: Measured) -> Panel:
    """Figure 7: where the time of MAB-Async and of MemSpec goes."""
    claimed = {
        (MAB_ASYNC, "fallback"): claims.MAB_ASYNC_FALLBACK,
        (MEMSPEC, "fallback"): claims.MEMSPEC_FALLBACK,
        (MEMSPEC, "prediction"): claims.PREDICTION,
    }
    return _breakdown(measured, (MAB_ASYNC, MEMSPEC), MAB_ASYNC, claimed)


def throughput_of_components(measured: Measured) -> Panel:
    """Figure 8: tokens a second without prediction, without preparation, and with both."""
    answers = measured.answers
    claimed = {
        PREDICTION_ONLY: claims.PREDICTION_ONLY_THROUGHPUT,
        MEMSPEC: claims.MEMSPEC_THROUGHPUT,
    }
    series = (BASELINE, PREDICTION_ONLY, MEMSPEC)
    claim = claims.MEMSPEC_OVER_PREDICTION_ONLY
    told = _between(answers, None, throughput_over, MEMSPEC, PREDICTION_ONLY, claim)
    drawn = _over_baseline(answers, None, series, throughput_over, claimed)
    return Panel(measured.name, drawn, (told,))


def time_of_components(measured: Measured) -> Panel:
    """Figure 9: where their time goes."""
    claimed = {
        (PREDICTION_ONLY, "fallback"): claims.PREDICTION_ONLY_FALLBACK,
        (MEMSPEC, "fallback"): claims.MEMSPEC_FALLBACK_FIGURE_9,
    }
    return _breakdown(measured, (BASELINE, PREDICTION_ONLY, MEMSPEC), BASELINE, claimed)


def by_interval(measured: Measured) -> Panel | None:
    """Figure 10: tokens a second over the scheduling interval N."""
    points = _sweep(measured, "interval", (MEMSPEC,))
    return _curves(measured.name, points, (MEMSPEC, PREDICTION_ONLY, MAB_ASYNC), (MEMSPEC,))


def by_length(measured: Measured) -> Panel | None:
    """Figure 11: tokens a second over the output's length, on the prompts that reach the longest.

    So the same answers are cut at several lengths.
    """
    points = _sweep(measured, "tokens", (MEMSPEC,))
    if not points:
        return None
    tokens = points[max(points, key=int)].tokens(BASELINE)
    most = max(tokens.values())
    kept = {
        group: answers.where(lambda key: tokens.get(key) == most)
        for group, answers in points.items()
    }
    return _curves(measured.name, kept, (MEMSPEC, PREDICTION_ONLY, MAB_ASYNC), (MEMSPEC,))


def by_capacity(measured: Measured) -> Panel | None:
    """Figure 12: tokens a second over the number K of drafts that memory holds."""
    series = (MEMSPEC, MAB_ASYNC)
    points = _sweep(measured, "capacity", series)
    return _curves(measured.name, points, series, series, claims.CAPACITIES)


def step_name(before: str, after: str) -> str:
    """Name the group of a curve's change from one point to another."""
    return f"{before} → {after}"


def predictor_recall(measured: Measured) -> Panel | None:
    """Table 2: how often the best draft of the coming interval is ranked first, or among two."""
    rows = measured.recalls or {}
    chance = rows.get(CHANCE)
    drawn: list[Value] = []
    told: list[Value] = []
    for name, row in rows.items():
        if chance is None or name == CHANCE:
            continue
        for place, (key, series) in enumerate((("first", TOP_ONE), ("among_two", TOP_TWO))):
            claimed = claims.RECALL.get(name)
            for suffix, ending, into in (("", "", drawn), ("_untied", UNTIED, told)):
                if key + suffix in row:
                    into.append(
                        Value(
                            series + ending,
                            name,
                            Estimate(*row[key + suffix]),
                            claimed[place] if claimed else None,
                            SHARE,
                            control=Estimate(*chance[key + suffix]),
                        )
                    )
    return Panel(measured.name, tuple(drawn), tuple(told)) if drawn else None


def latency(measured: Measured) -> Panel:
    """The latency of a whole answer: prompt, first load and decoding."""
    answers = measured.answers
    series = _there(answers, (BASELINE, MAB_ASYNC, MEMSPEC))
    drawn = [
        Value(one, MEAN, arithmetic(answers, latency_part_over(part, one, BASELINE)), part=part)
        for one in series
        for part in LATENCY_PARTS
    ]
    pairs = {
        BASELINE: claims.LATENCY_OVER_GENERAL_STATIC,
        MAB_ASYNC: claims.LATENCY_OVER_MAB_ASYNC,
    }
    told = [
        Value(
            ratio(MEMSPEC, base),
            MEAN,
            geometric(answers, latency_part_over("whole", MEMSPEC, base)),
            claim,
        )
        for base, claim in pairs.items()
        if {MEMSPEC, base} <= set(series)
    ]
    return Panel(measured.name, tuple(drawn), tuple(told))


FORMS = (
    Form(
        "figure_01",
        "Figure 1",
        "acceptance of static and dynamic draft choice",
        BARS,
        "tokens an iteration, over General-Static",
        "",
        (),
        acceptance_by_draft_choice,
    ),
    Form(
        "figure_02",
        "Figure 2",
        "what switching to another draft costs",
        BARS,
        "time, in iterations",
        "",
        (),
        cost_of_switching,
    ),
    Form(
        "figure_03",
        "Figure 3",
        "acceptance of strategies that explore",
        BARS,
        "tokens an iteration, over General-Static",
        "",
        (STATIC, MAB_SYNC),
        acceptance_of_bandits,
    ),
    Form(
        "figure_04",
        "Figure 4",
        "where the time of strategies that explore goes",
        STACKS,
        "decoding time, over General-Static",
        "",
        (MAB_SYNC, MAB_ASYNC),
        time_of_bandits,
    ),
    Form(
        "figure_06",
        "Figure 6",
        "throughput",
        BARS,
        "tokens/s, over General-Static",
        "",
        (MAB_ASYNC, MEMSPEC),
        throughput,
    ),
    Form(
        "figure_07",
        "Figure 7",
        "where the time of MAB-Async and MemSpec goes",
        STACKS,
        "decoding time, over MAB-Async",
        "",
        (MAB_ASYNC, MEMSPEC),
        time_of_memspec,
    ),
    Form(
        "figure_08",
        "Figure 8",
        "throughput of the components",
        BARS,
        "tokens/s, over General-Static",
        "",
        (PREDICTION_ONLY, MEMSPEC),
        throughput_of_components,
    ),
    Form(
        "figure_09",
        "Figure 9",
        "where the components' time goes",
        STACKS,
        "decoding time, over General-Static",
        "",
        (PREDICTION_ONLY, MEMSPEC),
        time_of_components,
    ),
    Form(
        "figure_10",
        "Figure 10",
        "throughput over the scheduling interval",
        LINES,
        "tokens/s, over General-Static",
        "N (iterations between scheduling points)",
        (MEMSPEC,),
        by_interval,
        "N = {}",
    ),
    Form(
        "figure_11",
        "Figure 11",
        "throughput over the output's length",
        LINES,
        "tokens/s, over General-Static",
        "tokens of the answer",
        (MEMSPEC,),
        by_length,
        "{} tokens",
    ),
    Form(
        "figure_12",
        "Figure 12",
        "throughput over the resident drafts",
        LINES,
        "tokens/s, over General-Static",
        "K (drafts in memory)",
        (MAB_ASYNC, MEMSPEC),
        by_capacity,
        "K = {}",
    ),
    Form(
        "table_2",
        "Table 2",
        "what the predictor gets right",
        BARS,
        "share of scheduling points",
        "",
        (),
        predictor_recall,
    ),
    Form(
        "latency",
        "End to end",
        "latency of a whole answer",
        STACKS,
        "latency, over General-Static",
        "",
        (MAB_ASYNC, MEMSPEC),
        latency,
    ),
)


def _known(value: float) -> Estimate:
    return Estimate(value, value, value)


def _there(answers: Answers, series: Iterable[str]) -> list[str]:
    return [name for name in series if name in answers.sums]


def _over_baseline(
    answers: Answers,
    control: Answers | None,
    series: Sequence[str],
    measure: Callable[[str, str], Measure],
    claimed: Mapping[str, Claim],
    *,
    by_domain: bool = False,
) -> tuple[Value, ...]:
    """Compare strategies with the baseline, in each domain if asked, and in the mean."""
    values = []
    for domain in (*(answers.domains if by_domain else ()), None):
        part = answers if domain is None else _only(answers, domain)
        null = control if control is None or domain is None else _only(control, domain)
        for one in _there(answers, series):
            known = null is not None and one in (STATIC, DYNAMIC)
            values.append(
                Value(
                    one,
                    domain or MEAN,
                    geometric(part, measure(one, BASELINE)),
                    claimed.get(one) if domain is None else None,
                    control=geometric(null, measure(one, BASELINE)) if null and known else None,
                    tabled=domain is None,
                )
            )
    return tuple(values)


def _only(answers: Answers, domain: str) -> Answers:
    return answers.where(lambda key: key[0] == domain)


def _between(
    answers: Answers,
    control: Answers | None,
    measure: Callable[[str, str], Measure],
    one: str,
    base: str,
    claim: Claim,
) -> Value:
    """Compare two strategies, and in the control where both are oracles."""
    measures = measure(one, base)
    known = control is not None and {one, base} <= set(control.sums)
    null = geometric(control, measures) if control is not None and known else None
    return Value(ratio(one, base), MEAN, geometric(answers, measures), claim, control=null)


def _breakdown(
    measured: Measured,
    series: Sequence[str],
    base: str,
    claimed: Mapping[tuple[str, str], Claim],
) -> Panel:
    """Draw the parts of strategies' time, and tell each part's share of a strategy's own time."""
    answers = measured.answers
    pairs = [(one, part) for one in _there(answers, series) for part in TIME_PARTS]
    return Panel(
        measured.name,
        tuple(
            Value(
                one,
                MEAN,
                arithmetic(answers, time_part_over(part, one, base)),
                part=part,
                tabled=False,
            )
            for one, part in pairs
        ),
        tuple(
            Value(
                one,
                OWN_TIME,
                arithmetic(answers, share(part, one)),
                claimed.get((one, part)),
                SHARE,
                part,
            )
            for one, part in pairs
            if part != "desired"
        ),
    )


def _sweep(measured: Measured, field: str, needs: Sequence[str]) -> dict[str, Answers]:
    """Return the answers at the points that differ from the base in one field only.

    Nothing where there are no others with the strategies that it takes.
    """

    def moved(point: Point) -> Point:
        return measured.base._replace(**{field: getattr(point, field)})

    found = {
        int(getattr(point, field)): answers
        for point, answers in measured.points.items()
        if point == moved(point) and set(needs) <= set(answers.sums)
    }
    return {str(x): found[x] for x in sorted(found)} if len(found) > 1 else {}


def _curves(
    name: str,
    points: Mapping[str, Answers],
    series: Sequence[str],
    followed: Sequence[str],
    claimed: Mapping[tuple[str, int], Claim] | None = None,
) -> Panel | None:
    """Draw strategies over some points, and tell the changes of those that are followed."""
    if not points:
        return None
    drawn = tuple(
        Value(
            one,
            group,
            geometric(answers, throughput_over(one, BASELINE)),
            (claimed or {}).get((one, int(group))),
            tabled=one in followed,
        )
        for one in series
        for group, answers in points.items()
        if one in answers.sums
    )
    return Panel(name, drawn, tuple(v for one in followed for v in _changes(points, one)))


def _changes(points: Mapping[str, Answers], series: str) -> Iterator[Value]:
    """Tell how many times a strategy's speed at a point is that at the one before.

    Over the baseline at each point, and on the prompts that all points have; at last from the
    first point to the last one.
    """
    groups = list(points)
    together = side_by_side(points, (BASELINE, series))

    def change(before: str, after: str) -> Measure:
        later, earlier = (
            throughput_over(at_point(series, group), at_point(BASELINE, group))
            for group in (after, before)
        )
        return lambda totals: later(totals) / earlier(totals)

    for before, after in dict.fromkeys((*pairwise(groups), (groups[0], groups[-1]))):
        found = geometric(together, change(before, after))
        yield Value(series, step_name(before, after), found)
