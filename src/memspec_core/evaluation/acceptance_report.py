"""The figures of a trace as plain text."""

from collections.abc import Iterator
from typing import Any

from memspec_core.evaluation.tables import aligned

LEGEND = """\
Tokens an iteration over all prompts of a domain, the target's own token included; + lookup: where
the lookup is sure it goes first. first right: the share of places at which the first proposal is
right. Oracles choose among the drafts, with what comes known to them: the best for each prompt, or
for each interval; beside them the same with the drafts' parts exchanged at random at each place,
which is what choosing the largest of several numbers gives by chance."""


def table(figures: dict[str, Any]) -> str:
    """Return what `acceptance.as_json` made as tables."""
    return "\n".join(_lines(figures))


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    yield f"prompts: {sum(figures['prompts'].values())}, tokens: {figures['tokens']}"
    domains = list(figures["prompts"])
    for length, rows in figures["tokens_an_iteration"].items():
        yield ""
        cells = [[f"{length} proposals", *domains]]
        cells += [[name, *(f"{row[d][0]:.2f}" for d in domains)] for name, row in rows.items()]
        yield from aligned(cells)
    yield ""
    cells = [["first right", *domains]]
    cells += [
        [name, *(f"{row[d]:.3f}" for d in domains)] for name, row in figures["acceptance"].items()
    ]
    yield from aligned(cells)
    for length, found in figures["oracles"].items():
        if found:
            yield ""
            yield from aligned(_oracles(length, found))
    yield ""
    yield LEGEND


def _oracles(length: str, found: dict[str, Any]) -> Iterator[list[str]]:
    yield [f"{length} proposals", "best single", "best a prompt", "best an interval"]
    for name, row in found.items():
        yield [name, *(f"{row[key]:.3f}" for key in ("best_single", "static", "dynamic"))]
