"""Means with intervals, from sums over the prompts of each domain.

As in the paper, a mean over workloads is that of the domains' figures (of ratios the geometric
one). Intervals are bootstrapped: the prompts of each domain are drawn again, all strategies on the
same ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memspec_core.evaluation.acceptance import Walk
from memspec_core.evaluation.comparison import StrategyRun

RESAMPLES = 2000
_OF_RUN = (
    *("tokens", "iterations", "desired", "fallback", "load_wait", "prediction"),
    *("prompt_seconds", "first_wait", "switches", "loads"),
)
FIELDS = (*_OF_RUN, "answers")
"""What is added up of runs."""

Array = npt.NDArray[np.float64]
Key = tuple[str, int]
"""A prompt: its domain and its number."""


@dataclass(frozen=True)
class Estimate:
    """A mean with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


class Totals:
    """Sums over prompts of one strategy [resamples], by the names of `FIELDS`."""

    def __init__(self, sums: Array) -> None:
        self._sums = sums

    def __getitem__(self, field: str) -> Array:
        """Return one of the sums."""
        found: Array = self._sums[:, FIELDS.index(field)]
        return found

    @property
    def seconds(self) -> Array:
        """Decoding: without prompt processing and the first load."""
        return self["desired"] + self["fallback"] + self["load_wait"] + self["prediction"]

    @property
    def latency(self) -> Array:
        """From the goal to the answer's end."""
        return self.seconds + self["prompt_seconds"] + self["first_wait"]


Measure = Callable[[Mapping[str, Totals]], Array]
"""Computes a figure of one domain from the totals of strategies."""


@dataclass(frozen=True)
class Answers:
    """What strategies did on the same prompts: `sums` [prompts, FIELDS], in the order of `keys`."""

    keys: tuple[Key, ...]
    sums: Mapping[str, Array]

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains in their order."""
        return tuple(dict.fromkeys(domain for domain, _ in self.keys))

    def where(self, keep: Callable[[Key], bool]) -> "Answers":
        """Return the answers to some of the prompts."""
        places = [place for place, key in enumerate(self.keys) if keep(key)]
        sums = {name: found[places] for name, found in self.sums.items()}
        return Answers(tuple(self.keys[place] for place in places), sums)

    def tokens(self, strategy: str) -> dict[Key, float]:
        """Return how many tokens each answer has, over all repeats."""
        column = self.sums[strategy][:, FIELDS.index("tokens")]
        return dict(zip(self.keys, column.tolist(), strict=True))


def answers_of(runs: Iterable[StrategyRun]) -> Answers:
    """Add up runs; those of the same prompt are repeats."""
    added: dict[str, dict[Key, Array]] = {}
    for run in runs:
        of_strategy = added.setdefault(run.strategy, {})
        numbers = np.array([*(getattr(run, field) for field in _OF_RUN), 1.0])
        key = (run.prompt_set, run.prompt)
        of_strategy[key] = of_strategy.get(key, np.zeros(len(FIELDS))) + numbers
    keys = tuple(next(iter(added.values())))
    return Answers(
        keys, {name: np.stack([found[key] for key in keys]) for name, found in added.items()}
    )


def answers_of_walks(domains: Sequence[str], walks: Mapping[str, Walk]) -> Answers:
    """Return walks over prompts of these domains [p] as answers that took no time."""
    keys = tuple((domain, number) for number, domain in enumerate(domains))
    sums = {}
    for name, walked in walks.items():
        sums[name] = np.zeros((len(keys), len(FIELDS)))
        sums[name][:, 0], sums[name][:, 1] = walked.tokens, walked.iterations
    return Answers(keys, sums)


def side_by_side(points: Mapping[str, Answers], strategies: Sequence[str]) -> Answers:
    """Put strategies at several points beside each other, on the prompts that all points have.

    So that intervals are over prompts that are the same everywhere. See `at_point` for the names.
    """
    common = set.intersection(*(set(answers.keys) for answers in points.values()))
    kept = {point: answers.where(common.__contains__) for point, answers in points.items()}
    first = next(iter(kept.values())).keys
    sums = {}
    for point, answers in kept.items():
        places = [answers.keys.index(key) for key in first]
        for strategy in strategies:
            sums[at_point(strategy, point)] = answers.sums[strategy][places]
    return Answers(first, sums)


def at_point(strategy: str, point: str) -> str:
    """Name a strategy at a point."""
    return f"{strategy} at {point}"


def geometric(answers: Answers, measure: Measure) -> Estimate:
    """Estimate the geometric mean over domains, of ratios."""
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.exp(np.log(_by_domain(answers, measure)).mean(axis=0))
    return _estimate(means)


def arithmetic(answers: Answers, measure: Measure) -> Estimate:
    """Estimate the plain mean over domains, of shares and of parts of a sum."""
    return _estimate(_by_domain(answers, measure).mean(axis=0))


def _by_domain(answers: Answers, measure: Measure) -> Array:
    """Return the figure of each domain [domains, 1 + resamples], that of all prompts first."""
    random = np.random.default_rng(0)
    rows = []
    for domain in answers.domains:
        chosen = answers.where(lambda key, domain=domain: key[0] == domain)  # type: ignore[misc]
        count = len(chosen.keys)
        drawn = random.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
        times = np.vstack([np.ones((1, count)), drawn.astype(np.float64)])
        rows.append(measure(_Drawn(chosen.sums, times)))
    return np.stack(rows)


class _Drawn(dict[str, Totals]):
    """Totals of the strategies that a measure asks for."""

    def __init__(self, sums: Mapping[str, Array], times: Array) -> None:
        super().__init__()
        self._sums, self._times = sums, times

    def __missing__(self, strategy: str) -> Totals:
        self[strategy] = Totals(self._times @ self._sums[strategy])
        return self[strategy]


def _estimate(values: Array) -> Estimate:
    """Return the first value with the interval of the others.

    Draws for which there is no figure, such as a ratio to a draft that had nothing accepted, are
    left out.
    """
    drawn = values[1:]
    found = drawn[np.isfinite(drawn)]
    low, high = np.quantile(found, (0.025, 0.975)) if len(found) else (np.nan, np.nan)
    return Estimate(float(values[0]), float(low), float(high))


def throughput_over(one: str, base: str) -> Measure:
    """Return what measures a strategy's speed in times of another's."""
    return lambda t: (t[one]["tokens"] / t[one].seconds) / (t[base]["tokens"] / t[base].seconds)


def acceptance_over(one: str, base: str) -> Measure:
    """Return what measures a strategy's tokens an iteration in times of another's (Equation 1)."""
    return lambda t: tokens_an_iteration(one)(t) / tokens_an_iteration(base)(t)


def proposals_over(one: str, base: str) -> Measure:
    """Return the same without the token of the target's own that each iteration has."""
    return lambda t: (tokens_an_iteration(one)(t) - 1.0) / (tokens_an_iteration(base)(t) - 1.0)


def latency_part_over(field: str, one: str, base: str) -> Measure:
    """Return what measures a part of a strategy's latency a token in times of another's whole."""

    def measure(totals: Mapping[str, Totals]) -> Array:
        own, other = totals[one], totals[base]
        part = {"decoding": own.seconds, "whole": own.latency}
        seconds = part[field] if field in part else own[field]
        return (seconds / own["tokens"]) / (other.latency / other["tokens"])

    return measure


def time_part_over(field: str, one: str, base: str) -> Measure:
    """Return what measures a part of a strategy's time a token in times of another's whole."""
    return lambda t: (t[one][field] / t[one]["tokens"]) / (t[base].seconds / t[base]["tokens"])


def an_answer(field: str, one: str) -> Measure:
    """Return what measures how much of something a strategy has an answer."""
    return lambda t: t[one][field] / t[one]["answers"]


def tokens_an_iteration(one: str) -> Measure:
    """Return what measures a strategy's tokens an iteration, the target's own included."""
    return lambda t: t[one]["tokens"] / t[one]["iterations"]


def iteration_over(one: str, base: str) -> Measure:
    """Return what measures an iteration of a strategy that never falls back in another's."""
    return lambda t: (
        (t[one]["desired"] / t[one]["iterations"]) / (t[base]["desired"] / t[base]["iterations"])
    )


def load_in_iterations(one: str) -> Measure:
    """Return what measures a strategy's first load in times of an iteration of its."""
    return lambda t: (
        (t[one]["first_wait"] / t[one]["answers"]) / (t[one]["desired"] / t[one]["iterations"])
    )


def share(field: str, strategy: str) -> Measure:
    """Return what measures a part of a strategy's own time."""
    return lambda t: t[strategy][field] / t[strategy].seconds
