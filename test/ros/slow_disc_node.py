"""The node over a disc that is as slow as a test wants it to be."""

import time

from memspec_core.models.draft import DraftPlan
from memspec_ros.node import main

HOLD = "hold"
"""A draft is not loaded while a file of this name lies in its folder."""

load_feature = DraftPlan.load_feature


def slow_load(plan, *arguments):
    while (plan.path / HOLD).exists():
        time.sleep(0.01)
    return load_feature(plan, *arguments)


if __name__ == "__main__":
    DraftPlan.load_feature = slow_load
    raise SystemExit(main())
