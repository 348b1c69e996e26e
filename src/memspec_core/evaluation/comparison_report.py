"""The figures of a comparison of strategies, with intervals over prompts, and as a table."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from memspec_core.evaluation.comparison import BASELINE, ComparisonPlan, StrategyRun
from memspec_core.evaluation.installed import installed_models
from memspec_core.evaluation.machine import describe_machine
from memspec_core.evaluation.tables import aligned

_RESAMPLES = 2000
ALL = "all"

LEGEND = """\
tokens/s: decoding, without prompt processing and the first load. over: speed over general_static on
the same prompts, with the 95 % interval over prompts. Shares of decoding time: fallback (another
draft ran than the wanted one, which was not resident), load wait, prediction. sum: the four parts
over the time on the clock. same: answers with the tokens of general_static."""

Sums = npt.NDArray[np.float64]
"""[prompts, 2]: tokens, and seconds of decoding."""


def as_json(runs: Sequence[StrategyRun], seed: int = 0) -> dict[str, Any]:
    """Return figures by prompt set, and of all, for each strategy."""
    sets = dict.fromkeys(run.prompt_set for run in runs)
    parts = {name: [run for run in runs if run.prompt_set == name] for name in sets}
    if len(parts) > 1:
        parts[ALL] = list(runs)
    return {name: _part(found, seed) for name, found in parts.items()}


def full_report(plan: ComparisonPlan, runs: Sequence[StrategyRun]) -> dict[str, Any]:
    """Return the figures with all that they depend on, and every run without its tokens."""
    settings = plan.settings()
    return {
        "machine": describe_machine(),
        "models": installed_models(settings).to_json(),
        "settings": asdict(settings),
        "max_new_tokens": plan.max_new_tokens,
        "figures": as_json(runs),
        "runs": [asdict(replace(run, token_ids=())) for run in runs],
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures that `as_json` made as one table a prompt set."""
    lines = [line for name, part in figures.items() for line in (*_table(name, part), "")]
    return "\n".join([*lines, LEGEND])


def _part(runs: Sequence[StrategyRun], seed: int) -> dict[str, Any]:
    strategies = dict.fromkeys(run.strategy for run in runs)
    by_strategy = {name: [run for run in runs if run.strategy == name] for name in strategies}
    base = by_strategy[BASELINE]
    return {name: _figures(found, base, seed) for name, found in by_strategy.items()}


def _figures(runs: Sequence[StrategyRun], base: Sequence[StrategyRun], seed: int) -> dict[str, Any]:
    same = (run.token_ids == of_base.token_ids for run, of_base in zip(runs, base, strict=True))
    return {
        **figures_of(runs),
        "over_general_static": speed_over(runs, base, seed),
        "same_tokens": sum(same),
    }


def figures_of(runs: Sequence[StrategyRun]) -> dict[str, Any]:
    """Return what the runs of one strategy come to, without comparing them to others."""
    seconds = sum(run.seconds for run in runs)
    tokens = sum(run.tokens for run in runs)
    return {
        "answers": len(runs),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_an_iteration": tokens / sum(run.iterations for run in runs),
        "fallback": sum(run.fallback for run in runs) / seconds,
        "load_wait": sum(run.load_wait for run in runs) / seconds,
        "prediction": sum(run.prediction for run in runs) / seconds,
        "sum_over_elapsed": seconds / sum(run.elapsed for run in runs),
        "first_wait_seconds": float(np.median([run.first_wait for run in runs])),
        "switches": sum(run.switches for run in runs) / len(runs),
        "loads": sum(run.loads for run in runs) / len(runs),
    }


def _sums(runs: Sequence[StrategyRun]) -> Sums:
    """Add up what belongs to one prompt, so that intervals are over prompts."""
    sums: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        of_prompt = sums.setdefault((run.prompt_set, run.prompt), [0.0, 0.0])
        of_prompt[0] += run.tokens
        of_prompt[1] += run.seconds
    return np.array(list(sums.values()))


def speed_over(
    runs: Sequence[StrategyRun], base: Sequence[StrategyRun], seed: int = 0
) -> list[float]:
    """Return the speed of runs over that of others on the same prompts.

    With the ends of the 95 % interval over prompts (bootstrap).
    """
    one, other = _sums(runs), _sums(base)
    count = len(one)
    draws = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    places = np.concatenate((np.arange(count)[None], draws))
    ratios = _rate(one, places) / _rate(other, places)
    lower, upper = np.quantile(ratios[1:], (0.025, 0.975))
    return [float(ratios[0]), float(lower), float(upper)]


def _rate(sums: Sums, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    drawn = sums[places].sum(axis=1)
    rate: npt.NDArray[np.float64] = drawn[:, 0] / drawn[:, 1]
    return rate


def _table(name: str, part: dict[str, Any]) -> Iterator[str]:
    yield from aligned(
        [
            [
                *(name, "tokens/s", "over", "a/it", "fallback", "load wait", "prediction"),
                *("sum", "switches", "loads", "same"),
            ],
            *(_row(strategy, found) for strategy, found in part.items()),
        ]
    )


def _row(strategy: str, found: dict[str, Any]) -> list[str]:
    ratio, lower, upper = found["over_general_static"]
    shares = (f"{100 * found[kind]:.1f} %" for kind in ("fallback", "load_wait", "prediction"))
    return [
        strategy,
        f"{found['tokens_per_second']:.1f}",
        f"{ratio:.3f} ({lower:.3f} to {upper:.3f})",
        f"{found['tokens_an_iteration']:.2f}",
        *shares,
        f"{found['sum_over_elapsed']:.3f}",
        f"{found['switches']:.1f}",
        f"{found['loads']:.1f}",
        f"{found['same_tokens']}/{found['answers']}",
    ]
