"""The short form of the soak: counts that must agree, and nothing left behind.

Its times are no test, nor is the growth while what is kept fills: the machine may be busy.
"""

from soak import STORM, soak
from soak_limits import left_behind, miscounted


def test_a_short_soak(tmp_path):
    report = soak(goals=96, cycles=2, starts=1, folder=tmp_path)
    counts = report["counts"]

    assert [*miscounted(report), *left_behind(report)] == []
    assert counts["goals"] > 96 + STORM
    assert counts["succeeded"] > 0
    assert counts["cancels"] >= counts["cancelled"] > 0
    assert counts["rejected"] > 0
    assert counts.get("ended by a fault", 0) <= counts.get("faults injected", 0)
    # Far above what varies, and far below what a leak of each goal or client would come to.
    assert report["after"]["mib"] < report["before"]["mib"] + 100
    assert max(report["mib_after_cleanup"]) < report["before"]["mib"]
