"""The short form of the soak: counts that must agree, and nothing left behind."""

from soak import STORM, soak


def test_a_short_soak(tmp_path):
    report = soak(goals=96, cycles=2, starts=1, folder=tmp_path)
    counts = report["counts"]

    ended = sum(counts[end] for end in ("succeeded", "cancelled", "aborted", "rejected"))
    assert ended == counts["goals"] > 96 + STORM
    assert counts["cancels"] >= counts["cancelled"] > 0
    assert counts["rejected"] > 0
    assert counts.get("ended by a fault", 0) <= counts.get("faults injected", 0)
    assert counts.get("bad ends", 0) == 0
    assert report["tracebacks_beside_faults"] == 0
    # Far above what varies, and far below what a leak of each goal or client would come to.
    assert report["after"]["mib"] < report["before"]["mib"] + 100
    assert report["after"]["descriptors"] < report["before"]["descriptors"] + 20
    assert report["after"]["threads"] < report["before"]["threads"] + 40
    assert max(report["mib_after_cleanup"]) < report["before"]["mib"]
