"""The timeline of a generation as a picture: PNG or SVG."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import wrap
from typing import IO, TYPE_CHECKING, Any

from memspec_core.evaluation.timeline import TOKENS, Span, Timeline
from memspec_core.evaluation.timeline_colours import colours_of, darker, paler
from memspec_core.evaluation.timeline_words import (
    FALLBACK,
    LINE_CHARACTERS,
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
from memspec_core.request import PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_INCHES = 10.0
_LEFT, _RIGHT = 0.085, 0.99
"""Where the axis begins and ends, as shares of the width."""
_TITLE_INCHES, _TITLE_LINE_INCHES, _SUMMARY_INCHES = 0.33, 0.19, 0.23
_GAINS_INCHES, _GAP_INCHES, _LEGEND_INCHES = 1.05, 0.25, 0.78
_DOTS_PER_INCH = 160
_TEXT_POINTS = 6.6
_TEXT_COLUMNS, _TEXT_LINES = 8, 6
_LINE_INCHES = 0.125
_LETTERS = _WIDTH_INCHES * (_RIGHT - _LEFT) * 72.0 / (0.602 * _TEXT_POINTS)
"""So many letters are as wide as the axis, in DejaVu Sans Mono, which comes with matplotlib."""

_INK, _FAINT, _FALLBACK, _OWN = "#222222", "#bbbbbb", "#f6d5c8", "#d0d0d0"
_WAITING: dict[str, Any] = {
    "facecolor": "#e6e6e6",
    "edgecolor": "white",
    "hatch": "xxx",
    "linewidth": 0.0,
}
_GAINS = "grey: the target's own token; upon it: proposals that it accepted"


def draw(timeline: Timeline, file: IO[bytes], kind: str) -> None:
    """Draw a timeline into a file, as `kind` "png" or "svg"."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = _columns(timeline)
    lines = max(map(len, columns.values()), default=0)
    text_inches = lines * _LINE_INCHES + 0.15 if lines else 0.0
    row_inches = 0.27 * len(timeline.rows) + 0.1
    heading = wrap(title(timeline), LINE_CHARACTERS)
    title_inches = _TITLE_INCHES + len(heading) * _TITLE_LINE_INCHES
    inches = title_inches + text_inches + row_inches + _GAINS_INCHES + _LEGEND_INCHES
    look = {"font.family": "DejaVu Sans", "font.size": 8, "svg.hashsalt": "memspec"}
    with mpl.rc_context(look), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of scripts that the font lacks
        figure = plt.figure(figsize=(_WIDTH_INCHES, inches))

        def panel(bottom: float, height: float) -> "Axes":
            width = _RIGHT - _LEFT
            axes = figure.add_axes((_LEFT, bottom / inches, width, height / inches))
            axes.set_xlim(0, timeline.end)
            return axes

        style: dict[str, Any] = {"size": 9.5, "weight": "bold", "va": "top", "linespacing": 1.3}
        below_title = title_inches - _SUMMARY_INCHES
        figure.text(0.008, 1 - 0.07 / inches, _plain("\n".join(heading)), **style)
        figure.text(
            0.008, 1 - below_title / inches, _plain(summary(timeline)), color=_INK, va="top"
        )
        _draw_gains(panel(_LEGEND_INCHES, _GAINS_INCHES - _GAP_INCHES), timeline)
        _draw_drafts(panel(_LEGEND_INCHES + _GAINS_INCHES, row_inches), timeline)
        if lines:
            bottom = _LEGEND_INCHES + _GAINS_INCHES + row_inches
            axes = panel(bottom, text_inches)
            axes.set_ylim(text_inches / _LINE_INCHES - 0.3, -0.3)
            _draw_text(axes, timeline, columns)
        figure.legend(
            handles=_legend(timeline),
            loc="lower center",
            ncol=7,
            frameon=False,
            handlelength=2.4,
            columnspacing=1.4,
        )
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(file, format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
        plt.close(figure)


_Letters = list[tuple[str, str]]
"""Letters, each with the draft that ran when it came."""


def _draw_text(axes: "Axes", timeline: Timeline, columns: Mapping[int, Sequence[_Letters]]) -> None:
    """Write the answer in columns above the places where it was made."""
    axes.set_axis_off()
    colours = colours_of(timeline.rows)
    width = timeline.end / _TEXT_COLUMNS
    style: dict[str, Any] = {"size": _TEXT_POINTS, "family": "DejaVu Sans Mono", "va": "top"}
    axes.text(-0.011, 0, "answer", transform=axes.get_yaxis_transform(), ha="right", va="top")
    for column, lines in columns.items():
        start = column * width
        axes.plot([start, start + 0.95 * width], [-0.2, -0.2], color=_FAINT, linewidth=0.8)
        for number, line in enumerate(lines):
            place = 0
            for draft, part in groupby(line, lambda letter: letter[1]):
                written = "".join(letter for letter, _ in part)
                x = start + place / _LETTERS * timeline.end
                axes.text(x, number, _plain(written), color=darker(colours[draft]), **style)
                place += len(written)


def _columns(timeline: Timeline) -> dict[int, list[_Letters]]:
    """Return the lines of each column of text; a word stands where it begins."""
    letters = [
        (letter, step.iteration.draft, int(_TEXT_COLUMNS * step.span.start / timeline.end))
        for step in timeline.steps
        for letter in step.iteration.text
    ]
    words: dict[int, list[_Letters]] = {}
    for is_space, group in groupby(letters, lambda letter: not letter[0].strip()):
        word = list(group)
        if not is_space:
            column = min(word[0][2], _TEXT_COLUMNS - 1)
            words.setdefault(column, []).append([(letter, draft) for letter, draft, _ in word])
    width = int(_LETTERS / _TEXT_COLUMNS) - 1
    return {column: _filled(found, width) for column, found in words.items()}


def _filled(words: Sequence[_Letters], width: int) -> list[_Letters]:
    """Return words set in lines, as many as there is room for."""
    pieces = [word[at : at + width] for word in words for at in range(0, len(word), width)]
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + 1 + len(piece) <= width:
            lines[-1] = [*lines[-1], (" ", piece[0][1]), *piece]
        elif len(lines) < _TEXT_LINES:
            lines.append(piece)
        else:
            lines[-1] = [*lines[-1][: width - 2], (" ", PLAIN), ("…", PLAIN)]
            break
    return lines


def _draw_drafts(axes: "Axes", timeline: Timeline) -> None:
    """Draw a row for each draft: in memory, loading, running, wanted."""
    from matplotlib.patches import Rectangle

    colours = colours_of(timeline.rows)
    places = {row: place for place, row in enumerate(timeline.rows)}
    axes.set_ylim(len(places) - 0.45, -0.55)
    axes.set_xticks([])
    axes.set_yticks(list(places.values()), [row_label(row) for row in places])
    axes.tick_params(left=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for point in timeline.points:
        axes.axvline(point, color=_FAINT, linewidth=0.6, linestyle=":", zorder=1)
    _shade(axes, timeline)
    for row, place in places.items():
        axes.axhline(place, color="#eeeeee", linewidth=0.8, zorder=0)
        bars = {"linewidth": 0.0, "zorder": 2}
        _bars(axes, timeline.resident.get(row, ()), place, 0.5, color=paler(colours[row]), **bars)
        loading = {"facecolor": "white", "edgecolor": colours[row], "hatch": "/////"}
        _bars(axes, timeline.loading.get(row, ()), place, 0.5, **loading, linewidth=0.0, zorder=3)
    for draft, span in timeline.runs():
        _bars(axes, [span], places[draft], 0.66, color=colours[draft], linewidth=0.0, zorder=4)
    for draft, span in timeline.wanted_runs():
        corner = (span.start, places[draft] - 0.42)
        frame = Rectangle(corner, span.width, 0.84, fill=False, edgecolor=_INK, linewidth=1.3)
        axes.add_patch(frame).set(zorder=5, clip_on=False)


def _draw_gains(axes: "Axes", timeline: Timeline) -> None:
    """Draw the tokens of each iteration: the target's own, and accepted proposals upon it."""
    colours = colours_of(timeline.rows)
    _shade(axes, timeline)
    starts = [step.span.start for step in timeline.steps]
    widths = [step.span.width for step in timeline.steps]
    accepted = [step.accepted for step in timeline.steps]
    own = [step.iteration.committed - step.accepted for step in timeline.steps]
    bars: dict[str, Any] = {"align": "edge", "edgecolor": "white", "linewidth": 0.4, "zorder": 3}
    axes.bar(starts, own, widths, color=_OWN, **bars)
    drafts = [colours[step.iteration.draft] for step in timeline.steps]
    axes.bar(starts, accepted, widths, bottom=own, color=drafts, **bars)
    axes.set_ylabel("tokens an\niteration")
    axes.locator_params(axis="y", integer=True, nbins=4)
    axes.text(1, 1.02, _GAINS, transform=axes.transAxes, ha="right", va="bottom", color="#666666")
    axes.set_xlabel("tokens of the answer" if timeline.axis == TOKENS else "seconds of decoding")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _shade(axes: "Axes", timeline: Timeline) -> None:
    for span in timeline.fallback:
        axes.axvspan(span.start, span.end, color=_FALLBACK, linewidth=0.0, zorder=0.5)
    for span in timeline.waits:
        axes.axvspan(span.start, span.end, **_WAITING, zorder=0.5)


def _bars(axes: "Axes", spans: Sequence[Span], place: int, height: float, **look: Any) -> None:
    if spans:
        ranges = [(span.start, span.width) for span in spans]
        axes.broken_barh(ranges, (place - height / 2, height), **look)


def _legend(timeline: Timeline) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = "#666666"
    handles = [
        Patch(color=grey, label=RUNS),
        Patch(color=paler(grey), label=RESIDENT),
        Patch(facecolor="white", edgecolor=grey, hatch="/////", linewidth=0, label=LOADING),
        Patch(fill=False, edgecolor=_INK, linewidth=1.3, label=WANTED),
        Line2D([], [], color="#888888", linestyle=":", label=POINT),
    ]
    if timeline.fallback:
        handles.append(Patch(color=_FALLBACK, label=FALLBACK))
    if timeline.waits:
        handles.append(Patch(**_WAITING, label=WAIT))
    return handles


def _plain(text: str) -> str:
    """Keep matplotlib from reading formulas into a text."""
    return text.replace("$", r"\$")
