"""From runs to figures: medians and quartiles for each configuration, by file and in all."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memspec_core.evaluation.bench import PLAIN_NAME, BenchPlan, Configuration, Run, Series
from memspec_core.evaluation.machine import describe_machine
from memspec_core.measurement.statistics import summed_usage
from memspec_core.request import DraftUsage

Figures = dict[str, Any]


def as_json(plan: BenchPlan, measured: Sequence[Series]) -> Figures:
    """Return all that was measured as the object that `--json` prints.

    Rates are tokens a second, times are seconds, sizes are bytes; quartiles are objects with
    `lower`, `median` and `upper`, or null where there is nothing to take them of.
    """
    bandwidth = statistics.median(b for series in measured for b in series.bandwidths)
    return {
        "machine": describe_machine(),
        "max_new_tokens": plan.max_new_tokens,
        "repeats": plan.repeats,
        "prompts": {s.name: len(s.texts) for s in plan.prompt_sets},
        "read_bandwidth": bandwidth,
        "series": [_series(series, bandwidth) for series in measured],
    }


def quartiles(values: Iterable[float]) -> dict[str, float] | None:
    """Return the quartiles of some values, None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    if len(ordered) == 1:
        ordered *= 2
    lower, median, upper = statistics.quantiles(ordered, n=4, method="inclusive")
    return {"lower": lower, "median": median, "upper": upper}


def _series(series: Series, bandwidth: float) -> Figures:
    return {
        "target": asdict(series.target),
        "read_bytes": asdict(series.read),
        "read_bandwidths": list(series.bandwidths),
        "prompts_left_out": series.left_out,
        "configurations": [_configuration(c, series, bandwidth) for c in series.configurations],
        "runs": [_run(run, series, bandwidth) for run in series.runs],
    }


def _configuration(configuration: Configuration, series: Series, bandwidth: float) -> Figures:
    runs = [run for run in series.runs if run.configuration == configuration.name]
    by_set: dict[str, list[Run]] = {}
    for run in runs:
        by_set.setdefault(run.prompt_set, []).append(run)
    return {
        **asdict(configuration),
        "all": _figures(runs, series, bandwidth),
        "prompt_sets": {name: _figures(part, series, bandwidth) for name, part in by_set.items()},
    }


def _figures(runs: Sequence[Run], series: Series, bandwidth: float) -> Figures:
    limits = [_limit(run, series, bandwidth) for run in runs]
    return {
        "runs": len(runs),
        "identical_runs": sum(run.identical for run in runs),
        "generated_tokens": sum(run.generated_tokens for run in runs),
        "tokens_per_second": quartiles(_speeds(runs)),
        "time_to_first_token_seconds": quartiles(r.time_to_first_token_seconds for r in runs),
        "speed_over": _speed_over(runs, series),
        "limit_tokens_per_second": quartiles(limit for limit in limits if limit),
        "eta": quartiles(
            run.tokens_per_second / limit for run, limit in zip(runs, limits, strict=True) if limit
        ),
        **_acceptance(runs),
    }


def _speeds(runs: Iterable[Run]) -> list[float]:
    """Return the speeds of runs that have one: an empty answer has none."""
    return [run.tokens_per_second for run in runs if run.tokens_per_second > 0.0]


def _speed_over(runs: Sequence[Run], series: Series) -> dict[str, dict[str, float] | None]:
    """Return the ratios of speeds within a round, over plain decoding and over each peer."""
    bases = [c.name for c in series.configurations if c.peer or c.name == PLAIN_NAME]
    over: dict[str, dict[str, float] | None] = {}
    for base in bases:
        speeds = {
            run.round: run.tokens_per_second for run in series.runs if run.configuration == base
        }
        over[base] = quartiles(_ratios(runs, speeds))
    return over


def _ratios(runs: Sequence[Run], speeds: Mapping[int, float]) -> list[float]:
    return [
        run.tokens_per_second / speeds[run.round]
        for run in runs
        if run.tokens_per_second > 0.0 and speeds[run.round] > 0.0
    ]


def _limit(run: Run, series: Series, bandwidth: float) -> float | None:
    if run.stats is None or run.tokens_per_second <= 0.0:
        return None
    return series.read.limit(run.stats, bandwidth)


def _acceptance(runs: Sequence[Run]) -> Figures:
    """Return what the drafts did; nothing is known of a peer's."""
    all_stats = [run.stats for run in runs if run.stats is not None]
    if not all_stats:
        return {"tokens_an_iteration": None, "accepted_of_drafted": None, "drafts": {}}
    usage = summed_usage(all_stats)
    return {
        "tokens_an_iteration": _ratio(
            sum(stats.generated_tokens for stats in all_stats),
            sum(stats.iterations for stats in all_stats),
        ),
        "accepted_of_drafted": _ratio(
            sum(use.accepted_tokens for use in usage.values()),
            sum(use.drafted_tokens for use in usage.values()),
        ),
        "drafts": {name: _usage(use) for name, use in usage.items()},
    }


def _usage(usage: DraftUsage) -> Figures:
    return {
        **{name: value for name, value in asdict(usage).items() if name != "draft"},
        "accepted_of_drafted": _ratio(usage.accepted_tokens, usage.drafted_tokens),
        "tokens_an_iteration": _ratio(usage.generated_tokens, usage.iterations),
    }


def _run(run: Run, series: Series, bandwidth: float) -> Figures:
    fields = {name: value for name, value in vars(run).items() if name != "stats"}
    stats = None if run.stats is None else asdict(run.stats)
    return {**fields, "limit_tokens_per_second": _limit(run, series, bandwidth), "stats": stats}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
