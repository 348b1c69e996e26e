"""What a reproduction is made from, read and checked before anything is written."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from memspec_core.errors import SettingsError, TraceError
from memspec_core.evaluation.comparison import PAPER_FORM
from memspec_core.evaluation.installed import Models, installed_models
from memspec_core.evaluation.paperlike import PaperLike
from memspec_core.evaluation.profiles import Profile, load_profile
from memspec_core.evaluation.reduction import read_trace_and_head, renamed
from memspec_core.evaluation.reproduction.real import Report, read_reports
from memspec_core.measurement.trace import Trace
from memspec_core.prediction.head import RankingHead
from memspec_core.request import LOOKUP
from memspec_core.settings import Settings
from memspec_core.training.predictor import HELD_OUT
from memspec_core.training.prompts import PromptSet, read_prompt_sets

GENERAL, GENERAL_ONLY = "general", "general_only"
"""The general draft, and what takes its place where it is traced: one of general text alone."""

PAPER_LIKE_TOKENS = 256

_INPUTS_COMPARED = ("prompt", "recent", "both")


@dataclass(frozen=True)
class ReproductionPlan:
    """What to reproduce from, and where.

    `trace`: of the installed drafts, with `predictor` unless it is reduced. `parameters`: the
    node's, which name target and drafts. `prompts` of each domain, also of the generated traces;
    `length`: proposals an iteration in simulations. `reports`: files of `memspec compare --json`;
    or `real_prompts`: prompt files to run afresh, `real_count` prompts of each. `rankings`: what
    `memspec train-predictor --json` printed.
    """

    folder: Path
    trace: Path
    predictor: Path | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    profile: str = "orin_nano"
    prompts: int = 100
    length: int = 4
    reports: tuple[Path, ...] = ()
    real_prompts: tuple[Path, ...] = ()
    real_count: int = 12
    rankings: Path | None = None
    jobs: int = 1
    force: bool = False

    @property
    def paper_like(self) -> PaperLike:
        """How the generated traces are made."""
        return PaperLike(prompts=self.prompts, tokens=PAPER_LIKE_TOKENS)


@dataclass(frozen=True)
class Sources:
    """What was read for a plan.

    `trace`: the candidate drafts only, the general one first, and `head`, which ranks them;
    `all_drafts`: the same prompts with every draft that was traced, and `trained_head` with the
    drafts that it was trained for. `inputs` tell runs apart.
    """

    trace: Trace
    all_drafts: Trace
    head: RankingHead
    trained_head: RankingHead
    profile: Profile
    parameters: Mapping[str, object]
    reports: tuple[Report, ...]
    prompt_sets: tuple[PromptSet, ...]
    rankings: Mapping[str, Any] | None
    inputs: Mapping[str, Any]


def read_sources(plan: ReproductionPlan) -> Sources:
    """Read all that a plan names; raises `MemSpecError` for what cannot be used."""
    if plan.reports and plan.real_prompts:
        raise SettingsError("Either real runs are read or they are made anew; give one of both.")
    if min(plan.prompts, plan.real_count) < 2:
        raise SettingsError("Intervals are over prompts: two of each domain at the least.")
    whole, head = read_trace_and_head(plan.trace, plan.predictor)
    if head is None:
        raise TraceError(
            f"The trace in {plan.trace} is not reduced, so that a predictor must be given "
            "(--predictor)."
        )
    if plan.length > whole.header.length:
        raise TraceError(
            f"The trace in {plan.trace} has {whole.header.length} proposals at each place; "
            f"{plan.length} are asked for. Trace with a larger length."
        )
    names = candidates(whole, head)
    parameters = {**plan.parameters, "drafts.names": list(names)}
    traced = Models(
        whole.header.target_sha256,
        {name: whole.header.drafts[name] for name in whole.drafts if name != LOOKUP},
    )
    models = _installed(parameters, traced)
    models.require(traced, f"The trace in {plan.trace}")
    all_drafts = whole.first(plan.prompts)
    return Sources(
        trace=all_drafts.only(names),
        all_drafts=all_drafts,
        head=renamed(head, [candidate(name, names) for name in head.plan.drafts]),
        trained_head=head,
        profile=load_profile(plan.profile),
        parameters=parameters,
        reports=tuple(read_reports(plan.reports, models)),
        prompt_sets=read_prompt_sets(plan.real_prompts, plan.real_count)
        if plan.real_prompts
        else (),
        rankings=None if plan.rankings is None else _read_rankings(plan.rankings),
        inputs=_inputs(plan),
    )


def candidates(trace: Trace, head: RankingHead) -> tuple[str, ...]:
    """Return the drafts that strategies choose among, the general one first.

    Those that the predictor ranks; the paper's kind of general draft for ours, where it was traced.
    """
    names = [candidate(name, trace.drafts) for name in head.plan.drafts]
    if missing := [name for name in names if name not in trace.drafts]:
        raise TraceError(f"The trace lacks the draft '{missing[0]}', which the predictor ranks.")
    return tuple(sorted(names, key=lambda name: name not in (GENERAL, GENERAL_ONLY)))


def candidate(name: str, drafts: Iterable[str]) -> str:
    """Return the draft that takes the place of one that the predictor ranks, mostly itself."""
    return GENERAL_ONLY if name == GENERAL and GENERAL_ONLY in drafts else name


def _installed(parameters: Mapping[str, object], traced: Models) -> Models:
    names = {"drafts.names": list(traced.drafts)}
    return installed_models(Settings.from_parameters({**parameters, **names}))


def _read_rankings(path: Path) -> Mapping[str, Any]:
    """Return the rows of Table 2 by what the predictor reads; raises `TraceError`."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        labels = report["chosen"].partition(", ")[2]
        sets = [found for name, found in report["sets"].items() if name != HELD_OUT]
        rows = (sets or list(report["sets"].values()))[0]["rows"]
        return {name: rows[f"{name}, {labels}"] for name in _INPUTS_COMPARED} | {
            "chance": rows["chance"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TraceError(
            f"{path} is not what memspec train-predictor --json prints: {error!r}."
        ) from error


def _inputs(plan: ReproductionPlan) -> dict[str, Any]:
    """Return what tells this reproduction from another, by content."""
    return {
        "trace": _digest(plan.trace),
        "predictor": _digest(plan.predictor),
        "profile": json.loads(json.dumps(asdict(load_profile(plan.profile)))),
        "parameters": {name: str(value) for name, value in plan.parameters.items()},
        "prompts": plan.prompts,
        "paper_like": asdict(plan.paper_like),
        "paper_form": dict(PAPER_FORM),
        "length": plan.length,
        "real_runs": [_digest(path) for path in plan.reports],
        "real_prompts": [_digest(path) for path in plan.real_prompts],
        "real_count": plan.real_count if plan.real_prompts else 0,
        "rankings": _digest(plan.rankings),
    }


def _digest(path: Path | None) -> str:
    """Hash a file, or the files of a folder in the order of their names."""
    if path is None:
        return ""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest = sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
