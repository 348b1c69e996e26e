"""What a trace says about drafts: tokens an iteration, and what the best choice would give.

A walk over a prompt's places is a generation: an iteration at a place gains the accepted proposals
and the target's own token, and ends at the next place. So every figure here is exact for greedy
decoding with chains of a fixed length, without a model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memspec_core.measurement.trace import Trace, TracedPrompt
from memspec_core.request import LOOKUP
from memspec_core.speculation.decoding import SURE_MATCH

BESIDE = " + lookup"
"""Ends the name of a draft that proposes where the lookup is not sure."""

_RESAMPLES = 1000

Gains = npt.NDArray[np.int64]
"""Tokens that an iteration gains at each place of an answer [n], or with each draft [n, d]."""


@dataclass(frozen=True)
class Walk:
    """Generations over some prompts, one entry a prompt: tokens gained and iterations [p]."""

    tokens: npt.NDArray[np.int64]
    iterations: npt.NDArray[np.int64]

    @property
    def tokens_an_iteration(self) -> float:
        """Return the ratio over all prompts."""
        return float(self.tokens.sum() / self.iterations.sum())


def gains(prompt: TracedPrompt, column: int, length: int) -> Gains:
    """Return what an iteration with a draft gains, with `length` proposals."""
    return np.minimum(prompt.accepted[:, column], length).astype(np.int64) + 1


def beside_lookup(prompt: TracedPrompt, column: int, lookup: int, length: int) -> Gains:
    """Do the same where a lookup that is sure goes first, as decoding with a fixed length has it.

    A lookup that is less sure fills in where the draft is silent; a traced draft never is.
    """
    sure = prompt.matched >= SURE_MATCH
    return np.where(sure, gains(prompt, lookup, length), gains(prompt, column, length))


def walk(prompts: Sequence[TracedPrompt], gained: Callable[[TracedPrompt], Gains]) -> Walk:
    """Generate each prompt's answer with what is gained at each place."""
    walked = [_walked(gained(prompt)) for prompt in prompts]
    return Walk(
        np.array([len(prompt.token_ids) for prompt in prompts]),
        np.array([len(places) for places in walked]),
    )


def matrix(trace: Trace, length: int) -> dict[str, dict[str, Walk]]:
    """Return the walks of every draft, alone and beside the lookup, by domain."""
    lookup = trace.drafts.index(LOOKUP)
    choices: dict[str, Callable[[TracedPrompt], Gains]] = {}
    for column, name in enumerate(trace.drafts):
        choices[name] = lambda p, c=column: gains(p, c, length)  # type: ignore[misc]
        if column != lookup:
            choices[name + BESIDE] = lambda p, c=column: beside_lookup(p, c, lookup, length)  # type: ignore[misc]
    by_domain = _by_domain(trace)
    return {
        name: {domain: walk(prompts, gained) for domain, prompts in by_domain.items()}
        for name, gained in choices.items()
    }


def static_oracle(columns: Sequence[int], length: int) -> Callable[[TracedPrompt], Gains]:
    """Return the choice of the best draft for a whole prompt, known beforehand."""

    def choose(prompt: TracedPrompt) -> Gains:
        each = [gains(prompt, column, length) for column in columns]
        return min(each, key=lambda gained: len(_walked(gained)))

    return choose


def dynamic_walk(
    prompts: Sequence[TracedPrompt], columns: Sequence[int], length: int, interval: int
) -> Walk:
    """Generate with the best draft of each interval of so many iterations, known beforehand.

    Exact: the fewest iterations over all choices, by dynamic programming from the answer's end;
    all drafts are resident.
    """
    iterations = [_fewest(all_gains(p, columns, length), interval) for p in prompts]
    return Walk(np.array([len(p.token_ids) for p in prompts]), np.array(iterations))


def permuted(trace: Trace, columns: Sequence[int], seed: int = 0) -> Trace:
    """Return the null control of an oracle: at each place the drafts change roles at random.

    What an oracle gains there comes from choosing the largest of several numbers alone, since no
    draft is better anywhere than another.
    """
    random = np.random.default_rng(seed)
    chosen = np.asarray(columns)
    prompts = []
    for prompt in trace.prompts:
        accepted = prompt.accepted.copy()
        accepted[:, chosen] = random.permuted(accepted[:, chosen], axis=1)
        prompts.append(TracedPrompt(**{**vars(prompt), "accepted": accepted}))
    return Trace(trace.header, prompts)


def ratio_interval(one: Walk, other: Walk, seed: int = 0) -> tuple[float, float, float]:
    """Return how many times the tokens an iteration of `other` those of `one` are.

    With the ends of its 95 % interval over prompts (bootstrap, both on the same prompts).
    """
    return _interval(one, lambda w, p: _rate(w, p) / _rate(other, p), seed)


def rate_interval(one: Walk, seed: int = 0) -> tuple[float, float, float]:
    """Return the tokens an iteration with the ends of their 95 % interval over prompts."""
    return _interval(one, _rate, seed)


def as_json(trace: Trace, lengths: Sequence[int], interval: int = 4) -> dict[str, Any]:
    """Return all figures of a trace, each as [value, lower, upper]."""
    return {
        "prompts": {domain: len(prompts) for domain, prompts in _by_domain(trace).items()},
        "tokens": sum(len(prompt.token_ids) for prompt in trace.prompts),
        "tokens_an_iteration": {
            str(length): {
                name: {domain: rate_interval(found) for domain, found in row.items()}
                for name, row in matrix(trace, length).items()
            }
            for length in lengths
        },
        "acceptance": _acceptance(trace),
        "oracles": {str(length): _oracles(trace, length, interval) for length in lengths},
    }


def _acceptance(trace: Trace) -> dict[str, dict[str, float]]:
    """Return the share of places at which a draft's first proposal is right."""
    return {
        name: {
            domain: float(np.concatenate([p.accepted[:, column] > 0 for p in prompts]).mean())
            for domain, prompts in _by_domain(trace).items()
        }
        for column, name in enumerate(trace.drafts)
    }


def _oracles(trace: Trace, length: int, interval: int) -> Mapping[str, Any]:
    """Return the oracles' tokens an iteration over all prompts, beside their null controls."""
    columns = [c for c, name in enumerate(trace.drafts) if name != LOOKUP]
    if len(columns) < 2:
        return {}
    found = {}
    for name, source in (("true", trace), ("permuted", permuted(trace, columns))):
        prompts = source.prompts
        found[name] = {
            "best_single": max(
                walk(prompts, lambda p, c=c: gains(p, c, length)).tokens_an_iteration  # type: ignore[misc]
                for c in columns
            ),
            "static": walk(prompts, static_oracle(columns, length)).tokens_an_iteration,
            "dynamic": dynamic_walk(prompts, columns, length, interval).tokens_an_iteration,
        }
    return found


def _by_domain(trace: Trace) -> dict[str, list[TracedPrompt]]:
    return {d: [p for p in trace.prompts if p.domain == d] for d in trace.domains}


def _walked(gained: Gains) -> list[int]:
    """Return the places at which the iterations of a generation begin."""
    places, place = [], 0
    while place < len(gained):
        places.append(place)
        place += int(gained[place])
    return places


def all_gains(prompt: TracedPrompt, columns: Sequence[int], length: int) -> Gains:
    """Return what an iteration gains at each place with each of some drafts [n, d]."""
    return np.stack([gains(prompt, column, length) for column in columns], axis=1)


def after_interval(gained: Gains, place: int, interval: int) -> tuple[int, int]:
    """Return where so many iterations from a place end, with gains [n], and how many there are."""
    spent = 0
    while place < len(gained) and spent < interval:
        place += int(gained[place])
        spent += 1
    return min(place, len(gained)), spent


def _fewest(gained: Gains, interval: int) -> int:
    """Return the fewest iterations for gains [n, d], each interval with one draft."""
    count, drafts = gained.shape
    fewest = np.zeros(count + 1, dtype=np.int64)
    for start in range(count - 1, -1, -1):
        best = count + 1
        for draft in range(drafts):
            end, spent = after_interval(gained[:, draft], start, interval)
            best = min(best, spent + int(fewest[end]))
        fewest[start] = best
    return int(fewest[0])


def _rate(walked: Walk, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    tokens = walked.tokens[places].sum(axis=-1)
    return np.asarray(tokens / walked.iterations[places].sum(axis=-1), dtype=np.float64)


def _interval(
    one: Walk,
    figure: Callable[[Walk, npt.NDArray[np.int64]], npt.NDArray[np.float64]],
    seed: int,
) -> tuple[float, float, float]:
    count = len(one.tokens)
    draws = np.random.default_rng(seed).integers(0, count, size=(_RESAMPLES, count))
    lower, upper = np.quantile(figure(one, draws), (0.025, 0.975))
    return float(figure(one, np.arange(count))), float(lower), float(upper)
