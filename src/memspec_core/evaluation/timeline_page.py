"""The timeline of a generation as an HTML page that needs no network, with the text below it."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from memspec_core.evaluation.timeline import TOKENS, Span, Step, Timeline
from memspec_core.evaluation.timeline_colours import colours_of, darker, paler
from memspec_core.evaluation.timeline_words import (
    FALLBACK,
    LOADING,
    POINT,
    RESIDENT,
    RUNS,
    WAIT,
    WANTED,
    row_label,
    summary,
    title,
)
from memspec_core.measurement.decisions import Decision
from memspec_core.measurement.record import PROMPT_CHARACTERS

_PIXELS_AN_ITERATION = 12
"""The least that an iteration is wide on average, so that a finger finds it."""

_DARKER, _PALER = 0.25, 0.35
"""Of text on a light and on a dark page."""

_STEPS_OF_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_TICKS = 8


def page(timeline: Timeline) -> str:
    """Return the page; texts of prompt and answer can bring no markup into it."""
    template = files("memspec_core.evaluation").joinpath("timeline_page.html")
    data = {"steps": _steps(timeline), "points": _points(timeline)}
    return Template(template.read_text(encoding="utf-8")).substitute(
        title=escape(title(timeline, PROMPT_CHARACTERS)),
        summary=escape(summary(timeline)),
        light=_colours(timeline, lambda colour: darker(colour, _DARKER)),
        dark=_colours(timeline, lambda colour: paler(colour, _PALER)),
        width=_PIXELS_AN_ITERATION * len(timeline.steps),
        names="".join(f"<div>{escape(row_label(row))}</div>" for row in timeline.rows),
        chart="\n".join(_chart(timeline)),
        legend="\n".join(_legend(timeline)),
        answer="".join(_answer(timeline)),
        footer=escape(_settings(timeline)),
        data=json.dumps(data).replace("<", "\\u003c"),
    )


def _colours(timeline: Timeline, of_text: Callable[[str], str]) -> str:
    colours = colours_of(timeline.rows)
    return "\n".join(
        f".d{place} {{ --c: {colours[row]}; --t: {of_text(colours[row])} }}"
        for place, row in enumerate(timeline.rows)
    )


def _chart(timeline: Timeline) -> Iterator[str]:
    """Yield the chart's elements from back to front, placed in shares of its width."""

    def at(span: Span, kind: str, more: str = "") -> str:
        place = f"left:{_percent(span.start, timeline)};width:{_percent(span.width, timeline)}"
        return f'<i class="{kind}" style="{place}{more}"></i>'

    yield from (at(span, "band") for span in timeline.fallback)
    yield from (at(span, "wait") for span in timeline.waits)
    yield from (at(Span(point, point), "point") for point in timeline.points)
    for place, row in enumerate(timeline.rows):
        yield f'<div class="row d{place}">'
        yield from (at(span, "resident") for span in timeline.resident.get(row, ()))
        yield from (at(span, "loading") for span in timeline.loading.get(row, ()))
        yield from (at(span, "run") for draft, span in timeline.runs() if draft == row)
        yield from (at(span, "wanted") for draft, span in timeline.wanted_runs() if draft == row)
        yield "</div>"
    yield '<div class="row long">'
    most = max(step.iteration.committed for step in timeline.steps) or 1
    for step in timeline.steps:
        heights = step.accepted / most, (step.iteration.committed - step.accepted) / most
        accepted, own = (f"{100 * height:.4g}%" for height in heights)
        kind = f"gain d{timeline.rows.index(step.iteration.draft)}"
        yield at(step.span, "own", f";height:{own}")
        yield at(step.span, kind, f";bottom:{own};height:{accepted}")
    yield "</div>"
    for value in _ticks(timeline.end):
        unit = "" if timeline.axis == TOKENS else " s"
        left = _percent(value, timeline)
        kind = "tick" if value else "tick first"
        yield f'<i class="{kind}" style="left:{left}">{value:g}{unit}</i>'
    for number, step in enumerate(timeline.steps):
        yield at(step.span, "hit").replace("<i ", f'<i data-step="{number}" ')


def _percent(value: float, timeline: Timeline) -> str:
    return f"{100 * value / (timeline.end or 1.0):.4g}%"


def _ticks(end: float) -> list[float]:
    """Return some round values from 0 on, fewer than `_TICKS`."""
    unit = 1.0
    while end / unit < 1.0 and end > 0.0:
        unit /= 1000.0
    step = next((s * unit for s in _STEPS_OF_TICKS if end / (s * unit) < _TICKS), end or 1.0)
    return [number * step for number in range(int(end / step) + 1)]


def _legend(timeline: Timeline) -> Iterator[str]:
    shown = {"run": RUNS, "resident": RESIDENT, "loading": LOADING, "wanted": WANTED}
    shown |= {"point": POINT}
    shown |= {"band": FALLBACK} if timeline.fallback else {}
    shown |= {"wait": WAIT} if timeline.waits else {}
    for kind, words in shown.items():
        yield f'<span><i class="{kind}"></i>{escape(words)}</span>'


def _answer(timeline: Timeline) -> Iterator[str]:
    for number, step in enumerate(timeline.steps):
        kind = f"d{timeline.rows.index(step.iteration.draft)}"
        kind += " fallback" if step.iteration.fallback else ""
        text = escape(step.iteration.text)
        yield f'<span class="{kind}" data-step="{number}">{text}</span>'


def _settings(timeline: Timeline) -> str:
    told = {name: value for name, value in asdict(timeline.beginning).items() if name != "prompt"}
    return ", ".join(f"{name}: {_written(value)}" for name, value in told.items() if value != "")


def _written(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _steps(timeline: Timeline) -> list[dict[str, Any]]:
    """Return what the page tells of each iteration, and the number of its scheduling point."""
    decisions = _decisions(timeline)
    return [
        {
            "lines": _lines(number, step),
            "point": -1 if step.decision is None else decisions.index(step.decision),
        }
        for number, step in enumerate(timeline.steps)
    ]


def _decisions(timeline: Timeline) -> list[Decision]:
    found: list[Decision] = []
    for step in timeline.steps:
        if step.decision is not None and (not found or found[-1] is not step.decision):
            found.append(step.decision)
    return found


def _lines(number: int, step: Step) -> list[str]:
    iteration = step.iteration
    first = iteration.generated_tokens - iteration.committed + 1
    tokens = f"token {first}" if iteration.committed == 1 else "no token"
    if iteration.committed > 1:
        tokens = f"tokens {first} to {iteration.generated_tokens}"
    draft, wanted = row_label(iteration.draft), row_label(iteration.wanted)
    return [
        f"Iteration {number + 1}: {tokens}, {1e3 * iteration.seconds.decode:.1f} ms",
        f"{draft} runs" + (f", {wanted} is wanted: fallback" if iteration.fallback else ""),
        f"{iteration.proposed} proposed, {step.accepted} accepted",
    ]


def _points(timeline: Timeline) -> list[dict[str, Any]]:
    """Return what the page tells of each scheduling point, with the scores, the best first."""
    rows = {row: f"d{place}" for place, row in enumerate(timeline.rows)}
    found = []
    for decision in _decisions(timeline):
        most = max((abs(score) for score in decision.scores.values()), default=0.0) or 1.0
        ranked = sorted(decision.scores.items(), key=lambda item: -item[1])
        found.append(
            {
                "lines": [
                    f"Scheduling point after token {decision.place}: "
                    f"{row_label(decision.wanted)} is wanted, {row_label(decision.active)} runs",
                    f"in memory: {', '.join(decision.resident) or 'nothing'}; "
                    f"loading: {', '.join(decision.loading) or 'nothing'}",
                    f"prediction took {1e3 * decision.prediction_seconds:.2f} ms",
                ],
                "scores": [
                    [draft, f"{score:.3g}", _share(score, most), rows.get(draft, "")]
                    for draft, score in ranked
                ],
            }
        )
    return found


def _share(score: float, most: float) -> float:
    """Return how long a score's bar is; one that is not finite is as long as can be."""
    return min(1.0, max(0.0, round(score / most, 4))) if math.isfinite(score) else 1.0
