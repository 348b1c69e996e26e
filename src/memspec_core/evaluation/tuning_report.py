"""What tuning came to: as JSON, as a table, and as a file of parameters for the node."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from memspec_core.evaluation.demand import HELD_ENOUGH, Demand
from memspec_core.evaluation.profiles import Profile
from memspec_core.evaluation.tables import aligned
from memspec_core.evaluation.tuning import Tuned
from memspec_core.files import whole_file
from memspec_core.settings import MIB

FEW = 20
"""Prompts from which on an interval over them can be relied on."""

SHOWN = 5
"""Combinations that the table shows, of those that were tried."""


def as_json(tuned: Tuned) -> dict[str, Any]:
    """Return all that was found; a gain that cannot be measured is null."""
    fields = asdict(tuned)
    for worth in fields["worth"]:
        worth["gain"] = [None if math.isnan(value) else value for value in worth["gain"]]
    found: dict[str, Any] = json.loads(json.dumps(fields))
    return found


def table(tuned: Tuned, profile: Profile) -> str:
    """Return what was chosen and what it is expected to gain."""
    best = sorted(tuned.considered, key=lambda one: -one[1])[:SHOWN]
    lines = [
        f"On {profile.name}, the fastest of {len(tuned.considered)} combinations (tokens/s):",
        *aligned([[_named(point), f"{speed:.2f}"] for point, speed in best]),
        "",
        f"Chosen: {_named(tuned.parameters)}. Expected, on {tuned.prompts} prompts that nothing",
        "was chosen by (95 % intervals):",
        *aligned(
            [
                [f"over {_named(tuned.before)}", _interval(tuned.over_before)],
                ["over the general draft alone", _interval(tuned.over_general_static)],
                ["tokens/s", f"{tuned.tokens_per_second:.2f}"],
                ["fallback", f"{100 * tuned.fallback:.1f} %"],
            ]
        ),
        "",
        *aligned(
            [
                ["draft", "MiB", "what it adds to those that are kept", ""],
                *(
                    [
                        worth.draft,
                        f"{profile.of(worth.draft).draft_bytes / MIB:.1f}",
                        _interval(worth.gain),
                        "kept" if worth.kept else "left out",
                    ]
                    for worth in tuned.worth
                ),
            ]
        ),
    ]
    if tuned.prompts < FEW:
        lines += ["", f"{tuned.prompts} prompts are few; trace more for a choice to rely on."]
    if tuned.is_slower:
        lines += ["", "It is slower than the parameters as they were; keep those."]
    return "\n".join(lines)


def demand_table(demand: Demand) -> str:
    """Return what a record of decisions says, and what it does not."""
    lines = [
        f"{demand.points} scheduling points in {demand.answers} answers, "
        f"{demand.tokens_between:.1f} tokens apart.",
        f"At {100 * demand.changes:.1f} % of them another draft ranked first than at the one "
        f"before; at {100 * demand.fallback:.1f} % another ran than was wanted.",
        "",
        *aligned(
            [
                ["draft", "ranked first"],
                *([name, f"{100 * share:.1f} %"] for name, share in demand.wanted.items()),
            ]
        ),
        "",
        *aligned(
            [
                ["K", "points whose first draft was among the K best before"],
                *([str(k), f"{100 * share:.1f} %"] for k, share in demand.held.items()),
            ]
        ),
        "",
        f"Chosen: K {demand.capacity}, the smallest that holds {100 * HELD_ENOUGH:.0f} %, and the "
        f"drafts {', '.join(demand.worthwhile)}.",
        "What drafts gain, and so N, gamma and T, a record does not say: trace the prompts.",
    ]
    return "\n".join(lines)


def write_parameters(parameters: Mapping[str, Any], path: Path) -> None:
    """Write a parameter file for the node, whole or not at all."""
    tree: dict[str, Any] = {}
    for name, value in sorted(parameters.items()):
        *sections, last = name.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[last] = value
    text = yaml.safe_dump({"/**": {"ros__parameters": tree}}, sort_keys=False)
    with whole_file(path) as file:
        file.write(b"# Written by memspec tune.\n" + text.encode())


def _named(parameters: Mapping[str, Any]) -> str:
    short = {
        "resident_capacity": "K",
        "scheduling_interval": "N",
        "draft_length": "gamma",
        "recent_tokens": "T",
    }
    return ", ".join(
        f"{letter} {parameters[name]}" for name, letter in short.items() if name in parameters
    )


def _interval(ends: tuple[float, float, float]) -> str:
    mean, low, high = ends
    return "-" if math.isnan(mean) else f"{mean:.3f} ({low:.3f} to {high:.3f})"
