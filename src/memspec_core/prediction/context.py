"""What a predictor reads at a scheduling point: means of the target's own last hidden states.

The states are the target's last ones, normed as its head reads them. Where feature drafts are
used they lie at hand: the last `hidden` columns of `KeyValueCache.features` are these states in
fp16, one row a position. A trace holds them as `states`.

The newest token of a context has not been fed to the target when a draft is chosen, so it has no
state yet; in the words of a trace, at place t the rows before t are known. So at place 0, where
only a prompt has been read, nothing is recent.
"""

import numpy as np
import numpy.typing as npt

POSITIONS = 16
"""States that a mean is taken over: enough to see a topic, few enough to see it change."""

PROMPT = "prompt"
RECENT = "recent"
BOTH = "both"
FORMS = (PROMPT, RECENT, BOTH)
"""What goes into a context, as in the paper's Table 2."""

Vector = npt.NDArray[np.float32]
"""[inputs]"""

States = npt.NDArray[np.float16] | npt.NDArray[np.float32]
"""Hidden states of the target, normed as its head reads them."""


def prompt_mean(known: States) -> npt.NDArray[np.float16]:
    """Return the mean at a prompt's end [hidden] of the states [tokens - 1, hidden] of its tokens.

    Over the last `POSITIONS`; the newest token has no state yet. So a prompt of one token has none
    at all: zeros.
    """
    if not len(known):
        return np.zeros(known.shape[1], np.float16)
    return last_mean(known, POSITIONS).astype(np.float16)


def last_mean(states: States, positions: int) -> Vector:
    """Return the mean of the last `positions` rows, or of all where there are fewer, in fp32."""
    mean: Vector = states[-positions:].mean(axis=0, dtype=np.float32)
    return mean


def recent_mean(states: States, place: int, positions: int) -> Vector | None:
    """Return the mean of what is recent at a place of an answer with the states [n, hidden]."""
    return last_mean(states[:place], positions) if place else None


def context_vector(form: str, prompt: Vector, recent: Vector | None) -> Vector:
    """Return a predictor's input [hidden, or twice that for both].

    Where nothing is recent, what is known of the prompt stands for it.
    """
    recent = prompt if recent is None else recent
    if form == BOTH:
        return np.concatenate((prompt, recent)).astype(np.float32, copy=False)
    return (prompt if form == PROMPT else recent).astype(np.float32, copy=False)
