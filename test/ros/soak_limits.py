"""What a soak's report must keep to, whatever the machine; times hold for cores that are quiet."""

ENDS = ("succeeded", "cancelled", "aborted", "rejected")

FLAT_OVER_GOALS = 1.02
FLAT_OVER_CYCLES = 1.05
"""Most memory over that at the beginning."""

SPARE_THREADS = 8
"""The executor starts threads as goals come together, and keeps them."""

SPARE_DESCRIPTORS = 4
"""A participant that comes or goes is met over a socket or two."""

CANCEL_MILLISECONDS = 30.0
"""Beside the iteration that is under way."""

ACCEPT_MILLISECONDS = 50.0
DEACTIVATE_MILLISECONDS = 500.0
EXIT_MILLISECONDS = 2000.0


def violations(report):
    """Return a sentence for each limit that a report exceeds."""
    return [*miscounted(report), *left_behind(report), *grown(report), *slow(report)]


def miscounted(report):
    """Return what is wrong with how goals and processes ended."""
    counts = report["counts"]
    open_goals = counts["goals"] - sum(counts.get(end, 0) for end in ENDS)
    if open_goals:
        yield f"{open_goals} of {counts['goals']} goals did not end"
    if counts.get("bad ends"):
        yield f"{counts['bad ends']} processes ended with another code or a traceback"
    if report["tracebacks_beside_faults"]:
        yield f"{report['tracebacks_beside_faults']} tracebacks beside the injected faults"


def left_behind(report):
    """Return which threads and descriptors the goals left behind."""
    for what, spare in (("threads", SPARE_THREADS), ("descriptors", SPARE_DESCRIPTORS)):
        more = report["after"][what] - report["before"][what]
        if more > spare:
            yield f"{more} more {what} after the goals (limit {spare})"


def grown(report):
    """Return where the memory did not stay flat."""
    for over, limit in (
        ("mib_over_the_goals", FLAT_OVER_GOALS),
        ("mib_after_cleanup", FLAT_OVER_CYCLES),
    ):
        course = report[over]
        if course and max(course) > limit * course[0]:
            yield f"{over}: from {course[0]:.0f} to {max(course):.0f} MiB (limit x {limit:.2f})"


def slow(report):
    """Return what took longer than it may."""
    taken = report["milliseconds"]
    iteration = taken.get("iteration", {"p50": 0.0})["p50"]
    for what, share, limit in (
        ("accept, one client", "p99", ACCEPT_MILLISECONDS),
        ("cancel, one client", "p99", iteration + CANCEL_MILLISECONDS),
        ("deactivate", "most", DEACTIVATE_MILLISECONDS),
        ("exit in mid-goal", "most", EXIT_MILLISECONDS),
        ("exit", "most", EXIT_MILLISECONDS),
    ):
        # A short soak may have ended all its processes by SIGKILL.
        if what in taken and taken[what][share] > limit:
            yield f"{what}: {share} is {taken[what][share]:.0f} ms (limit {limit:.0f} ms)"
