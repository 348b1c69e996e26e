"""Whether the simulator is right: the same prompts and strategies, really run and simulated.

The profile is measured by the runs on every other prompt, and the others are compared, so that
nothing is compared that it was made of. Where prompts are repeated, those that measured are
compared the next time and the other way round: so both halves have the same prompts, in turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from memspec_core.errors import SettingsError, TraceError
from memspec_core.evaluation.comparison import (
    ComparisonPlan,
    Progress,
    Round,
    StrategyRun,
    compare,
)
from memspec_core.evaluation.comparison_report import figures_of
from memspec_core.evaluation.measured import MachineObserver
from memspec_core.evaluation.profiles import Profile
from memspec_core.evaluation.simulator import SimulationPlan, simulate
from memspec_core.evaluation.tables import aligned
from memspec_core.measurement.trace import Trace, hash_of_prompt, read_trace
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.prediction.head import RankingHead, load_head, predictor_folder
from memspec_core.request import GenerationRequest
from memspec_core.settings import Settings
from memspec_core.strategies import PREDICTING

SPEED_TOLERANCE = 0.10
"""Tokens a second, simulated over real, are to differ by no more than this."""

FALLBACK_TOLERANCE = 0.03
"""The shares of fallback, by no more than this."""


@dataclass(frozen=True)
class Agreement:
    """One strategy, really run and simulated on the same prompts."""

    strategy: str
    answers: int
    real_tokens_per_second: float
    simulated_tokens_per_second: float
    real_fallback: float
    simulated_fallback: float

    @property
    def speed_error(self) -> float:
        """Simulated over real speed, less 1."""
        return self.simulated_tokens_per_second / self.real_tokens_per_second - 1.0

    @property
    def fallback_error(self) -> float:
        """Simulated less real share of fallback."""
        return self.simulated_fallback - self.real_fallback

    @property
    def holds(self) -> bool:
        """Whether both are within what they may differ by."""
        fallback = abs(self.fallback_error) <= FALLBACK_TOLERANCE
        return fallback and abs(self.speed_error) <= SPEED_TOLERANCE


@dataclass(frozen=True)
class Validation:
    """All strategies, with the profile that was measured, and all real runs."""

    profile: Profile
    sources: Mapping[str, str]
    agreements: tuple[Agreement, ...]
    runs: tuple[StrategyRun, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "profile": asdict(self.profile),
            "agreements": [
                {
                    **asdict(one),
                    "speed_error": one.speed_error,
                    "fallback_error": one.fallback_error,
                    "holds": one.holds,
                }
                for one in self.agreements
            ],
        }


def validate(plan: ComparisonPlan, progress: Progress) -> Validation:
    """Run and simulate; raises what `compare` and `simulate` do.

    The plan has a trace of the prompts, and its settings a fixed draft length.
    """
    settings = plan.settings()
    if plan.trace is None:
        raise SettingsError("A validation needs a trace of the prompts (memspec trace).")
    checkpoint = open_checkpoint(settings.target_path)
    trace = read_trace(plan.trace, checkpoint.sha256())
    trace = _traced(trace, plan, Tokenizer.of(checkpoint))
    head = _head(settings, plan, trace)
    observer = MachineObserver(settings, lambda answer: not _is_compared(answer.run))
    runs = compare(plan, progress, observer)
    profile = observer.profile("measured")
    simulation = SimulationPlan(
        profile=profile,
        strategies=plan.strategies,
        parameters={**_usable(plan.parameters), "lookup": settings.lookup},
        head=head,
        max_new_tokens=plan.max_new_tokens,
        drafts=settings.draft_names,
    )
    simulated = simulate(trace, simulation)
    real = [run for run in runs if _is_compared(run)]
    return Validation(profile, observer.sources(), tuple(_agreements(real, simulated)), tuple(runs))


def table(validation: Validation) -> str:
    """Return strategies with what was run beside what was simulated."""
    heads = ["", "real", "simulated", "difference", "fallback", "simulated", "difference", ""]
    return "\n".join(aligned([heads, *map(_row, validation.agreements)]))


def _row(one: Agreement) -> list[str]:
    return [
        one.strategy,
        f"{one.real_tokens_per_second:.1f} tokens/s",
        f"{one.simulated_tokens_per_second:.1f}",
        f"{100 * one.speed_error:+.1f} %",
        f"{100 * one.real_fallback:.1f} %",
        f"{100 * one.simulated_fallback:.1f} %",
        f"{100 * one.fallback_error:+.1f}",
        "holds" if one.holds else "does not hold",
    ]


def _is_compared(one: StrategyRun | Round) -> bool:
    return bool(one.prompt_set) and (one.prompt + one.repeat) % 2 == 1


def _agreements(
    real: Sequence[StrategyRun], simulated: Sequence[StrategyRun]
) -> Iterator[Agreement]:
    for strategy in dict.fromkeys(run.strategy for run in simulated):
        ran, figured = (
            figures_of([run for run in runs if run.strategy == strategy])
            for runs in (real, simulated)
        )
        yield Agreement(
            strategy,
            ran["answers"],
            ran["tokens_per_second"],
            figured["tokens_per_second"],
            ran["fallback"],
            figured["fallback"],
        )


def _usable(parameters: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters without those of drafts, which the trace names."""
    return {name: value for name, value in parameters.items() if not name.startswith("drafts.")}


def _traced(trace: Trace, plan: ComparisonPlan, tokenizer: Tokenizer) -> Trace:
    """Return the trace of the prompts that are compared; raises `TraceError` if one is missing."""
    known = {prompt.prompt_hash: prompt for prompt in trace.prompts}
    asked = [
        hash_of_prompt(tokenizer.prompt_ids(GenerationRequest(prompt=one.text).validated(())))
        for one in plan.rounds()
        if _is_compared(one)
    ]
    if not asked:
        raise SettingsError(
            "A validation needs two prompts of a file at the least, or two repeats."
        )
    missing = sum(prompt not in known for prompt in asked)
    if missing:
        raise TraceError(
            f"The trace in {plan.trace} lacks {missing} of {len(asked)} prompts; make it with them."
        )
    return replace(trace, prompts=[known[prompt] for prompt in asked])


def _head(settings: Settings, plan: ComparisonPlan, trace: Trace) -> RankingHead | None:
    """Return the predictor of the strategies that have one, None where none of them runs."""
    if not set(PREDICTING) & set(plan.strategies):
        return None
    if not trace.header.states:
        raise TraceError(
            f"The trace in {plan.trace} has no states for the predictor; make it with --states."
        )
    return load_head(predictor_folder(settings.predictor_path), trace.header.target_sha256)
