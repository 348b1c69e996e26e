"""What the simulator puts in the place of the machine: clock, drafts, loader, and a generation.

Everything takes the seconds of a hardware profile on a clock that only they move, and tokens come
from a trace: greedy decoding yields the same answer whatever proposes, so the trace says exactly
what each draft would have gained at each place.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from memspec_core.evaluation.acceptance import Gains
from memspec_core.evaluation.profiles import Profile
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.measurement.trace import TracedPrompt
from memspec_core.prediction.context import Vector, recent_mean
from memspec_core.request import LOOKUP, PLAIN, FinishReason
from memspec_core.residency.loader import FinishedLoad
from memspec_core.speculation.decoding import SURE_MATCH
from memspec_core.speculation.proposal import Draft, Proposal
from memspec_core.speculation.sampling import Sampler
from memspec_core.strategies.base import Context, Ranking, Strategy
from memspec_core.strategies.known_answer import SAME_TIME, slowed


class SimulatedClock:
    """Seconds that pass only where something takes them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        """Return the seconds that have passed."""
        return self.seconds


class SimulatedDraft:
    """A resident draft; `place`: up to where it has read the answer, the prompt being below 0."""

    kind = "simulated"

    def __init__(self, name: str, place: int) -> None:
        self.name = name
        self.place = place

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        """Never asked for: the trace knows what would be proposed."""
        self._refuse()

    def read(self, context: Sequence[int]) -> None:
        """Never asked for."""
        self._refuse()

    def known(self, context: Sequence[int]) -> int:
        """Never asked for."""
        self._refuse()

    def rollback(self, length: int) -> None:
        """Never asked for."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError("A simulated draft has no model.")


class SimulatedLoader:
    """Loads drafts one after another, each in the profile's time beside decoding.

    While one is waited for, time goes by as fast for loads as where nothing else runs. The `seed`
    is of how loads vary.
    """

    def __init__(
        self, profile: Profile, prompt_tokens: int, clock: SimulatedClock, seed: int = 0
    ) -> None:
        self._profile = profile
        self._prompt_tokens = prompt_tokens
        self._clock = clock
        self._random = random.Random(seed)
        self._under_way: deque[tuple[str, float]] = deque()

    @property
    def busy_seconds(self) -> float:
        """For how long the loads under way will last."""
        return self._under_way[-1][1] - self._clock.seconds if self._under_way else 0.0

    def start(self, name: str) -> None:
        """Begin to load a draft once those before it are loaded."""
        begins = self._clock.seconds + max(0.0, self.busy_seconds)
        usual = self._profile.of(name).background_load_seconds
        deviation = self._profile.load_deviation
        varied = math.exp(self._random.gauss(-deviation * deviation / 2, deviation))
        self._under_way.append((name, begins + usual * varied))

    def finished(self) -> list[FinishedLoad]:
        """Take over all loads that have ended by now."""
        landed = []
        while self._under_way and self._under_way[0][1] <= self._clock.seconds + SAME_TIME:
            landed.append(self._taken_over())
        return landed

    def wait(self, _give_up: Callable[[], bool] = lambda: False) -> FinishedLoad:
        """Let time pass until the next load has ended, for which a replay always waits."""
        left = max(0.0, self._under_way[0][1] - self._clock.seconds)
        waited = left / self._profile.load_stretch
        self._clock.seconds += waited
        self._under_way = deque((name, end - left + waited) for name, end in self._under_way)
        return self._taken_over()

    def _taken_over(self) -> FinishedLoad:
        name, _ = self._under_way.popleft()
        seconds = self._profile.of(name).background_load_seconds
        return FinishedLoad(name, seconds, SimulatedDraft(name, -self._prompt_tokens))


@dataclass(frozen=True)
class Replay:
    """What a generation is replayed from.

    `gains` [n, d]: tokens that an iteration with each of the drafts gains at each place of the
    first n tokens of the prompt's answer; `looked_up` [n]: with the lookup, None where it is off.
    """

    prompt: TracedPrompt
    gains: Gains
    columns: Mapping[str, int]
    profile: Profile
    looked_up: Gains | None = None


class ReplayedCourse:
    """A generation whose tokens come from a trace and whose time from a profile.

    A draft that runs first reads what it has not seen. A lookup goes before the draft where the
    runtime has it do so; its proposals cost nothing but their rows. The last iteration takes as
    long as any other, although it may need fewer proposals.
    """

    def __init__(self, replay: Replay, loader: SimulatedLoader, clock: SimulatedClock) -> None:
        self._prompt = replay.prompt
        self._profile = replay.profile
        self._of = {name: replay.profile.of(name) for name in replay.columns}
        self._gains: list[list[int]] = replay.gains.tolist()
        self._looked_up: list[int] | None = None
        if replay.looked_up is not None:
            self._looked_up = replay.looked_up.tolist()
        self._matched: list[int] = replay.prompt.matched.tolist()
        self._columns = replay.columns
        self._loader = loader
        self._clock = clock
        self._place = 0
        self._iterations = 0
        self._ids = replay.prompt.token_ids.tolist()

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The tokens of the prompt."""
        ids: Sequence[int] = self._prompt.prompt_ids  # type: ignore[assignment]
        return ids

    @property
    def generated_tokens(self) -> int:
        """How many tokens of the answer there are."""
        return self._place

    @property
    def remaining_tokens(self) -> int:
        """How many more there will be."""
        return len(self._gains) - self._place

    @property
    def prompt_state(self) -> Vector | None:
        """The mean of the target's states at the prompt's end, None if the trace has none."""
        found = self._prompt.prompt_state
        return None if found is None else found.astype(np.float32)

    def recent_ids(self, count: int) -> Sequence[int]:
        """Return the last `count` generated tokens, or all where there are fewer."""
        recent: list[int] = self._ids[max(0, self._place - count) : self._place]
        return recent

    def recent_state(self, count: int) -> Vector | None:
        """Return the mean of the target's last `count` states from the prompt's newest token on."""
        states = self._prompt.states
        return None if states is None else recent_mean(states, self._place, count)

    def read_prompt(self) -> None:
        """Have the target read the prompt."""
        self._clock.seconds += self._profile.prompt_seconds * len(self._prompt.prompt_ids)

    def catch_up(self, draft: Draft) -> None:
        """Have a draft read what it has not seen."""
        unseen = self.unseen_tokens(draft)
        self._clock.seconds += self._of[draft.name].catch_up_seconds * unseen
        _simulated(draft).place = self._place

    def unseen_tokens(self, draft: Draft) -> int:
        """Return how many tokens of the context a draft has not read."""
        return self._place - _simulated(draft).place

    def iterate(
        self, draft: Draft | None, wanted: str, length: int, seconds: IterationSeconds
    ) -> Iteration:
        """Gain what the trace says, in the time that the profile says."""
        started = self._clock.seconds
        name, gained = self._run(draft, length)
        committed = min(gained, self.remaining_tokens)
        self._place += committed
        if draft is not None and name == draft.name:
            _simulated(draft).place = self._place
        self._iterations += 1
        as_wanted = wanted == (PLAIN if draft is None else draft.name)
        return Iteration(
            sequence=self._iterations - 1,
            draft=name,
            wanted=name if as_wanted else wanted,
            proposed=0 if name == PLAIN else length,
            accepted=min(gained - 1, committed),
            committed=committed,
            token_ids=(),
            text="",
            generated_tokens=self._place,
            seconds=IterationSeconds(
                self._clock.seconds - started,
                seconds.prediction,
                seconds.load_wait,
                seconds.prompt,
            ),
            finish_reason=None if self.remaining_tokens else FinishReason.LENGTH,
        )

    def rest(self) -> Iteration:
        """Nothing is ever held back."""
        return Iteration(self._iterations, PLAIN, PLAIN, 0, 0, 0, (), "", self._place)

    def close(self) -> None:
        """There are no caches to put in order."""

    def _run(self, draft: Draft | None, length: int) -> tuple[str, int]:
        """Let the time of an iteration pass; return what proposed and the tokens that it gains."""
        if self._looked_up is not None and self._lookup_goes_first(draft):
            self._work(self._profile.verify_seconds[length])
            return LOOKUP, self._looked_up[self._place]
        if draft is None:
            self._work(self._profile.iteration_seconds(0))
            return PLAIN, 1
        profile = self._of[draft.name]
        work = profile.iteration_seconds(length)
        self._work(work + profile.catch_up_seconds * self.unseen_tokens(draft))
        return draft.name, self._gains[self._place][self._columns[draft.name]]

    def _lookup_goes_first(self, draft: Draft | None) -> bool:
        """Whether the lookup proposes, as the runtime has it where the length is fixed."""
        return self._matched[self._place] >= (1 if draft is None else SURE_MATCH)

    def _work(self, seconds: float) -> None:
        busy = max(0.0, self._loader.busy_seconds)
        self._clock.seconds += slowed(seconds, busy, self._profile.load_slowdown)


class SimulatedCosts:
    """What drafts cost, as the controller asks for it."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def iteration_seconds(self, draft: str, length: int) -> float:
        """Return what an iteration of `length` proposals takes."""
        return self._profile.of(draft).iteration_seconds(length)

    def catch_up_seconds(self, draft: str, tokens: int) -> float:
        """Return what reading tokens of the context takes."""
        return self._profile.of(draft).catch_up_seconds * tokens

    def lost_seconds(self, load_seconds: float) -> float:
        """Return how much of its time decoding loses beside a load."""
        return (1.0 - 1.0 / self._profile.load_slowdown) * load_seconds


class TimedStrategy:
    """A strategy whose rankings take a predictor's time."""

    def __init__(self, strategy: Strategy, seconds: float, clock: SimulatedClock) -> None:
        self.name = strategy.name
        self.insists = strategy.insists
        self.waits = strategy.waits
        self.prepares = strategy.prepares
        self.reads_states = strategy.reads_states
        self._strategy = strategy
        self._seconds = seconds
        self._clock = clock

    def rank(self, context: Context) -> Ranking:
        """Rank, and let the time pass."""
        self._clock.seconds += self._seconds
        return self._strategy.rank(context)

    def observe(self, iteration: Iteration) -> None:
        """See what an iteration did."""
        self._strategy.observe(iteration)


def _simulated(draft: Draft) -> SimulatedDraft:
    assert isinstance(draft, SimulatedDraft)
    return draft
