"""The figures of rankings as plain text: the paper's Table 2, with throughput beside it."""

from collections.abc import Iterator, Mapping
from typing import Any

from memspec_core.evaluation.tables import aligned

LEGEND = """\
At each scheduling point of answers that follow the ranking: how often (%) its first draft, or one
of its first two, is among those of highest utility over the coming interval, where ties count; the
same at the points where one draft alone is best; and how often it is that of the prompt's domain.
tokens: tokens an iteration when the first is followed, all drafts resident, the target's own token
included, with 95 % over prompts. Names: what the context holds, then the labels that were learned,
then whether what decoding shows is counted in."""

_COLUMNS = {
    "first": "best first",
    "among_two": "in two",
    "first_untied": "untied first",
    "among_two_untied": "in two",
    "domain_first": "domain first",
    "domain_among_two": "in two",
}


def table(found: Mapping[str, Any]) -> str:
    """Return what `training.predictor` reports as tables."""
    return "\n".join(_lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    for name, figures in found["sets"].items():
        tied = figures["tied_points"] / figures["points"]
        yield (
            f"{name}: {figures['prompts']} prompts, {figures['points']} scheduling points, "
            f"several drafts best at {tied:.0%} of them ({figures['best_drafts_a_point']:.2f} "
            "a point)"
        )
        yield from aligned([["ranking", *_COLUMNS.values(), "tokens"], *_rows(figures["rows"])])
        yield ""
        yield f"{found['chosen']}, by domain"
        domains = figures["domains"][found["chosen"]]
        yield from aligned([["domain", *_COLUMNS.values(), "tokens"], *_rows(domains)])
        yield ""
    yield LEGEND


def _rows(rows: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, row in rows.items():
        shares = (f"{100 * row[key][0]:.1f}" if key in row else "" for key in _COLUMNS)
        value, lower, upper = row["tokens_an_iteration"]
        yield [name, *shares, f"{value:.3f} [{lower:.3f}, {upper:.3f}]"]
