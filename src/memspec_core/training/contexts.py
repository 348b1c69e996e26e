"""The contexts of traced answers, as each encoder gives them."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from memspec_core.errors import TraceError
from memspec_core.measurement.trace import TracedPrompt
from memspec_core.prediction.context import POSITIONS, Vector, context_vector, recent_mean
from memspec_core.prediction.head import HIDDEN_STATES, MINILM

ENCODERS = (HIDDEN_STATES, MINILM)
RECENT_TOKENS = 64
"""T of a text encoder."""


class Encoder(Protocol):
    """Encodes a traced answer's prompt and what is recent at a place, each into `size` numbers.

    `positions`: states or tokens that count as recent; `prompt_positions`: those of the prompt.
    """

    name: str
    size: int
    positions: int
    prompt_positions: int

    def prompt(self, traced: TracedPrompt) -> Vector:
        """Encode the prompt [size]."""
        ...

    def recent(self, traced: TracedPrompt, place: int) -> Vector | None:
        """Encode what is recent [size]; None where nothing is."""
        ...


def context_at(encoder: Encoder, traced: TracedPrompt, place: int) -> tuple[Vector, Vector | None]:
    """Return what is known of the prompt, and what is recent at a place of a traced answer."""
    return encoder.prompt(traced), encoder.recent(traced, place)


def vector_at(encoder: Encoder, traced: TracedPrompt, form: str, place: int) -> Vector:
    """Return a predictor's input at a place of a traced answer."""
    return context_vector(form, *context_at(encoder, traced, place))


class StateEncoder:
    """Means of the target's own states, from the trace."""

    name = HIDDEN_STATES
    prompt_positions = POSITIONS

    def __init__(self, prompts: Sequence[TracedPrompt], positions: int = POSITIONS) -> None:
        """Raise `TraceError` unless the prompts have usable states."""
        for traced in prompts:
            if traced.states is None or traced.prompt_state is None:
                raise TraceError(
                    "The trace was made without the target's states; trace with --states."
                )
            if not np.isfinite(traced.states).all() or not np.isfinite(traced.prompt_state).all():
                raise TraceError(
                    f"The trace holds states of the domain '{traced.domain}' that are not finite; "
                    "trace again."
                )
        assert prompts[0].prompt_state is not None
        self.size = len(prompts[0].prompt_state)
        self.positions = positions

    def prompt(self, traced: TracedPrompt) -> Vector:
        """Return the mean at the prompt's end."""
        assert traced.prompt_state is not None
        return traced.prompt_state.astype(np.float32)

    def recent(self, traced: TracedPrompt, place: int) -> Vector | None:
        """Return the mean of the last states before a place."""
        assert traced.states is not None
        return recent_mean(traced.states, place, self.positions)


class TextEncoder:
    """A sentence encoder over the text; what was encoded is kept, since it takes long."""

    name = MINILM
    prompt_positions = 0

    def __init__(
        self,
        encode: Callable[[str], Vector],
        size: int,
        decode: Callable[[list[int]], str],
        positions: int = RECENT_TOKENS,
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._kept: dict[bytes, Vector] = {}
        self.size = size
        self.positions = positions

    def prompt(self, traced: TracedPrompt) -> Vector:
        """Encode the prompt's text."""
        return self._encoded(traced.prompt_ids)

    def recent(self, traced: TracedPrompt, place: int) -> Vector | None:
        """Encode the text of the last tokens before a place."""
        if not place:
            return None
        return self._encoded(traced.token_ids[max(0, place - self.positions) : place])

    def _encoded(self, token_ids: npt.NDArray[np.int32]) -> Vector:
        key = token_ids.tobytes()
        if key not in self._kept:
            self._kept[key] = self._encode(self._decode(token_ids.tolist()))
        return self._kept[key]
