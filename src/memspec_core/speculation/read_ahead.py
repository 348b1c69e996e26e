"""Having a draft read the context off the critical path, before it is handed over."""

import torch

from memspec_core.models.pieces import Pace
from memspec_core.models.target import Target
from memspec_core.speculation.proposal import Draft

PIECE_TOKENS = 64


@torch.inference_mode()
def read_ahead(draft: Draft, target: Target, pace: Pace) -> None:
    """Have a draft read what a target has settled of the context that it decodes meanwhile.

    For the thread that owns the draft, beside the one that decodes. Nothing is read before the
    first iteration, when decoding waits for the draft and reads faster itself. Whatever `pace`
    raises ends it.
    """
    settled = target.cache.settled
    if settled is None:
        return
    context, count = settled
    with target.backend.lending():
        for end in range(PIECE_TOKENS, count + PIECE_TOKENS, PIECE_TOKENS):
            draft.read(context[: min(end, count) + 1])
            pace(0)
            now = target.cache.settled
            if now is None or now[0] is not context:  # another one is written over it
                draft.rollback(0)
                return
