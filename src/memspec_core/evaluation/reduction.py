"""Reduced traces: a predictor's numbers in the place of the target's states.

A predictor reads a mean of states and applies one linear map; what follows needs only the few
numbers that this gives. So a trace is reduced by computing them at each place, and its predictor
becomes one that takes the newest of them as they are: the identity. They are what the whole trace
and the whole predictor give, bit for bit, as long as T (`recent_tokens`) is not below the
`positions` that the predictor was trained for.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memspec_core.errors import PredictorError, TraceError
from memspec_core.measurement.trace import (
    Trace,
    TracedPrompt,
    claim_trace,
    part_file,
    read_trace,
    write_part,
)
from memspec_core.models.places import PREDICTOR
from memspec_core.prediction.context import RECENT
from memspec_core.prediction.head import HIDDEN_STATES, RankingHead, load_head, save_head
from memspec_core.prediction.predictor import Predictor
from memspec_core.training.contexts import Encoder, StateEncoder, context_at

Numbers = npt.NDArray[np.float32]


def reduce_trace(trace: Trace, head: RankingHead) -> tuple[Trace, RankingHead]:
    """Return a trace with a predictor's numbers for states, and the predictor that takes them.

    Raises `TraceError` if the trace has no states, and `PredictorError` for a predictor that
    reads something else.
    """
    if trace.header.reduced:
        raise TraceError("The trace is reduced already.")
    if head.plan.encoder != HIDDEN_STATES:
        raise PredictorError(
            f"The predictor reads {head.plan.encoder}; only one that reads the target's states can "
            "reduce a trace."
        )
    encoder = StateEncoder(trace.prompts, head.plan.positions)
    prompts = [_reduced(prompt, head, encoder) for prompt in trace.prompts]
    header = replace(trace.header, states=False, reduced=True)
    return Trace(header, prompts), _identity(head)


def write_reduced(trace: Trace, head: RankingHead, folder: Path) -> None:
    """Write what `reduce_trace` returns into a folder; one of another trace is refused."""
    claim_trace(folder, trace.header)
    write_part(part_file(folder, 0), trace.prompts, reduced=True)
    save_head(head, folder / PREDICTOR)


def read_trace_and_head(
    folder: Path, predictor: Path | None, target_sha256: str = ""
) -> tuple[Trace, RankingHead | None]:
    """Read a trace with the predictor that ranks on it: its own where it is reduced.

    Raises `TraceError`, also for a predictor that is given to a reduced trace.
    """
    trace = read_trace(folder, target_sha256)
    if trace.header.reduced and predictor is not None:
        raise TraceError(
            f"The trace in {folder} is reduced, which means that it holds the numbers of its own "
            "predictor; leave --predictor out, or give the whole trace."
        )
    place = folder / PREDICTOR if trace.header.reduced else predictor
    return trace, None if place is None else load_head(place, trace.header.target_sha256)


def _reduced(prompt: TracedPrompt, head: RankingHead, encoder: Encoder) -> TracedPrompt:
    count = len(prompt.token_ids)
    predictor = Predictor(head, observation=False, length=1)
    rows = [predictor.logits(*context_at(encoder, prompt, place)) for place in range(count + 1)]
    numbers: Numbers = np.stack(rows)
    return replace(
        prompt,
        prompt_ids=np.zeros_like(prompt.prompt_ids),
        states=numbers[1:],
        prompt_state=numbers[0],
        kept_hash=prompt.prompt_hash,
    )


def _identity(head: RankingHead) -> RankingHead:
    """Return a head that gives what it reads; its card says what the numbers were made from."""
    count = len(head.plan.drafts)
    card = {"inputs": head.plan.inputs}
    plan = replace(
        head.plan, inputs=RECENT, hidden_size=count, positions=1, prompt_positions=1, card=card
    )
    eye = np.eye(count, dtype=np.float32)
    return RankingHead(plan, eye, np.zeros(count, np.float32), head.acceptance)


def renamed(head: RankingHead, drafts: Sequence[str]) -> RankingHead:
    """Return a head that ranks drafts of other names in the place of its own."""
    return replace(head, plan=replace(head.plan, drafts=tuple(drafts)))
