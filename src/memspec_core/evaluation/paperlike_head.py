"""The predictor of generated traces: trained as any other, on answers that are not simulated.

It reads the mean state of the last `RECENT` tokens and the prompt's, and is labelled as in the
paper, with the draft that gains most next. The noise of the states (`PaperLike`) is such that its
recall is about that of the paper's Table 2.
"""

from dataclasses import replace

from memspec_core.evaluation.paperlike import DRAFTS, PaperLike, paper_like_trace
from memspec_core.evaluation.scheduling import Schedule
from memspec_core.prediction.context import BOTH
from memspec_core.prediction.head import HIDDEN_STATES, PredictorPlan, RankingHead
from memspec_core.training.contexts import StateEncoder
from memspec_core.training.predictor import UTILITY, examples, fit

RECENT = 12
TRAINING_PROMPTS = 40
"""Of each domain."""

PENALTY = 1e-3
"""On squared weights: there are ten inputs and thousands of examples."""


def paper_like_head(
    like: PaperLike, interval: int = 4, length: int = 4, inputs: str = BOTH
) -> RankingHead:
    """Train the predictor for traces of a plan, on answers of another seed.

    `inputs`: what it reads, one of `context.FORMS`.
    """
    training = replace(like, prompts=TRAINING_PROMPTS, seed=like.seed + 1_000_003)
    prompts = paper_like_trace(training).prompts
    schedule = Schedule(DRAFTS, tuple(range(len(DRAFTS))), length, interval)
    encoder = StateEncoder(prompts, RECENT)
    record = PredictorPlan(
        drafts=DRAFTS,
        inputs=inputs,
        encoder=HIDDEN_STATES,
        hidden_size=encoder.size,
        positions=RECENT,
        prompt_positions=encoder.prompt_positions,
        interval=interval,
        target_sha256="",
        card={},
    )
    return fit(examples(prompts, schedule, encoder, inputs, UTILITY), record, PENALTY)
