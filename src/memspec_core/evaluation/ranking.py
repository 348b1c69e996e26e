"""How well rankings of drafts do on traced answers: recall, and throughput when followed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memspec_core.evaluation.acceptance import (
    Walk,
    dynamic_walk,
    rate_interval,
    static_oracle,
    walk,
)
from memspec_core.evaluation.scheduling import (
    ChanceRanker,
    FixedRanker,
    Followed,
    Ranker,
    RankerFor,
    Schedule,
    Scores,
    domain_mask,
    follow,
    tied_points,
)
from memspec_core.measurement.trace import TracedPrompt
from memspec_core.prediction.context import Vector
from memspec_core.prediction.predictor import Predictor

CHANCE = "chance"
DOMAIN = "the domain's own"
ALWAYS = "always "
BEST_A_PROMPT = "best a prompt, known before"
BEST_AN_INTERVAL = "best an interval, known before"
PLAIN_ROWS = (DOMAIN, CHANCE, BEST_A_PROMPT, BEST_AN_INTERVAL)
"""Names of rows that no predictor makes, beside those of always the same draft."""

_CHANCE_RUNS = 10

Figure = tuple[float, float, float]
"""A value with the ends of its 95 % interval over prompts."""


class PredictorRanker:
    """Ranks with a predictor over a traced answer's contexts."""

    def __init__(
        self,
        predictor: Predictor,
        drafts: Sequence[str],
        context: Callable[[int], tuple[Vector, Vector | None]],
    ) -> None:
        """`context`: gives the prompt's vector, and the recent one at a place."""
        self._predictor = predictor
        self._drafts = drafts
        self._context = context

    def scores(self, place: int) -> Scores:
        """Score every draft at a scheduling point."""
        found = self._predictor.scores(*self._context(place))
        return np.array([found[draft] for draft in self._drafts])

    def observe(self, draft: int, proposed: int, accepted: int) -> None:
        """Pass on what an iteration did."""
        self._predictor.observe(self._drafts[draft], proposed, accepted)


def figures(
    prompts: Sequence[TracedPrompt], schedule: Schedule, rankers: Mapping[str, RankerFor]
) -> dict[str, Any]:
    """Judge rankers beside plain choices and oracles; each figure is [value, lower, upper]."""
    points, tied, best = tied_points(prompts, schedule)
    rows = {name: _row(prompts, schedule, ranker) for name, ranker in rankers.items()}
    rows |= _plain_choices(prompts, schedule) | _oracles(prompts, schedule)
    return {
        "prompts": len(prompts),
        "points": points,
        "tied_points": tied,
        "best_drafts_a_point": best,
        "rows": rows,
        "domains": {
            name: _by_domain(prompts, schedule, ranker) for name, ranker in rankers.items()
        },
    }


def _row(
    prompts: Sequence[TracedPrompt], schedule: Schedule, ranker: RankerFor
) -> dict[str, Figure]:
    return _summary([follow(prompt, schedule, ranker(prompt)) for prompt in prompts])


def _summary(followed: Sequence[Followed]) -> dict[str, Figure]:
    """Return every figure; the untied ones are missing where there are always ties."""
    kinds = ("first", "among_two", "domain_first", "domain_among_two")
    row = {kind: _share(followed, kind) for kind in kinds}
    untied = [replace(f, points=tuple(p for p in f.points if not p.tied)) for f in followed]
    untied = [each for each in untied if each.points]
    if untied:
        row |= {f"{kind}_untied": _share(untied, kind) for kind in ("first", "among_two")}
    tokens = np.array([each.tokens for each in followed])
    iterations = np.array([each.iterations for each in followed])
    return row | {"tokens_an_iteration": rate_interval(Walk(tokens, iterations))}


def _share(followed: Sequence[Followed], kind: str) -> Figure:
    """Return the share of scheduling points at which a kind of hit was made."""
    hits = [sum(getattr(point, kind) for point in each.points) for each in followed]
    # A share of points has the same interval over prompts as tokens have over iterations.
    return rate_interval(Walk(np.array(hits), np.array([len(each.points) for each in followed])))


def _by_domain(
    prompts: Sequence[TracedPrompt], schedule: Schedule, ranker: RankerFor
) -> dict[str, Any]:
    domains = dict.fromkeys(prompt.domain for prompt in prompts)
    return {
        domain: _row([p for p in prompts if p.domain == domain], schedule, ranker)
        for domain in domains
    }


def _plain_choices(prompts: Sequence[TracedPrompt], schedule: Schedule) -> dict[str, Any]:
    """Judge each draft alone, that of the domain, and chance; of these only what makes sense."""
    count = len(schedule.drafts)
    rows: dict[str, Any] = {}
    for draft, name in enumerate(schedule.drafts):
        alone = FixedRanker(np.eye(count)[draft])
        row = _row(prompts, schedule, lambda _, ranker=alone: ranker)  # type: ignore[misc]
        rows[ALWAYS + name] = _of_one(row)
    own = _row(
        prompts,
        schedule,
        lambda p: FixedRanker(domain_mask(p.domain, schedule.drafts).astype(np.float64)),
    )
    rows[DOMAIN] = _of_one(own)
    chance = ChanceRanker(count, np.random.default_rng(0))
    rows[CHANCE] = _summary([_many(prompt, schedule, chance) for prompt in prompts])
    return rows


def _of_one(row: dict[str, Figure]) -> dict[str, Figure]:
    """Return what can be said of a single draft, which is no ranking."""
    kept = ("first", "first_untied", "tokens_an_iteration")
    return {key: row[key] for key in kept if key in row}


def _many(prompt: TracedPrompt, schedule: Schedule, ranker: Ranker) -> Followed:
    """Return several answers by chance as one, so that prompts stay what intervals are over."""
    runs = [follow(prompt, schedule, ranker) for _ in range(_CHANCE_RUNS)]
    return Followed(
        sum(run.tokens for run in runs),
        sum(run.iterations for run in runs),
        tuple(point for run in runs for point in run.points),
    )


def _oracles(prompts: Sequence[TracedPrompt], schedule: Schedule) -> dict[str, Any]:
    static = walk(prompts, static_oracle(schedule.columns, schedule.length))
    dynamic = dynamic_walk(prompts, schedule.columns, schedule.length, schedule.interval)
    return {
        BEST_A_PROMPT: {"tokens_an_iteration": rate_interval(static)},
        BEST_AN_INTERVAL: {"tokens_an_iteration": rate_interval(dynamic)},
    }
