"""From traces and runs to a folder with every figure of the paper."""

from dataclasses import replace
from pathlib import Path

from memspec_core.errors import TraceError
from memspec_core.evaluation.paperlike import paper_like_trace
from memspec_core.evaluation.paperlike_head import paper_like_head
from memspec_core.evaluation.reduction import renamed
from memspec_core.evaluation.reproduction import real
from memspec_core.evaluation.reproduction.curves import simulate_curves
from memspec_core.evaluation.reproduction.folder import PARTS, Output
from memspec_core.evaluation.reproduction.measured import (
    Measured,
    Progress,
    Recalls,
    Simulated,
    measure_simulated,
    recalls,
    with_reach,
)
from memspec_core.evaluation.reproduction.report import write_report
from memspec_core.evaluation.reproduction.sources import (
    ReproductionPlan,
    Sources,
    candidate,
    read_sources,
)
from memspec_core.models.places import PREDICTOR
from memspec_core.prediction.head import load_head, predictor_folder, save_head

OURS, PAPER_LIKE = "ours", "paper_like"


def reproduce(plan: ReproductionPlan, progress: Progress) -> Path:
    """Write the report and all that belongs to it; return the report's path.

    A second call with the same inputs takes over what is done. Raises `MemSpecError` for inputs
    that cannot be used, and `CacheMismatchError` for a folder that holds something else.
    """
    sources = read_sources(plan)
    output = Output(plan.folder, sources.inputs, force=plan.force)
    measured = [
        *_measured_really(plan, sources, output, progress),
        _ours(plan, sources, output, progress),
        _paper_like(plan, sources, output, progress),
    ]
    about = {one.name: _about(one, sources) for one in measured}
    return write_report(output, measured, about)


def _about(measured: Measured, sources: Sources) -> str:
    """Say what a setting is."""
    answers, base = measured.answers, measured.base
    form = (
        f"{len(answers.keys)} prompts of {len(answers.domains)} domains, answers of up to "
        f"{base.tokens} tokens, N = {base.interval}, K = {base.capacity}, "
        f"{measured.length} proposals, {len(measured.drafts)} drafts"
    )
    board = f"the profile {sources.profile.name} ({sources.profile.description})"
    return {
        real.NAME: f"{form}, the general one being {measured.drafts[0]}, on {measured.machine}.",
        OURS: f"what our drafts get right, on {board}; {form}, the general one being "
        f"{measured.drafts[0]}.",
        PAPER_LIKE: "answers that were generated so that drafts differ as in the paper's Figure 1; "
        "they tell nothing of any model, only whether the policies give the paper's results under "
        f"the paper's ratios; {form}, on the same profile, with a predictor that was trained on "
        "other such answers.",
    }[measured.name]


def _measured_really(
    plan: ReproductionPlan, sources: Sources, output: Output, progress: Progress
) -> list[Measured]:
    reports = sources.reports
    if sources.prompt_sets:
        reports = tuple(real.run_really(_real_plan(plan, sources, output), output, progress))
    if not reports:
        return []
    measured = real.measured_really(reports)
    setting = _on_trace(plan, sources)
    return [with_reach(measured, replace(setting, name=real.NAME, length=measured.length), output)]


def _real_plan(plan: ReproductionPlan, sources: Sources, output: Output) -> real.RealPlan:
    """Return what to run, with a predictor that ranks the candidates by their names."""
    folder = output.folder / PARTS / PREDICTOR
    whole = load_head(plan.predictor or predictor_folder(), sources.trace.header.target_sha256)
    names = [candidate(name, sources.trace.drafts) for name in whole.plan.drafts]
    save_head(renamed(whole, names), folder)
    parameters = {**sources.parameters, "predictor.path": str(folder)}
    return real.RealPlan(parameters, sources.prompt_sets, plan.trace)


def _on_trace(plan: ReproductionPlan, sources: Sources) -> Simulated:
    return Simulated(
        name=OURS,
        trace=sources.trace,
        profile=sources.profile,
        length=plan.length,
        head=sources.head,
        jobs=plan.jobs,
    )


def _ours(plan: ReproductionPlan, sources: Sources, output: Output, progress: Progress) -> Measured:
    setting = _on_trace(plan, sources)
    measured = measure_simulated(setting, output, progress)
    return replace(
        measured,
        recalls=sources.rankings or _own_recalls(setting, sources, output),
        curves=simulate_curves(setting, sources.all_drafts, output, progress),
    )


def _own_recalls(setting: Simulated, sources: Sources, output: Output) -> Recalls | None:
    """Judge the trace's own predictor by the drafts that it was trained for.

    None where these were not traced, or where prompt files do not bear their names.
    """
    head = sources.trained_head
    try:
        ranked = replace(setting, trace=sources.all_drafts.only(head.plan.drafts), head=head)
        found: Recalls = output.part(f"{OURS}_recalls", lambda: recalls(ranked))
    except TraceError:
        return None
    return found


def _paper_like(
    plan: ReproductionPlan, sources: Sources, output: Output, progress: Progress
) -> Measured:
    like = plan.paper_like
    trace = paper_like_trace(like)
    head = paper_like_head(like)
    setting = replace(_on_trace(plan, sources), name=PAPER_LIKE, trace=trace, head=head)
    found: Recalls = output.part(f"{PAPER_LIKE}_recalls", lambda: recalls(setting))
    return replace(
        measure_simulated(setting, output, progress),
        recalls=found,
        curves=simulate_curves(setting, trace, output, progress, like),
    )
