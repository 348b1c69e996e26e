"""Training the ranking head on a decoding trace.

One example a scheduling point of an answer that follows the best draft of each interval: the
context there, and as its label either the draft of the prompt's domain or the draft of highest
utility over the coming interval; where several are tied, each gets an equal part of the label.
The head is multinomial logistic regression with an L2 penalty, whose optimum is unique, so that
the seed matters only for which prompts are held out. No prompt is on both sides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from memspec_core.errors import TraceError
from memspec_core.evaluation.ranking import ALWAYS, PLAIN_ROWS, PredictorRanker, figures
from memspec_core.evaluation.scheduling import RankerFor, Schedule, domain_mask, points
from memspec_core.measurement.trace import Trace, TracedPrompt, read_trace
from memspec_core.models.checkpoint import Checkpoint, open_checkpoint
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.prediction.context import BOTH, FORMS
from memspec_core.prediction.head import HIDDEN_STATES, PredictorPlan, RankingHead, save_head
from memspec_core.prediction.predictor import Predictor
from memspec_core.request import LOOKUP
from memspec_core.training.contexts import (
    Encoder,
    StateEncoder,
    TextEncoder,
    context_at,
    vector_at,
)

DOMAIN = "domain"
UTILITY = "utility"
LABELS = (DOMAIN, UTILITY)

HELD_OUT = "held-out prompts"
OBSERVED = ", observed"

_STEPS = 300
_SMALLEST_SCALE = 1e-4


@dataclass(frozen=True)
class PredictorTraining:
    """What to train.

    `drafts`: those to rank, all of the trace but the lookup if empty; `interval`, `length`: see
    `Schedule`; `held_out`: share of each domain's prompts; `evaluations`: further traces that the
    predictor is judged on.
    """

    trace: Path
    folder: Path
    target: str = "default"
    inputs: str = BOTH
    encoder: str = HIDDEN_STATES
    labels: str = DOMAIN
    drafts: tuple[str, ...] = ()
    interval: int = 4
    length: int = 3
    held_out: float = 0.2
    penalty: float = 1.0
    seed: int = 0
    evaluations: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Examples:
    """Contexts [m, inputs] with labels [m, d] that sum to 1 each.

    `right` [m, d]: the share of places up to the next scheduling point at which a draft's first
    proposal is right.
    """

    contexts: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float64]
    right: npt.NDArray[np.float64]


def train_predictor(
    plan: PredictorTraining, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Train, judge and write a predictor; return the figures.

    Every form of input with both labels is trained, so that they can be compared; the one that
    was asked for is written. Raises `TraceError`, `CheckpointError` or `PredictorError`.
    """
    target = open_checkpoint(plan.target)
    trace = _whole_trace(plan.trace, target.sha256())
    schedule = schedule_of(trace, plan)
    training, held_out = split_by_prompt(trace.prompts, plan.held_out, plan.seed)
    sets: dict[str, Sequence[TracedPrompt]] = {HELD_OUT: held_out}
    sets |= {_name_of(path, plan): _further(path, trace) for path in plan.evaluations}
    encoder = _encoder(plan, target, [*training, *(p for each in sets.values() for p in each)])

    heads: dict[str, RankingHead] = {}
    for form in FORMS:
        for labels in LABELS:
            found = examples(training, schedule, encoder, form, labels)
            record = _record(plan, trace, schedule, encoder, form)
            heads[_name(form, labels)] = fit(found, record, plan.penalty)
            progress("train", len(heads), len(FORMS) * len(LABELS))
    chosen = _name(plan.inputs, plan.labels)
    judged = _judged(heads, chosen, sets, schedule, encoder, progress)
    report = {"chosen": chosen, "training_prompts": len(training), "sets": judged}
    save_head(_with_card(heads[chosen], plan, trace, report), plan.folder)
    return report


def schedule_of(trace: Trace, plan: PredictorTraining) -> Schedule:
    """Return what is ranked; raises `TraceError` for drafts or a length that was not traced."""
    drafts = plan.drafts or tuple(name for name in trace.drafts if name != LOOKUP)
    unknown = [name for name in drafts if name not in trace.drafts]
    if unknown or len(drafts) < 2:
        raise TraceError(
            f"To rank takes two drafts of the trace {plan.trace}, which has "
            f"{', '.join(trace.drafts)}; asked for: {', '.join(drafts) or 'none'}."
        )
    if plan.length > trace.header.length:
        raise TraceError(
            f"The trace {plan.trace} tells {trace.header.length} proposals a place, not "
            f"{plan.length}."
        )
    columns = tuple(trace.drafts.index(name) for name in drafts)
    return Schedule(drafts, columns, plan.length, plan.interval)


def split_by_prompt(
    prompts: Sequence[TracedPrompt], held_out: float, seed: int
) -> tuple[list[TracedPrompt], list[TracedPrompt]]:
    """Return the prompts to train on and those held out, of each domain the same share."""
    random = np.random.default_rng(seed)
    kept: list[TracedPrompt] = []
    held: list[TracedPrompt] = []
    for domain in dict.fromkeys(prompt.domain for prompt in prompts):
        own = [prompt for prompt in prompts if prompt.domain == domain]
        if len(own) < 2:
            raise TraceError(f"The domain '{domain}' has one prompt only; two are needed.")
        count = min(max(1, round(held_out * len(own))), len(own) - 1)
        order = random.permutation(len(own))
        held += [own[index] for index in sorted(order[:count])]
        kept += [own[index] for index in sorted(order[count:])]
    return kept, held


def examples(
    prompts: Sequence[TracedPrompt], schedule: Schedule, encoder: Encoder, form: str, labels: str
) -> Examples:
    """Return the examples of prompts at their scheduling points."""
    contexts, targets, right = [], [], []
    for prompt in prompts:
        domain = domain_mask(prompt.domain, schedule.drafts)
        for point in points(prompt, schedule):
            mask = domain if labels == DOMAIN else point.best
            span = prompt.accepted[point.place : point.next_place, schedule.columns]
            contexts.append(vector_at(encoder, prompt, form, point.place))
            targets.append(mask / mask.sum())
            right.append((span > 0).mean(axis=0))
    return Examples(np.stack(contexts), np.stack(targets), np.stack(right))


def fit(found: Examples, record: PredictorPlan, penalty: float) -> RankingHead:
    """Fit a head by LBFGS in fp64 from zeros.

    Loss: mean cross-entropy plus `penalty` / 2 times the sum of squared weights, of inputs scaled
    to mean 0 and deviation 1.
    """
    contexts = torch.from_numpy(found.contexts.astype(np.float64))
    labels = torch.from_numpy(found.labels)
    mean = contexts.mean(dim=0)
    scale = contexts.std(dim=0, correction=0).clamp_min(_SMALLEST_SCALE)
    scaled = (contexts - mean) / scale
    weight = torch.zeros(labels.shape[1], contexts.shape[1], dtype=torch.float64)
    bias = torch.zeros(labels.shape[1], dtype=torch.float64)
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimiser = torch.optim.LBFGS(parameters, max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(scaled @ weight.T + bias, labels)
        value = value + penalty / 2 * weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    folded = weight.detach() / scale
    return RankingHead(
        record,
        folded.float().numpy(),
        (bias.detach() - folded @ mean).float().numpy(),
        _acceptance(found),
    )


def _acceptance(found: Examples) -> npt.NDArray[np.float32]:
    """Return each draft's acceptance [d] where draft k was the label, as rows k.

    A label that never was has the mean of all.
    """
    weights = found.labels.sum(axis=0)[:, None]
    sums = found.labels.T @ found.right
    overall = np.broadcast_to(found.right.mean(axis=0), sums.shape)
    means = np.divide(sums, weights, out=overall.copy(), where=weights > 0)
    return np.asarray(means, dtype=np.float32)


def _whole_trace(path: Path, target_sha256: str) -> Trace:
    trace = read_trace(path, target_sha256)
    if trace.header.reduced:
        raise TraceError(
            f"The trace in {path} is reduced: it holds a predictor's numbers instead of the "
            "target's states. Train on the trace that it was made from."
        )
    return trace


def _name_of(path: Path, plan: PredictorTraining) -> str:
    """Return a folder's name, or all of its path where two bear the same name."""
    same = [other for other in plan.evaluations if other.name == path.name]
    return path.name if len(same) == 1 else str(path)


def _further(path: Path, trace: Trace) -> Sequence[TracedPrompt]:
    """Read another trace of the same target and drafts."""
    other = _whole_trace(path, trace.header.target_sha256)
    if other.header.drafts != trace.header.drafts or other.header.length != trace.header.length:
        raise TraceError(
            f"The trace in {path} is of other drafts, or of another number of proposals, than the "
            "one that is trained on; trace both with the same configuration."
        )
    return other.prompts


def _encoder(
    plan: PredictorTraining, target: Checkpoint, prompts: Sequence[TracedPrompt]
) -> Encoder:
    if plan.encoder == HIDDEN_STATES:
        return StateEncoder(prompts)
    from memspec_core.prediction.minilm import SentenceEncoder

    sentences = SentenceEncoder()
    return TextEncoder(sentences.encode, sentences.size, Tokenizer.of(target).decode)


def _name(form: str, labels: str) -> str:
    return f"{form}, {labels}"


def _ranker(
    head: RankingHead, schedule: Schedule, encoder: Encoder, *, observation: bool = False
) -> RankerFor:
    def make(prompt: TracedPrompt) -> PredictorRanker:
        predictor = Predictor(head, observation=observation, length=schedule.length)
        return PredictorRanker(
            predictor,
            schedule.drafts,
            lambda place: context_at(encoder, prompt, place),
        )

    return make


def _judged(
    heads: Mapping[str, RankingHead],
    chosen: str,
    sets: Mapping[str, Sequence[TracedPrompt]],
    schedule: Schedule,
    encoder: Encoder,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Return the figures of all heads, and of the chosen one with observation, by set."""
    rankers = {name: _ranker(head, schedule, encoder) for name, head in heads.items()}
    rankers[chosen + OBSERVED] = _ranker(heads[chosen], schedule, encoder, observation=True)
    judged = {}
    for name, prompts in sets.items():
        judged[name] = figures(prompts, schedule, rankers)
        progress("judge", len(judged), len(sets))
    return judged


def _record(
    plan: PredictorTraining, trace: Trace, schedule: Schedule, encoder: Encoder, form: str
) -> PredictorPlan:
    return PredictorPlan(
        drafts=schedule.drafts,
        inputs=form,
        encoder=encoder.name,
        hidden_size=encoder.size,
        positions=encoder.positions,
        prompt_positions=encoder.prompt_positions,
        interval=plan.interval,
        target_sha256=trace.header.target_sha256,
        card={},
    )


def _with_card(
    head: RankingHead, plan: PredictorTraining, trace: Trace, report: Mapping[str, Any]
) -> RankingHead:
    """Return the head with what it was made from, and how it did beside plain choices."""
    rows = {
        name: {row: judged["rows"][row] for row in (report["chosen"], *_beside(judged["rows"]))}
        for name, judged in report["sets"].items()
    }
    card = {
        "labels": plan.labels,
        "length": plan.length,
        "penalty": plan.penalty,
        "seed": plan.seed,
        "training_prompts": report["training_prompts"],
        "prompts_sha256": trace.header.prompts_sha256,
        "draft_sha256": {name: trace.header.drafts[name] for name in head.plan.drafts},
        "figures": rows,
    }
    return replace(head, plan=replace(head.plan, card=card))


def _beside(rows: Mapping[str, Any]) -> list[str]:
    """Return the names of the rows that no predictor made."""
    return [name for name in rows if name in PLAIN_ROWS or name.startswith(ALWAYS)]
