"""Which proposal pays: a draft's, a lookup's or none, and how long it should be.

An iteration with a chain of length g from a draft with step cost c yields E tokens in
g·c + v(g + 1) seconds, where v(n) is a pass of n rows over the target; a plain one yields one
token in v(1). The planner takes what yields most a second, by the acceptance seen so far. A
source that does not pay is left alone and tried again now and then.

A draft that knows how likely its proposals are stops by itself. A proposal that is right with
probability p, together with those before it, brings p tokens; so it pays to have it verified while
p is above what a row more takes, times the rate, and to look for it at all while p is likely to be
above that of step and row together. What such a draft yields is seen, not reckoned.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from memspec_core.request import LOOKUP, PLAIN
from memspec_core.speculation.calibration import NOMINAL, Costs

MEMORY = 0.97
"""Weight of the past in an acceptance: it looks back on some thirty iterations."""

ON_AGAIN = 1.03
"""What a source that was left alone must promise over plain decoding; while it runs, 1."""

FIRST_PAUSE = 16
LONGEST_PAUSE = 256
"""Iterations until a source that does not pay is tried again; doubled each time in vain."""

TRIES = 4
"""Iterations of a new trial: one alone would say little."""

TRIAL_SHARE = 0.03
"""What a trial may cost of the time since the last: reading a long prompt must wait for long."""

READING_SHARE = 0.2
"""What a draft takes to read a token of the context, in steps of one: it reads many at once."""

TIMING_WEIGHT = 0.1
"""Weight of the newest iteration in what passes and steps cost now."""

TRIAL_LEAST = 0.05
"""How likely the proposals of a trial must be, whatever pays: it is to show what they cost."""

MOST_LIKELY = 8
"""Proposals at the most of a draft that stops by itself."""

FEW_ROWS = 4
"""Of a pass with as many proposals as such a draft usually makes."""

LEAST_OF_USUAL = 0.25
"""Later rows take more than the first, where a pass is no longer bound by reading weights."""

LOST_BESIDE_A_LOAD = {"cpu": 0.22, "cuda": 0.15}
"""Share of a load's time that decoding loses: on CPUs they need the same cores (measured by
`benchmarks/load_interference.py` on two), on a GPU the same memory alone (assumed)."""

PRIOR = 0.5
PRIOR_WEIGHT = 8.0
"""The acceptance that is assumed before any is seen, and the iterations that it counts for."""


@dataclass
class _Acceptance:
    """A share of accepted proposals that forgets slowly."""

    accepted: float = PRIOR * PRIOR_WEIGHT
    seen: float = PRIOR_WEIGHT

    @property
    def share(self) -> float:
        return self.accepted / self.seen

    def add(self, accepted: bool) -> None:
        self.accepted = MEMORY * self.accepted + accepted
        self.seen = MEMORY * self.seen + 1.0


@dataclass
class _Yield:
    """What iterations of a draft that stops by itself gained and took, on average of the last ones.

    `rows` of a verification, `steps` of the draft.
    """

    tokens: float = 1.0 + PRIOR
    rows: float = 2.0
    steps: float = 2.0
    seen: float = PRIOR_WEIGHT

    def add(self, tokens: int, rows: int, steps: int) -> None:
        self.seen = MEMORY * self.seen + 1.0
        self.tokens += (tokens - self.tokens) / self.seen
        self.rows += (rows - self.rows) / self.seen
        self.steps += (steps - self.steps) / self.seen


@dataclass
class _Source:
    """One draft, or lookups of one certainty: its acceptance, its step cost, and whether it pays.

    The first proposal has an acceptance of its own: where it is right, the next is likelier so.
    """

    step_seconds: float
    yielded: _Yield = field(default_factory=_Yield)
    first: _Acceptance = field(default_factory=_Acceptance)
    later: _Acceptance = field(default_factory=_Acceptance)
    pays: bool = True
    idle: int = 0
    pause: int = FIRST_PAUSE
    tries: int = 0

    def tokens(self, length: int) -> float:
        """Return the tokens that an iteration of `length` proposals is expected to yield."""
        total, likely = 1.0, self.first.share
        for _ in range(length):
            total += likely
            likely *= self.later.share
        return total

    def add(self, proposed: int, accepted: int) -> None:
        self.first.add(accepted > 0)
        for index in range(1, min(accepted + 1, proposed)):
            self.later.add(index < accepted)


@dataclass(frozen=True)
class Candidate:
    """A source that could propose now, and how many tokens at the most.

    The name of a lookup says how much it matched as well: each certainty has an acceptance.
    `unseen`: tokens of the context that a draft would have to read first. `stops`: it can leave out
    proposals that are too unlikely.
    """

    name: str
    most: int
    unseen: int = 0
    stops: bool = False


@dataclass(frozen=True)
class Plan:
    """What the next iteration does: the source's name, or "none", and the length to ask for.

    `least`: how likely all of the proposals together must be to be verified, 0 where that does not
    matter; `worth`: how likely, that a further one is looked for.
    """

    name: str = PLAIN
    length: int = 0
    least: float = 0.0
    worth: float = 0.0

    @property
    def source(self) -> str:
        """The name of the draft, "lookup" or "none"."""
        return LOOKUP if self.name.startswith(f"{LOOKUP} ") else self.name

    def describe(self) -> str:
        """Return the plan in words for people."""
        bound = "up to " if self.least else ""
        return f"{bound}{self.length} by {self.source}" if self.length else PLAIN


class Planner:
    """Chooses the source and length of each iteration; lives as long as the target.

    With `timed` false it takes the costs as they are given, whatever passes take in truth.
    """

    def __init__(self, costs: Costs, timed: bool = True) -> None:
        self.costs = costs
        self._timed = timed
        self._slowdown = 1.0
        self._shape = [1.0] * costs.most_rows
        self._timings = [0] * costs.most_rows
        self._sources: dict[str, _Source] = {}
        self._last = PLAIN
        self.plan = Plan()

    def untimed(self) -> "Planner":
        """Return a planner for one generation, which no measured time nor earlier one sways.

        What is drawn depends on what was proposed: so a seed repeats its text.
        """
        return Planner(NOMINAL, timed=False)

    def pays(self, name: str) -> bool:
        """Whether a source is thought to pay, as one is that was never seen."""
        return name not in self._sources or self._sources[name].pays

    def iteration_seconds(self, draft: str, length: int) -> float:
        """Return what an iteration of `length` proposals takes, the target's pass included."""
        rows = min(length + 1, self.costs.most_rows)
        return length * self._source(draft).step_seconds + self._pass_seconds(rows)

    def catch_up_seconds(self, draft: str, tokens: int) -> float:
        """Return what a draft takes to read tokens of the context."""
        return READING_SHARE * tokens * self._source(draft).step_seconds

    def lost_seconds(self, load_seconds: float) -> float:
        """Return how much of its time decoding loses beside a load."""
        return LOST_BESIDE_A_LOAD[self.costs.device] * load_seconds

    def choose(self, candidates: Iterable[Candidate]) -> Plan:
        """Return the plan of the next iteration."""
        plain = 1.0 / self._pass_seconds(1)
        best_rate, best, probe = plain, Plan(), Plan()
        for candidate in candidates:
            source = self._source(candidate.name)
            rate, plan = self._best_plan(source, candidate, plain)
            source.pays = rate > plain * (1.0 if source.pays else ON_AGAIN)
            if source.pays:
                source.pause, source.idle, source.tries = FIRST_PAUSE, 0, 0
                if rate > best_rate:
                    best_rate, best = rate, plan
            else:
                source.idle += 1
                if self._trial_is_due(source, candidate.unseen):
                    least = TRIAL_LEAST if candidate.stops else 0.0
                    length = 2 if candidate.stops else 1
                    probe = replace(plan, length=length, least=least, worth=least)
        self.plan = probe if probe.length and not best.length else best
        return self.plan

    def observe(
        self,
        plan: Plan,
        proposed: int,
        steps: int,
        accepted: int,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """See what an iteration that followed a plan did in so many steps of the draft.

        And what its two halves took.
        """
        if self._timed:
            self._observe_times(plan.name, steps, proposed, draft_seconds, verify_seconds)
        self._last = plan.name
        if not steps:
            return
        source = self._source(plan.name)
        if plan.least:
            source.yielded.add(accepted + 1, proposed + 1, steps)
        else:
            source.add(proposed, accepted)
        if not source.pays:
            source.tries += 1
            if source.tries >= TRIES:
                source.idle = source.tries = 0
                source.pause = min(2 * source.pause, LONGEST_PAUSE)

    def _trial_is_due(self, source: _Source, unseen: int) -> bool:
        seconds = (READING_SHARE * unseen + TRIES) * source.step_seconds
        affordable = TRIAL_SHARE * source.idle * self._pass_seconds(1)
        return source.tries > 0 or (source.idle >= source.pause and seconds <= affordable)

    def _best_plan(self, source: _Source, candidate: Candidate, plain: float) -> tuple[float, Plan]:
        """Return the tokens a second of a source, and the plan that gives them."""
        most = min(candidate.most, self.costs.most_rows - 1)
        if candidate.stops:
            seen = source.yielded
            seconds = self._mean_pass_seconds(seen.rows) + seen.steps * source.step_seconds
            rate = seen.tokens / seconds
            row, best = self._row_seconds(), max(rate, plain)
            least, worth = row * best, (source.step_seconds + row) * best
            return rate, Plan(candidate.name, min(most, MOST_LIKELY), least, worth)
        rates = ((self._rate(source, length), length) for length in range(1, most + 1))
        rate, length = max(rates, default=(0.0, 0))
        return rate, Plan(candidate.name, length)

    def _rate(self, source: _Source, length: int) -> float:
        seconds = length * source.step_seconds + self._pass_seconds(length + 1)
        return source.tokens(length) / seconds

    def _pass_seconds(self, rows: int) -> float:
        return self.costs.verify_seconds[rows - 1] * self._shape[rows - 1] * self._slowdown

    def _row_seconds(self) -> float:
        """Return what one more row takes, on average of the first few.

        Where noise in so few passes has it all but nothing, a part of what later rows take.
        """
        few, many = (min(rows, self.costs.most_rows) for rows in (FEW_ROWS, MOST_LIKELY + 1))
        first = self._pass_seconds(1)
        own, usual = ((self._pass_seconds(rows) - first) / max(1, rows - 1) for rows in (few, many))
        return max(own, LEAST_OF_USUAL * usual)

    def _mean_pass_seconds(self, rows: float) -> float:
        """Return what passes take on average that have so many rows on average."""
        below = min(int(rows), self.costs.most_rows)
        above = min(below + 1, self.costs.most_rows)
        share = min(rows - below, 1.0)
        return (1 - share) * self._pass_seconds(below) + share * self._pass_seconds(above)

    def _observe_times(
        self, name: str, steps: int, proposed: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        """Follow what a pass takes now: it grows with the context and with what else runs.

        Something may have run beside the calibration, too: each number of rows is put right alone.
        """
        if verify_seconds > 0.0 and proposed < self.costs.most_rows:
            ratio = verify_seconds / self.costs.verify_seconds[proposed]
            shape = self._shape[proposed]
            slowdown = min(max(ratio / shape, 0.2), 5.0)
            self._slowdown += TIMING_WEIGHT * (slowdown - self._slowdown)
            own = min(max(ratio / self._slowdown, 0.2), 5.0)
            self._timings[proposed] += 1
            weight = max(TIMING_WEIGHT, 1.0 / (1 + self._timings[proposed]))
            self._shape[proposed] += weight * (own - shape)
        if steps and name == self._last:  # else it had to catch up with the context
            source = self._source(name)
            step = draft_seconds / steps
            source.step_seconds += TIMING_WEIGHT * (step - source.step_seconds)

    def _source(self, name: str) -> _Source:
        if name not in self._sources:
            self._sources[name] = _Source(self.costs.step_seconds(name))
        return self._sources[name]


def fixed_plan(candidates: Sequence[Candidate], length: int) -> Plan:
    """Return the plan where the user has fixed the length: the surest source, always."""
    for candidate in candidates:
        if candidate.most > 0:
            return Plan(candidate.name, min(length, candidate.most))
    return Plan()
