"""Real runs on this machine: what `memspec compare --json` prints, read or made."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memspec_core.errors import MeasurementError
from memspec_core.evaluation.comparison import ORACLES, PAPER_FORM, ComparisonPlan, compare
from memspec_core.evaluation.comparison_report import full_report
from memspec_core.evaluation.installed import Models
from memspec_core.evaluation.reproduction.estimates import answers_of
from memspec_core.evaluation.reproduction.folder import Output
from memspec_core.evaluation.reproduction.measured import (
    CAPACITIES,
    INTERVALS,
    SWEPT,
    Measured,
    Point,
    Progress,
    named,
    of_rows,
)
from memspec_core.settings import STRATEGY_NAMES
from memspec_core.training.prompts import PromptSet

NAME = "real"
LENGTHS = (64, 128, 256)

Report = Mapping[str, Any]


@dataclass(frozen=True)
class RealPlan:
    """What to run: `parameters` are the node's, `trace` one of the same prompts for the oracles."""

    parameters: Mapping[str, object]
    prompt_sets: tuple[PromptSet, ...]
    trace: Path

    def at(self, point: Point) -> ComparisonPlan:
        """Return the runs of a point."""
        base = point == Point()
        swept = {
            "scheduling_interval": point.interval,
            "resident_capacity": point.capacity,
        }
        return ComparisonPlan(
            parameters={**self.parameters, **PAPER_FORM, **swept},
            prompt_sets=self.prompt_sets,
            strategies=(*STRATEGY_NAMES, *ORACLES) if base else SWEPT,
            max_new_tokens=point.tokens,
            trace=self.trace if base else None,
        )


def all_points() -> tuple[Point, ...]:
    """Return all points that are run, the base first."""
    swept = (
        *(Point(interval=n) for n in INTERVALS),
        *(Point(capacity=k) for k in CAPACITIES),
        *(Point(tokens=t) for t in LENGTHS),
    )
    return tuple(dict.fromkeys((Point(), *swept)))


def run_really(plan: RealPlan, output: Output, progress: Progress) -> list[Report]:
    """Run every point, taking over those that are done."""

    def report(point: Point) -> Report:
        compared = plan.at(point)
        runs = compare(compared, named(progress, f"{NAME} {point.label}"))
        return full_report(compared, runs)

    return [
        output.part(f"{NAME}_{point.label}", lambda point=point: report(point))  # type: ignore[misc]
        for point in all_points()
    ]


def read_reports(files: Sequence[Path], models: Models) -> list[Report]:
    """Read what `memspec compare --json` printed; raises `MeasurementError`, or `TraceError`."""
    return [_read(file, models) for file in files]


def measured_really(reports: Sequence[Report]) -> Measured:
    """Return what reports tell; the first of each point counts, the first of all is the base.

    Raises `MeasurementError` for a prompt file with one prompt, which has no interval.
    """
    found: dict[Point, Report] = {}
    for report in reports:
        found.setdefault(_point(report), report)
    base = next(iter(found))
    settings = found[base]["settings"]
    points = {point: answers_of(of_rows(report["runs"])) for point, report in found.items()}
    for answers in points.values():
        domain, count = min(Counter(d for d, _ in answers.keys).items(), key=lambda one: one[1])
        if count < 2:
            raise MeasurementError(
                f"There are runs of one prompt of {domain}: two of each file are needed at the "
                "least, as intervals are over prompts."
            )
    return Measured(
        name=NAME,
        base=base,
        points=points,
        drafts=tuple(draft["name"] for draft in settings["drafts"]),
        length=settings["draft_length"],
        machine=found[base]["machine"]["cpu"],
    )


def _point(report: Report) -> Point:
    settings = report["settings"]
    return Point(
        settings["scheduling_interval"], settings["resident_capacity"], report["max_new_tokens"]
    )


def _read(file: Path, models: Models) -> Report:
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        of_rows(report["runs"])
        _point(report)
        str(report["machine"]["cpu"])
        theirs = Models.of_json(report["models"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MeasurementError(
            f"{file} is not what memspec compare --json prints, or an older one's: {error!r}."
        ) from error
    models.require(theirs, str(file))
    return report  # type: ignore[no-any-return]
