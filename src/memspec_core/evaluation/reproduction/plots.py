"""Pictures of the figures: one panel a setting, strategies in the same colours everywhere.

The colours are those of Okabe and Ito, which can be told apart with any kind of colour vision.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from memspec_core.evaluation.reproduction.figures import (
    BARS,
    ITERATION,
    LINES,
    LOAD,
    MEAN,
    RESIDENT,
    STACKS,
    Form,
    Panel,
    Value,
)
from memspec_core.evaluation.reproduction.wording import (
    SETTINGS,
    claimed,
    name,
    number,
    short_domains,
)
from memspec_core.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "general_static": "#8C8C8C",
    "oracle_static": "#56B4E9",
    "oracle_dynamic": "#0072B2",
    "mab_sync": "#CC79A7",
    "mab_async": "#E69F00",
    "prediction_only": "#009E73",
    "memspec": "#D55E00",
    ITERATION: "#8C8C8C",
    RESIDENT: "#56B4E9",
    LOAD: "#CC79A7",
}
_GREY = _COLOURS["general_static"]
_OTHERS = ("#56B4E9", "#0072B2", "#CC79A7", "#009E73")
"""Of series that are no strategies."""

_HATCHES = {
    "desired": "",
    "decoding": "",
    "fallback": "///",
    "load_wait": "xxx",
    "first_wait": "xxx",
    "prediction": "---",
    "prompt_seconds": "---",
}
_SHADES = {
    "fallback": 0.45,
    "load_wait": 0.2,
    "first_wait": 0.2,
    "prediction": 0.0,
    "prompt_seconds": 0.0,
}
"""How much of its strategy's colour a part has; the rest is white."""

_STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # a tenth of the size; viewers have a font without serifs
    "svg.hashsalt": "memspec",
}
_PANEL_INCHES = (4.4, 4.1)
_TITLE_CHARACTERS = 58
_LEGEND_COLUMNS = 3
"""Of each panel."""

_PAPER, _CHANCE = "the paper", "by chance (null control)"
_DOTS_AN_INCH = 110
_TICK_CHARACTERS = 40
"""Labels that have more in all are turned."""


def draw(form: Form, panels: Sequence[tuple[Panel, str]], stem: Path) -> None:
    """Draw a figure as PNG and SVG; each panel comes with what it shows, in a few words."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    kinds: Mapping[str, Callable[[Axes, Panel], None]] = {
        BARS: _bars,
        STACKS: _stacks,
        LINES: _lines,
    }
    width, height = _PANEL_INCHES
    with plt.rc_context(_STYLE):
        figure, [row] = plt.subplots(
            1,
            len(panels),
            figsize=(width * len(panels), height),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, (panel, finding) in zip(row, panels, strict=True):
            kinds[form.kind](axes, panel)
            setting = SETTINGS[panel.setting]
            lines = (
                setting[0].upper() + setting[1:],
                *wrap(finding, _TITLE_CHARACTERS, break_on_hyphens=False),
            )
            axes.set_title("\n".join(lines), loc="left")
            axes.set_xlabel(form.x_label)
        row[0].set_ylabel(form.y_label)
        figure.suptitle(f"{form.name}: {form.about}", fontweight="bold", x=0.01, ha="left")
        handles = _legend(row)
        if handles:
            figure.legend(
                handles.values(),
                handles.keys(),
                loc="outside lower center",
                ncols=min(len(handles), _LEGEND_COLUMNS * len(panels)),
            )
        for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            with whole_file(stem.with_suffix(f".{ending}")) as file:
                figure.savefig(file, format=ending, dpi=_DOTS_AN_INCH, metadata=metadata)
        plt.close(figure)


def _bars(axes: "Axes", panel: Panel) -> None:
    """Draw one bar a value: by series where there is one group, else in groups."""
    groups = list(dict.fromkeys(value.group for value in panel.drawn))
    series = list(dict.fromkeys(value.series for value in panel.drawn))
    single = groups == [MEAN]
    width = 0.7 if single else 0.8 / len(series)
    for value in panel.drawn:
        place = series.index(value.series)
        x = place if single else groups.index(value.group) + (place + 0.5) * width - 0.4
        label = None if single or value.group != groups[0] else name(value.series)
        colour = _colour(value.series, series)
        axes.bar(x, value.estimate.mean, width * 0.94, color=colour, label=label)
        _marks(axes, x, width, value)
        if single:
            text = number(value.estimate.mean, value.unit)
            axes.text(x, 0.01, text, ha="center", va="bottom", transform=_at_foot(axes))
    _name_ticks(axes, [name(one) for one in series] if single else _group_names(groups))


def _stacks(axes: "Axes", panel: Panel) -> None:
    """Draw one bar a series, of its parts."""
    series = list(dict.fromkeys(value.series for value in panel.drawn))
    shades: set[str] = set()
    heights = dict.fromkeys(series, 0.0)
    for value in panel.drawn:
        if not value.estimate.mean:
            continue
        axes.bar(
            series.index(value.series),
            value.estimate.mean,
            0.7,
            bottom=heights[value.series],
            color=_mixed(_colour(value.series, series), _SHADES.get(value.part, 1.0)),
            hatch=_HATCHES[value.part],
            edgecolor="#333333",
            linewidth=0.6,
        )
        if value.part not in shades:  # nothing is filled: this only explains the part
            shades.add(value.part)
            axes.fill_between(
                *((), ()),
                color=_mixed(_GREY, _SHADES.get(value.part, 1.0)),
                hatch=_HATCHES[value.part],
                edgecolor="#333333",
                label=name(value.part),
            )
        heights[value.series] += value.estimate.mean
    for one, height in heights.items():
        text = "\n".join((f"{height:.2f}", *_claimed_shares(panel, one)))
        axes.text(series.index(one), height, text, ha="center", va="bottom", fontsize=8)
    axes.margins(y=0.25)
    _name_ticks(axes, [name(one) for one in series])


def _claimed_shares(panel: Panel, series: str) -> list[str]:
    """Say which share of a bar is fallback, where the paper says it too."""
    return [
        f"{name(value.part)} {number(value.estimate.mean, value.unit)}\n"
        f"(paper: {claimed(value.claim, value.unit)})"
        for value in panel.told
        if value.series == series and value.part == "fallback" and value.claim is not None
    ]


def _lines(axes: "Axes", panel: Panel) -> None:
    """Draw one line a series over the groups."""
    groups = list(dict.fromkeys(value.group for value in panel.drawn))
    series = list(dict.fromkeys(value.series for value in panel.drawn))
    for place, one in enumerate(series):
        values = [value for value in panel.drawn if value.series == one]
        shift = 0.05 * (place - (len(series) - 1) / 2)  # so that error bars do not cover each other
        xs = [groups.index(value.group) + shift for value in values]
        means = [value.estimate.mean for value in values]
        low = [value.estimate.mean - value.estimate.low for value in values]
        high = [value.estimate.high - value.estimate.mean for value in values]
        axes.errorbar(
            xs,
            means,
            (low, high),
            color=_colour(one, series),
            marker="o",
            markersize=4,
            capsize=2,
            label=name(one),
        )
        for x, value in zip(xs, values, strict=True):
            if value.claim is not None:
                _paper_line(axes, x, 0.35, value.claim.mark, _colour(one, series))
    axes.axhline(1.0, color=_GREY, linewidth=0.8)
    _name_ticks(axes, groups)


def _marks(axes: "Axes", x: float, width: float, value: Value) -> None:
    """Draw a bar's interval, the paper's value, and the null control."""
    estimate = value.estimate
    if estimate.low < estimate.high:
        ends = ([estimate.mean - estimate.low], [estimate.high - estimate.mean])
        axes.errorbar(x, estimate.mean, ends, color="#333333", capsize=2, linewidth=0.9)
    if value.claim is not None:
        _paper_line(axes, x, width, value.claim.mark)
    if value.control is not None:
        axes.plot(
            x,
            value.control.mean,
            marker="D",
            markersize=4.5,
            color="white",
            markeredgecolor="black",
            linestyle="none",
            label=_CHANCE,
        )


def _paper_line(axes: "Axes", x: float, width: float, y: float, colour: str = "black") -> None:
    half = 0.55 * width
    axes.plot((x - half, x + half), (y, y), color=colour, linewidth=1.8, label=_PAPER)


def _name_ticks(axes: "Axes", names: Sequence[str]) -> None:
    turned = sum(map(len, names)) > _TICK_CHARACTERS
    alignment: dict[str, Any] = {"rotation": 25, "ha": "right"} if turned else {}
    axes.set_xticks(range(len(names)), names, **alignment)


def _group_names(groups: Sequence[str]) -> list[str]:
    """Return domains without what all of them share, and what a predictor reads in words."""
    domains = short_domains([group for group in groups if "/" in group])
    return [domains.get(group, name(group)) for group in groups]


def _colour(series: str, among: Sequence[str]) -> str:
    return _COLOURS.get(series) or _OTHERS[among.index(series) % len(_OTHERS)]


def _mixed(colour: str, share: float) -> tuple[float, ...]:
    """Return a colour mixed with white."""
    from matplotlib.colors import to_rgb

    return tuple(share * part + 1.0 - share for part in to_rgb(colour))


def _at_foot(axes: "Axes") -> Any:
    """Return coordinates whose x is that of the data, and whose y is the height of the axes."""
    return axes.get_xaxis_transform()


def _legend(row: Sequence["Axes"]) -> dict[str, Any]:
    """Return what is to be explained, each once, the marks last."""
    handles: dict[str, Any] = {}
    for axes in row:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return dict(sorted(handles.items(), key=lambda item: item[0] in (_PAPER, _CHANCE)))
