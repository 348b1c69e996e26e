"""What a draft is worth: tokens a second, once reading what it has not seen is paid for.

    u_d = N · tokens_d / (N · seconds_d + catch_up_d)

`tokens_d`: what an iteration with draft d is expected to yield; `seconds_d`: what it takes;
`catch_up_d`: reading the part of the context that d has not read. The draft that runs has read
all of it, and others only lag by what it wrote since: that is the hysteresis of the choice. A draft
is worth loading where what it is expected to add, until the answer's end, exceeds what its load and
its catching up cost.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from memspec_core.strategies.base import Ranking

HORIZON = 16
"""Iterations that pay for catching up: a topic lasts longer than one interval."""


DEAR_SHARE = 0.002
"""What takes more than this share of the iterations until the next scheduling point counts."""

EXPECTED_SHARE = 0.5
"""Of the tokens that the length limit still allows, those to expect: an answer may end earlier."""


class DraftCosts(Protocol):
    """What drafts cost on this machine; the planner knows."""

    def iteration_seconds(self, draft: str, length: int) -> float:
        """Return what an iteration of `length` proposals takes, the target's pass included."""
        ...

    def catch_up_seconds(self, draft: str, tokens: int) -> float:
        """Return what reading tokens of the context takes."""
        ...

    def lost_seconds(self, load_seconds: float) -> float:
        """Return how much of its time decoding loses beside a load."""
        ...


@dataclass(frozen=True)
class Utility:
    """Weighs rankings in tokens an iteration by what iterations of `length` proposals cost.

    `unseen`: tokens of the context that each draft would have to read first.
    """

    costs: DraftCosts
    length: int
    unseen: Mapping[str, int]

    def net(self, ranking: Ranking) -> Ranking:
        """Return the ranking by utility."""
        return Ranking({name: self._rate(name, score) for name, score in ranking.scores.items()})

    def is_dear(self, seconds: float, active: str, iterations: int) -> bool:
        """Return whether a scheduling point of so many seconds counts beside its iterations."""
        return seconds > DEAR_SHARE * iterations * self._iteration_seconds(active)

    def not_worth_loading(
        self,
        names: Collection[str],
        ranking: Ranking,
        active: str,
        remaining_tokens: int,
        load_seconds: float,
    ) -> frozenset[str]:
        """Return those of some drafts whose loads would not pay before the answer's end.

        `active` runs; `load_seconds`: what a load takes.
        """
        if ranking.outlook is None or not names:
            return frozenset()
        seconds = self._iteration_seconds(active)
        iterations = EXPECTED_SHARE * remaining_tokens / max(1.0, ranking.scores.get(active, 1.0))
        left_out = set()
        for name in names:
            gain = ranking.outlook.gain(name, active) * iterations
            spent = self.costs.lost_seconds(load_seconds)
            spent += self.costs.catch_up_seconds(name, self.unseen.get(name, 0))
            if gain <= spent / seconds * ranking.scores[name]:
                left_out.add(name)
        return frozenset(left_out)

    def _iteration_seconds(self, name: str) -> float:
        return self.costs.iteration_seconds(name, self.length)

    def _rate(self, name: str, tokens: float) -> float:
        seconds = HORIZON * self._iteration_seconds(name)
        catch_up = self.costs.catch_up_seconds(name, self.unseen.get(name, 0))
        return HORIZON * tokens / (seconds + catch_up)
