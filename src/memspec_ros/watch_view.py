"""How the command `watch` shows a node: its state in a line, and a panel for each status."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from diagnostic_msgs.msg import DiagnosticStatus
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from memspec_msgs.msg import RuntimeStatus

COLUMNS = 3
STALE_SECONDS = 5.0
"""A node that said nothing for so long is shown as stale, as the aggregator does."""

LEVELS = {
    DiagnosticStatus.OK: ("OK", "green"),
    DiagnosticStatus.WARN: ("WARN", "yellow"),
    DiagnosticStatus.ERROR: ("ERROR", "red"),
    DiagnosticStatus.STALE: ("STALE", "blue"),
}


@dataclass
class Seen:
    """What was last heard of a node; `heard_at` is when its diagnostics came, in seconds."""

    statuses: list[DiagnosticStatus] = field(default_factory=list)
    runtime: RuntimeStatus | None = None
    heard_at: float = 0.0


def view(node_name: str, seen: Seen, now: float) -> RenderableType:
    """Return what a terminal shows at the time `now`, in seconds."""
    silent = now - seen.heard_at
    lines = [_headline(node_name, seen.runtime)]
    if not seen.statuses:
        return Group(*lines, Text("No diagnostics yet."))
    if silent > STALE_SECONDS:
        lines.append(Text(f"STALE: nothing was heard for {silent:.0f} s.", "bold blue"))
    return Group(*lines, *(_panel(status) for status in seen.statuses))


def _headline(node_name: str, runtime: RuntimeStatus | None) -> Text:
    line = Text.assemble((node_name, "bold"))
    if runtime is None:
        return line
    line.append(f"  {runtime.lifecycle_state}", "bold")
    for label, value in _facts(runtime):
        line.append(f"  {label} ", "dim").append(value)
    return line


def _facts(runtime: RuntimeStatus) -> Sequence[tuple[str, str]]:
    if not runtime.strategy:
        return ()
    return (
        ("strategy", runtime.strategy),
        ("resident", ", ".join(runtime.resident) or "-"),
        ("active", runtime.active or "-"),
        ("wanted", runtime.wanted or "-"),
        ("queue", f"{runtime.queue_length} of {runtime.queue_capacity}"),
    )


def _panel(status: DiagnosticStatus) -> Panel:
    word, colour = LEVELS.get(status.level, LEVELS[DiagnosticStatus.ERROR])
    part = status.name.rpartition(": ")[2]
    body: list[RenderableType] = []
    if status.message != word:
        body.append(Text(status.message, colour))
    body.append(_grid(status))
    title = Text.assemble((part, "bold"), " ", (word, f"bold {colour}"))
    return Panel(Group(*body), title=title, title_align="left", border_style=colour)


def _grid(status: DiagnosticStatus) -> Table:
    """Return the values, to be read down the columns."""
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for _ in range(COLUMNS):
        grid.add_column(ratio=1, overflow="fold")
    cells = [Text.assemble((f"{v.key} ", "dim"), v.value or "-") for v in status.values]
    rows = -(-len(cells) // COLUMNS)
    for row in range(rows):
        grid.add_row(*cells[row::rows])
    return grid
