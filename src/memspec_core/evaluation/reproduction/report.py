"""The report: one Markdown file, with the pictures, and all values as JSON and CSV."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memspec_core.evaluation.comparison import BASELINE
from memspec_core.evaluation.reproduction.claims import Claim
from memspec_core.evaluation.reproduction.curves import CURVE_FORMS
from memspec_core.evaluation.reproduction.figures import (
    FORMS,
    LINES,
    MAB_ASYNC,
    MEAN,
    MEMSPEC,
    OWN_TIME,
    Form,
    Panel,
    Value,
    ratio,
)
from memspec_core.evaluation.reproduction.findings import Finding, find
from memspec_core.evaluation.reproduction.folder import FIGURES, REPORT, TABLE, VALUES, Output
from memspec_core.evaluation.reproduction.measured import DYNAMIC, Measured
from memspec_core.evaluation.reproduction.plots import draw
from memspec_core.evaluation.reproduction.wording import SETTINGS, claimed, name, told

_HEAD = """\
# The paper's figures, made anew

Every figure of the MemSpec paper ([doi:10.1145/3814943.3816174](https://doi.org/10.1145/3814943.3816174)),
beside what the paper claims; written by `memspec reproduce`, which
docs/evaluation.md describes. The settings are never mixed:

"""

_LEGEND = """\

In the tables: the mean over domains (of ratios the geometric one) with its 95 % interval
(bootstrap over prompts); *chance*: the same for the null control, where the drafts' parts are
exchanged at random at each place, or for a random ranking; *above*, *below*, *agrees*: how the
interval lies to the paper's figure. Values of each domain: figures.csv.
"""

_HEADLINES = (
    ("figure_06", MEMSPEC, MEAN, "", "throughput of MemSpec over General-Static"),
    ("figure_06", ratio(MEMSPEC, MAB_ASYNC), MEAN, "", "the same over MAB-Async"),
    ("figure_06", ratio(MEMSPEC, DYNAMIC), MEAN, "", "the same over Oracle-Dynamic"),
    ("figure_07", MEMSPEC, OWN_TIME, "fallback", "fallback, of MemSpec's time"),
    ("figure_07", MAB_ASYNC, OWN_TIME, "fallback", "fallback, of MAB-Async's time"),
    ("figure_07", MEMSPEC, OWN_TIME, "prediction", "prediction, of MemSpec's time"),
    ("latency", ratio(MEMSPEC, BASELINE), MEAN, "", "latency of MemSpec over General-Static"),
    ("latency", ratio(MEMSPEC, MAB_ASYNC), MEAN, "", "the same over MAB-Async"),
)
"""Figure, series, group, part, and what to call it: the paper's main claims."""


@dataclass(frozen=True)
class Shown:
    """A figure as it was made: its panels with what they show, by setting."""

    form: Form
    panels: Mapping[str, Panel]
    findings: Mapping[str, Finding]

    @property
    def title(self) -> str:
        """What the figure is about."""
        return f"{self.form.name}: {self.form.about}"


def show(form: Form, measured: Sequence[Measured]) -> Shown:
    """Compute a figure in all settings that have what it needs."""
    built = {one.name: form.build(one) for one in measured}
    panels = {setting: panel for setting, panel in built.items() if panel is not None}
    by_name = {one.name: one for one in measured}
    findings = {s: find(form, panel, by_name[s]) for s, panel in panels.items()}
    return Shown(form, panels, findings)


def write_report(output: Output, measured: Sequence[Measured], about: Mapping[str, str]) -> Path:
    """Compute, draw and report all figures; return the report's path.

    `about`: what each setting is.
    """
    shown = [show(form, measured) for form in (*FORMS, *CURVE_FORMS)]
    shown = [one for one in shown if one.panels]
    for one in shown:
        pairs = [(panel, one.findings[setting].title) for setting, panel in one.panels.items()]
        draw(one.form, pairs, output.folder / FIGURES / one.form.key)
    output.write(output.folder / VALUES, json.dumps(_as_json(shown), indent=1) + "\n")
    output.write(output.folder / TABLE, _as_csv(shown))
    output.write(output.folder / REPORT, "\n".join(_lines(shown, measured, about)) + "\n")
    return output.folder / REPORT


def _lines(
    shown: Sequence[Shown], measured: Sequence[Measured], about: Mapping[str, str]
) -> Iterator[str]:
    settings = [one.name for one in measured]
    yield _HEAD.rstrip("\n") + "\n"
    for setting in settings:
        yield f"- **{SETTINGS[setting]}**: {about[setting]}"
    yield _LEGEND
    yield from _table("", settings, list(_headlines(shown)))
    for one in shown:
        yield ""
        yield f"## {one.title[0].upper()}{one.title[1:]}"
        yield ""
        yield f"![{one.title}]({FIGURES}/{one.form.key}.svg)"
        yield ""
        for setting, finding in one.findings.items():
            yield f"- **{SETTINGS[setting]}**: {finding.title}. {finding.why}".rstrip()
        yield ""
        yield from _table(one.form.y_label, settings, list(_rows(one)))


Row = tuple[str, Mapping[str, Value]]
"""What a row is of, and its value in each setting."""


def _rows(shown: Shown) -> Iterator[Row]:
    """Yield the rows of a figure's table; none that are nought or one everywhere."""
    keys: dict[tuple[str, str, str], dict[str, Value]] = {}
    for setting, panel in shown.panels.items():
        for value in panel.values:
            if value.tabled:
                keys.setdefault((value.series, value.group, value.part), {})[setting] = value
    for (series, group, part), values in keys.items():
        if any(v.claim is not None or v.estimate.mean not in (0.0, 1.0) for v in values.values()):
            yield _label(shown.form, series, group, part), values


def _headlines(shown: Sequence[Shown]) -> Iterator[Row]:
    by_key = {one.form.key: one for one in shown}
    for key, series, group, part, label in _HEADLINES:
        panels = by_key[key].panels.items() if key in by_key else ()
        found = {setting: panel.find(series, group, part) for setting, panel in panels}
        values = {setting: value for setting, value in found.items() if value is not None}
        if values:
            yield label, values


def _label(form: Form, series: str, group: str, part: str) -> str:
    words = [name(series)]
    if form.kind == LINES:
        words.append(form.x_name.format(group))
    elif group not in (MEAN, OWN_TIME):
        words.insert(0, name(group))
    if part:
        words.append(name(part))
    if group == OWN_TIME:
        words.append("of its time")
    return ", ".join(words)


def _table(corner: str, settings: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    yield "| " + " | ".join((corner, "paper", *(SETTINGS[setting] for setting in settings))) + " |"
    yield "|---" * (2 + len(settings)) + "|"
    for label, values in rows:
        first = next(iter(values.values()))
        cells = (told(values[s]) if s in values else "" for s in settings)
        yield "| " + " | ".join((label, claimed(first.claim, first.unit), *cells)) + " |"


def _as_json(shown: Sequence[Shown]) -> dict[str, Any]:
    return {
        one.form.key: {
            "title": one.title,
            "settings": {
                setting: {
                    "finding": one.findings[setting].title,
                    "why": one.findings[setting].why,
                    "values": [_value(value) for value in panel.values],
                }
                for setting, panel in one.panels.items()
            },
        }
        for one in shown
    }


def _value(value: Value) -> dict[str, Any]:
    fields = asdict(value) | {"paper": _paper(value.claim)}
    return {key: field for key, field in fields.items() if key not in ("claim", "tabled")}


def _paper(claim: Claim | None) -> float | list[float | None] | None:
    if claim is None:
        return None
    if claim.low == claim.high:
        return claim.high
    return [claim.low if claim.low > 0 else None, claim.high]


_COLUMNS = (
    *("figure", "setting", "series", "group", "part", "unit", "mean", "low", "high"),
    *("chance", "paper_low", "paper_high"),
)


def _as_csv(shown: Sequence[Shown]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for one in shown:
        for setting, panel in one.panels.items():
            writer.writerows(_csv_row(one.form.key, setting, value) for value in panel.values)
    return file.getvalue()


def _csv_row(key: str, setting: str, value: Value) -> list[object]:
    estimate, claim = value.estimate, value.claim
    numbers = (estimate.mean, estimate.low, estimate.high)
    return [
        *(key, setting, value.series, value.group, value.part, value.unit),
        *(f"{number:.6g}" for number in numbers),
        "" if value.control is None else f"{value.control.mean:.6g}",
        "" if claim is None or claim.low < 0 else f"{claim.low:.6g}",
        "" if claim is None else f"{claim.high:.6g}",
    ]
