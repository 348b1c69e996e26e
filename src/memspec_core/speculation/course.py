"""What the controller needs of one generation: a real one, or one that a simulator replays."""

from collections.abc import Callable, Sequence
from typing import Protocol

from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.prediction.context import Vector
from memspec_core.request import FinishReason, GenerationRequest
from memspec_core.speculation.proposal import Draft

Interruption = Callable[[], FinishReason | None]
"""Asked between passes; a reason that it gives ends the generation with what there is."""


class Course(Protocol):
    """One generation, iteration by iteration; `speculation.decoding.Decoding` says more."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The tokens of the prompt."""
        ...

    @property
    def generated_tokens(self) -> int:
        """How many tokens of the answer are verified."""
        ...

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens the length limit allows."""
        ...

    @property
    def prompt_state(self) -> Vector | None:
        """The mean of the target's states at the prompt's end, None if it keeps none."""
        ...

    def recent_ids(self, count: int) -> Sequence[int]:
        """Return the last `count` generated tokens, or all where there are fewer."""
        ...

    def recent_state(self, count: int) -> Vector | None:
        """Return the mean of the target's last `count` states from the prompt's newest token on."""
        ...

    def read_prompt(self) -> None:
        """Have the target read the prompt."""
        ...

    def catch_up(self, draft: Draft) -> None:
        """Have a draft read what it has not seen of the context, if it pays."""
        ...

    def unseen_tokens(self, draft: Draft) -> int:
        """Return how many tokens of the context a draft has not read."""
        ...

    def iterate(
        self, draft: Draft | None, wanted: str, length: int, seconds: IterationSeconds
    ) -> Iteration:
        """Run one iteration with a draft where `wanted` was wanted."""
        ...

    def rest(self) -> Iteration:
        """Hand out what is held back, for an answer that a fault ends."""
        ...

    def close(self) -> None:
        """Leave every cache with rows of the context only."""
        ...


Begin = Callable[[GenerationRequest, Sequence[int], Interruption], Course]
"""Begins the generation of a request with the given prompt."""
