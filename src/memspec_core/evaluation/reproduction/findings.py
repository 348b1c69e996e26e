"""What a figure shows and why it differs from the paper's, in words that the numbers choose."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from memspec_core.evaluation.comparison import BASELINE
from memspec_core.evaluation.reproduction import claims
from memspec_core.evaluation.reproduction.estimates import (
    Answers,
    Estimate,
    an_answer,
    arithmetic,
    geometric,
    iteration_over,
    proposals_over,
    share,
    tokens_an_iteration,
)
from memspec_core.evaluation.reproduction.figures import (
    LOAD,
    MAB_ASYNC,
    MAB_SYNC,
    MEMSPEC,
    OWN_TIME,
    PREDICTION_ONLY,
    TOP_ONE,
    TOP_TWO,
    UNTIED,
    Form,
    Panel,
    cost_of_switching,
    ratio,
    step_name,
)
from memspec_core.evaluation.reproduction.measured import DYNAMIC, STATIC, Measured
from memspec_core.evaluation.reproduction.shapes import (
    FLAT,
    INTERVAL_SHAPE,
    NEARLY_FLAT,
    RISES,
    grows,
    step,
    steps,
)
from memspec_core.evaluation.reproduction.wording import change, name, percent


@dataclass(frozen=True)
class Finding:
    """What a panel shows, in a few words, and a sentence or two that explain it."""

    title: str
    why: str


def find(form: Form, panel: Panel, measured: Measured) -> Finding:
    """Return what the panel of a figure shows."""
    if form.key in _FINDERS:
        return _FINDERS[form.key](panel, measured)
    return _range(form, panel)


def _acceptance(panel: Panel, measured: Measured) -> Finding:
    static, dynamic = panel.mean(STATIC), panel.mean(DYNAMIC)
    best = list((measured.best_draft or {}).values())
    mean = float(np.exp(np.mean(np.log(best))))
    assert measured.reach is not None
    proposals = (
        change(geometric(measured.reach, proposals_over(oracle, BASELINE)).mean)
        for oracle in (STATIC, DYNAMIC)
    )
    return Finding(
        f"Oracle-Static accepts {change(static)}, Oracle-Dynamic {change(dynamic)}",
        f"The best draft of a domain has {change(mean)} of the general draft's tokens an iteration "
        f"in the mean over domains ({change(min(best))} to {change(max(best))}). Choosing the "
        f"largest of several numbers would alone give {_by_chance(panel, STATIC)} of "
        f"Oracle-Static's gain and {_by_chance(panel, DYNAMIC)} of Oracle-Dynamic's. Without the "
        f"target's own token the gains are {' and '.join(proposals)}.",
    )


def _switching(panel: Panel, measured: Measured) -> Finding:
    load = panel.mean(LOAD)
    if measured.profile is not None:
        return Finding(
            f"a load takes {load:.1f} iterations, as set",
            f"This goes into the simulation, by the profile {measured.profile.name}.",
        )
    paper = claims.LOAD_IN_ITERATIONS.high
    beside = "more" if load > paper else "less"
    return Finding(
        f"a load takes {load:.1f} iterations",
        "The first loads of answers, from files that are not in the page cache, over iterations of "
        f"the same draft: {beside} than the paper's {paper}.",
    )


def _bandit_acceptance(panel: Panel, measured: Measured) -> Finding:
    static, bandit = panel.mean(STATIC), panel.mean(MAB_SYNC)
    points = _an_answer(measured, "iterations", MAB_SYNC) / measured.base.interval
    paper = (claims.MAB_SYNC_ACCEPTANCE.high - 1) / (claims.STATIC_ACCEPTANCE.high - 1)
    return Finding(
        f"MAB-Sync accepts {change(bandit)}, Oracle-Static {change(static)}",
        f"Exploring attains {percent((bandit - 1) / (static - 1))} of Oracle-Static's gain, the "
        f"paper's {percent(paper)}: an answer has {points:.0f} scheduling points, and to try each "
        f"draft once takes {len(measured.drafts)} of them.",
    )


def _bandit_time(panel: Panel, measured: Measured) -> Finding:
    fallback = panel.mean(MAB_ASYNC, OWN_TIME, "fallback")
    wait = panel.mean(MAB_SYNC, OWN_TIME, "load_wait")
    load = cost_of_switching(measured).mean(LOAD)
    return Finding(
        f"MAB-Async falls back {percent(fallback)} of its time, MAB-Sync waits {percent(wait)}",
        f"{_busy(measured, MAB_ASYNC)}; a load takes {load:.1f} iterations, and what it brings may "
        f"run from the next scheduling point on: there is one every {measured.base.interval}.",
    )


def _throughput(panel: Panel, measured: Measured) -> Finding:
    general, mab = panel.mean(MEMSPEC), panel.mean(ratio(MEMSPEC, MAB_ASYNC))
    title = f"MemSpec {change(general)} over General-Static, {change(mab)} over MAB-Async"
    if panel.find(DYNAMIC) is None:
        return Finding(title, "No oracle ran, which would tell what these drafts can give.")
    bound, attained = panel.mean(DYNAMIC), panel.mean(ratio(MEMSPEC, DYNAMIC))
    claim = claims.MEMSPEC_THROUGHPUT.high
    verdict = "more than these drafts can give" if bound < claim else "within what drafts can give"
    chance = _by_chance(panel, DYNAMIC)
    null = f" ({chance} of that gain it would have over drafts that are alike)" if chance else ""
    tokens = arithmetic(measured.answers, tokens_an_iteration(BASELINE)).mean
    return Finding(
        title,
        f"Oracle-Dynamic, which knows the answer, has {change(bound)} over General-Static{null}; "
        f"MemSpec attains {percent(attained)} of its throughput. The paper's {change(claim)} for "
        f"MemSpec is {verdict}: General-Static has {tokens:.2f} tokens an iteration."
        f"{_own_steps(measured)}",
    )


def _own_steps(measured: Measured) -> str:
    """Say by how much the general draft's iterations differ, in real runs of unlike drafts."""
    if measured.profile is not None or STATIC not in measured.answers.sums:
        return ""
    longer = arithmetic(measured.answers, iteration_over(BASELINE, STATIC)).mean
    return f" An iteration of General-Static takes {longer:.2f} times one of Oracle-Static."


def _falling_back(first: str, second: str, panel: Panel, measured: Measured) -> Finding:
    """Compare the fallback of two strategies."""
    one, other = (percent(panel.mean(each, OWN_TIME, "fallback")) for each in (first, second))
    return Finding(
        f"{name(first)} falls back {one} of its time, {name(second)} {other}",
        f"{_busy(measured, first)}; {_busy(measured, second)}.",
    )


def _components(panel: Panel, measured: Measured) -> Finding:
    alone, both = panel.mean(PREDICTION_ONLY), panel.mean(MEMSPEC)
    more = panel.mean(ratio(MEMSPEC, PREDICTION_ONLY))
    lost = arithmetic(measured.answers, share("fallback", PREDICTION_ONLY)).mean
    return Finding(
        f"over General-Static: Prediction-Only {change(alone)}, MemSpec {change(both)}",
        f"Preparing ahead changes throughput by {change(more, 1)}. It can at most win back what "
        f"Prediction-Only loses in the {percent(lost)} of its time that it falls back, and costs "
        f"loads: {_an_answer(measured, 'loads', MEMSPEC):.1f} an answer instead of "
        f"{_an_answer(measured, 'loads', PREDICTION_ONLY):.1f}.",
    )


def _interval(panel: Panel, measured: Measured) -> Finding:
    groups, means = _curve(panel, MEMSPEC)
    found = steps(_changes(panel, groups))
    spread = max(means) / min(means)
    return Finding(
        f"N = {' → '.join(groups)}: {', '.join(found)}",
        f"{_verdict(found == INTERVAL_SHAPE)} ({', '.join(INTERVAL_SHAPE)}): the best N is "
        f"{change(spread, 1)} over the worst. {_busy(measured, MEMSPEC)}.",
    )


def _length(panel: Panel, measured: Measured) -> Finding:
    groups, means = _curve(panel, MEMSPEC)
    changes = _changes(panel, groups)
    holds = grows(changes, _change(panel, MEMSPEC, groups))
    longest = max(measured.points, key=lambda point: point.tokens)
    tokens = list(measured.points[longest].tokens(BASELINE).values())
    reach = sum(count == max(tokens) for count in tokens)
    return Finding(
        f"{' → '.join(groups)} tokens: {', '.join(steps(changes))}",
        f"{_verdict(holds)} (the gain grows with the length): from {change(means[0], 1)} to "
        f"{change(means[-1], 1)} over General-Static, on the {reach} of {len(tokens)} prompts "
        f"whose answers have {groups[-1]} tokens. {_busy(measured, MEMSPEC)}.",
    )


def _capacity(panel: Panel, measured: Measured) -> Finding:
    groups, _ = _curve(panel, MEMSPEC)
    own, mab = (_change(panel, one, groups) for one in (MEMSPEC, MAB_ASYNC))
    holds = (step(own, NEARLY_FLAT), step(mab, NEARLY_FLAT)) == (FLAT, RISES)
    most = measured.points[measured.base._replace(capacity=int(groups[-1]))]
    loads = arithmetic(most, an_answer("loads", MAB_ASYNC)).mean
    return Finding(
        f"K = {groups[0]} → {groups[-1]}: MemSpec {change(own.mean, 1)}, "
        f"MAB-Async {change(mab.mean, 1)}",
        f"{_verdict(holds)} (MemSpec nearly flat, within 3 %; MAB-Async rising by more). "
        f"{_busy(measured, MAB_ASYNC)}; at K = {groups[-1]} it loads {loads:.1f}, having "
        f"{len(measured.drafts)} drafts to try. {_worth_of_room(measured, most)}",
    )


def _worth_of_room(measured: Measured, most: Answers) -> str:
    """Say what MAB-Async gains by falling back less.

    MAB-Sync never does and runs what the same bandit wants, so that it shows what there is to gain.
    """
    shares = (arithmetic(a, share("fallback", MAB_ASYNC)).mean for a in (measured.answers, most))
    before, after = map(percent, shares)
    now = arithmetic(measured.answers, tokens_an_iteration(MAB_ASYNC)).mean
    then = arithmetic(most, tokens_an_iteration(MAB_ASYNC)).mean
    said = (
        f"It falls back {after} of its time instead of {before}, and an iteration has "
        f"{change(then / now, 1)} tokens"
    )
    if MAB_SYNC not in measured.answers.sums:
        return f"{said}."
    bound = arithmetic(measured.answers, tokens_an_iteration(MAB_SYNC)).mean / now
    why = "the draft that it wants is often one to try, no better than the one that runs"
    reason = f": {why}" if bound <= 1.0 + NEARLY_FLAT else ""
    return f"{said}; MAB-Sync, which never falls back, has {change(bound, 1)}{reason}."


def _recall(panel: Panel, measured: Measured) -> Finding:
    row = panel.drawn[-1].group
    first, two = panel.mean(TOP_ONE, row), panel.mean(TOP_TWO, row)
    return Finding(
        f"{name(row)}: best first {percent(first)}, in two {percent(two)}",
        "Several drafts are often equally good over the next interval, and any of them counts: a "
        f"random ranking has the best first at {percent(_chance(panel, TOP_ONE, row))}."
        + _where_one_is_best(panel, row),
    )


def _where_one_is_best(panel: Panel, row: str) -> str:
    if panel.find(TOP_ONE + UNTIED, row) is None:
        return ""
    first, chance = panel.mean(TOP_ONE + UNTIED, row), _chance(panel, TOP_ONE + UNTIED, row)
    return f" Where one alone is best, it is first at {percent(first)} (chance {percent(chance)})."


def _latency(panel: Panel, measured: Measured) -> Finding:
    general, mab = (panel.mean(ratio(MEMSPEC, base)) for base in (BASELINE, MAB_ASYNC))
    start = sum(panel.mean(BASELINE, part=part) for part in ("prompt_seconds", "first_wait"))
    return Finding(
        f"MemSpec {change(general)} against General-Static, {change(mab)} against MAB-Async",
        f"Prompt and first load are {percent(start)} of General-Static's latency; the rest is "
        "decoding, as in Figure 6.",
    )


def _range(form: Form, panel: Panel) -> Finding:
    """Say between what MemSpec lies on a curve of sensitivity."""
    groups, means = _curve(panel, MEMSPEC)
    places = [form.x_name.format(group) for group in groups]
    (low, at_low), (high, at_high) = (
        choose(zip(means, places, strict=True)) for choose in (min, max)
    )
    return Finding(
        f"MemSpec from {change(low)} ({at_low}) to {change(high)} ({at_high})",
        "Over General-Static, on all prompts together.",
    )


def _slow_predictions(panel: Panel, measured: Measured) -> Finding:
    """Say what N changes where rankings take as long as the paper's."""
    groups, means = _curve(panel, MEMSPEC)
    changes = (change(later / earlier, 1) for earlier, later in pairwise(means))
    return Finding(
        f"N = {' → '.join(groups)}: {', '.join(changes)}",
        "Figure 10 with rankings of the paper's encoder, up to 3.9 % of the time at N = 4 (its "
        "Figure 7), in the place of a head on states that are there anyway.",
    )


_FINDERS: Mapping[str, Callable[[Panel, Measured], Finding]] = {
    "figure_01": _acceptance,
    "figure_02": _switching,
    "figure_03": _bandit_acceptance,
    "figure_04": _bandit_time,
    "figure_06": _throughput,
    "figure_07": partial(_falling_back, MEMSPEC, MAB_ASYNC),
    "figure_08": _components,
    "figure_09": partial(_falling_back, PREDICTION_ONLY, MEMSPEC),
    "figure_10": _interval,
    "figure_11": _length,
    "figure_12": _capacity,
    "table_2": _recall,
    "latency": _latency,
    "sensitivity_slow_predictions": _slow_predictions,
}


def _by_chance(panel: Panel, oracle: str) -> str:
    """Return which share of an oracle's gain its null control has too; empty if unknown."""
    value = panel.find(oracle)
    if value is None or value.control is None or value.estimate.mean <= 1.0:
        return ""
    return percent((value.control.mean - 1.0) / (value.estimate.mean - 1.0))


def _chance(panel: Panel, series: str, group: str) -> float:
    """Return what a random ranking has."""
    value = panel.find(series, group)
    return 0.0 if value is None or value.control is None else value.control.mean


def _an_answer(measured: Measured, field: str, strategy: str) -> float:
    return arithmetic(measured.answers, an_answer(field, strategy)).mean


def _busy(measured: Measured, strategy: str) -> str:
    """Say how often a strategy loads and switches."""
    if strategy not in measured.answers.sums:
        return f"{name(strategy)} did not run"
    loads, switches = (_an_answer(measured, field, strategy) for field in ("loads", "switches"))
    return f"{name(strategy)} loads {loads:.1f} drafts an answer and switches {switches:.1f} times"


def _curve(panel: Panel, series: str) -> tuple[list[str], list[float]]:
    values = [value for value in panel.drawn if value.series == series]
    return [value.group for value in values], [value.estimate.mean for value in values]


def _change(panel: Panel, series: str, groups: Sequence[str]) -> Estimate:
    """Return what a curve does from its first to its last point."""
    value = panel.find(series, step_name(groups[0], groups[-1]))
    assert value is not None
    return value.estimate


def _changes(panel: Panel, groups: Sequence[str]) -> list[Estimate]:
    """Return what MemSpec's curve does from each point to the next."""
    return [_change(panel, MEMSPEC, pair) for pair in pairwise(groups)]


def _verdict(holds: bool) -> str:
    return "The paper's shape holds" if holds else "The paper's shape does not hold"
