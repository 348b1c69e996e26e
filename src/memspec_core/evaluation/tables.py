"""Tables as plain text."""

from collections.abc import Iterable, Iterator, Sequence


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with columns as wide as they must be."""
    table_rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*table_rows, strict=True)]
    for row in table_rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()
