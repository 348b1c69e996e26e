"""What is written beside a timeline, in the picture and on the page."""

from memspec_core.evaluation.timeline import Timeline
from memspec_core.request import PLAIN

RUNS, RESIDENT, LOADING, WANTED = "runs", "in memory", "loading", "wanted"
FALLBACK = "fallback: the wanted draft is not in memory yet"
POINT = "scheduling point"
WAIT = "decoding waits for a load"

LINE_CHARACTERS = 110
"""So many letters fit into one line of the picture."""


def title(timeline: Timeline, most: int = 2 * LINE_CHARACTERS) -> str:
    """Return what was asked, of `most` characters at the most."""
    beginning = timeline.beginning
    asked = " ".join(beginning.prompt.split())
    if beginning.profile:
        return f"{beginning.strategy} on a prompt of {asked}, simulated: {beginning.profile}"
    return f"“{asked if len(asked) <= most else asked[: most - 1] + '…'}”"


def summary(timeline: Timeline) -> str:
    """Return with what settings it ran, and what came of it, on one line."""
    beginning = timeline.beginning
    iterations = len(timeline.steps)
    parts = [
        f"strategy {beginning.strategy}",
        f"K = {beginning.resident_capacity} of {len(beginning.drafts)} drafts in memory",
        f"N = {beginning.scheduling_interval}",
        f"γ = {beginning.draft_length}" if beginning.draft_length else "γ as it pays",
        f"{timeline.tokens} tokens in {iterations} iterations "
        f"({timeline.tokens / iterations:.2f} each)",
        f"{_percent(timeline.fallback_share)} of the time in fallback",
    ]
    if timeline.wait_share:
        parts.append(f"{_percent(timeline.wait_share)} waiting for loads")
    if timeline.finish_reason is None:
        parts.append("cut off")
    return ", ".join(parts)


def row_label(row: str) -> str:
    """Return the name of a row."""
    return "no draft" if row == PLAIN else row


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
