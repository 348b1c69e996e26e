"""The limits of the soak find what they are for."""

import copy

import pytest
from soak_limits import violations


def times(milliseconds):
    return {"number": 100, "p50": milliseconds, "p99": milliseconds, "most": milliseconds}


GOOD = {
    "counts": {"goals": 10, "succeeded": 4, "cancelled": 3, "aborted": 1, "rejected": 2},
    "milliseconds": {
        "accept": times(400.0),  # of many clients in one process, which is no limit
        "accept, one client": times(6.0),
        "cancel, one client": times(31.0),
        "iteration": times(2.0),
        "deactivate": times(88.0),
        "exit": times(800.0),
        "exit in mid-goal": times(420.0),
    },
    "before": {"mib": 706.0, "threads": 47, "descriptors": 19},
    "after": {"mib": 717.0, "threads": 49, "descriptors": 19},
    "mib_over_the_goals": [706.0, 717.0, 717.0],
    "mib_after_cleanup": [342.0, 349.0],
    "tracebacks_beside_faults": 0,
}

BAD = {
    "1 of 10 goals did not end": ("counts", "succeeded", 3),
    "2 processes ended": ("counts", "bad ends", 2),
    "3 tracebacks": ("tracebacks_beside_faults", 3),
    "40 more threads": ("after", "threads", 87),
    "20 more descriptors": ("after", "descriptors", 39),
    "from 706 to 730 MiB": ("mib_over_the_goals", [706.0, 730.0, 717.0]),
    "from 342 to 360 MiB": ("mib_after_cleanup", [342.0, 360.0]),
    "accept, one client: p99 is 51 ms": ("milliseconds", "accept, one client", times(51.0)),
    "cancel, one client: p99 is 33 ms": ("milliseconds", "cancel, one client", times(33.0)),
    "deactivate: most is 501 ms": ("milliseconds", "deactivate", times(501.0)),
    "exit: most is 2100 ms": ("milliseconds", "exit", times(2100.0)),
    "exit in mid-goal: most is 2100 ms": ("milliseconds", "exit in mid-goal", times(2100.0)),
}


def test_a_good_report_violates_nothing():
    assert violations(GOOD) == []


def test_what_was_not_measured_is_no_violation():
    short = copy.deepcopy(GOOD)
    del short["milliseconds"]["exit"]
    assert violations(short | {"mib_after_cleanup": []}) == []


@pytest.mark.parametrize("said", BAD)
def test_each_excess_is_told_alone(said):
    *path, last, value = BAD[said]
    report = copy.deepcopy(GOOD)
    part = report
    for key in path:
        part = part[key]
    part[last] = value

    (told,) = violations(report)
    assert said in told
