"""The figures of a benchmark as plain text."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memspec_core.evaluation.bench import PLAIN_NAME
from memspec_core.evaluation.tables import aligned

_NOTHING = "-"

LEGEND = """\
tokens/s: decoding, prompt processing left out. first: seconds to the first token. over ...: speed
over that of the same round. a/it: tokens an iteration. accepted: of the drafted tokens. identical:
answers with the tokens of plain decoding. eta: speed over what the measured read bandwidth allows.
Median (quartiles)."""


def table(report: dict[str, Any]) -> str:
    """Return the report that `as_json` made as tables, one a load of the models and prompt file."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    packages = [f"{n} {v}" for n, v in report["machine"]["packages"].items() if v]
    yield f"{report['machine']['cpu']}, {', '.join(packages)}"
    yield (
        f"prompts: {sum(report['prompts'].values())}, repeats: {report['repeats']}, new tokens: "
        f"{report['max_new_tokens']}, memory is read at {report['read_bandwidth'] / 1e9:.1f} GB/s"
    )
    for series in report["series"]:
        yield from _series(series)
    yield ""
    yield LEGEND


def _series(series: dict[str, Any]) -> Iterator[str]:
    target, configurations = series["target"], series["configurations"]
    yield ""
    yield (
        f"{Path(target['path']).name}, {target['dtype']}, {target['kernel']}, "
        f"threads: {target['threads']}"
    )
    sets = list(configurations[0]["prompt_sets"])
    parts = {"all prompts": [c["all"] for c in configurations]} if len(sets) > 1 else {}
    for name in sets:
        parts[name] = [c["prompt_sets"][name] for c in configurations]
    for part, figures in parts.items():
        yield ""
        yield from aligned(_rows(part, [c["name"] for c in configurations], figures))
    if series["prompts_left_out"]:
        yield f"Too long for the context, and left out: {series['prompts_left_out']} prompts."


def _rows(
    part: str, names: Sequence[str], figures: Sequence[dict[str, Any]]
) -> Iterator[list[str]]:
    bases = list(figures[0]["speed_over"])
    over = [f"over {base}" for base in bases]
    yield [part, "tokens/s", "first", *over, "a/it", "accepted", "identical", "eta"]
    for name, found in zip(names, figures, strict=True):
        yield [
            name,
            _quartiles(found["tokens_per_second"], 1),
            _median(found["time_to_first_token_seconds"]),
            *(_over(name, base, found) for base in bases),
            _number(found["tokens_an_iteration"]),
            _number(found["accepted_of_drafted"]),
            f"{found['identical_runs']}/{found['runs']}",
            _median(found["eta"]),
        ]


def _over(name: str, base: str, found: dict[str, Any]) -> str:
    if name == base:
        return _NOTHING
    ratios = found["speed_over"][base]
    return _quartiles(ratios, 2) if base == PLAIN_NAME else _median(ratios)


def _quartiles(found: dict[str, float] | None, digits: int) -> str:
    if found is None:
        return _NOTHING
    lower, median, upper = (f"{found[k]:.{digits}f}" for k in ("lower", "median", "upper"))
    return f"{median} ({lower} to {upper})"


def _median(found: dict[str, float] | None) -> str:
    return _NOTHING if found is None else _number(found["median"])


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f}"
