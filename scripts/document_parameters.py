#!/usr/bin/env python3
"""Write docs/parameters.md from the declarations of the parameters, for `make parameters`."""

import json
from pathlib import Path

from memspec_core.settings import PARAMETERS, Parameter, draft_path_parameter

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parameters.md"

HEAD = """\
# Parameters of the node

Made by `make parameters` from the declarations in
[settings.py](../src/memspec_core/settings.py); do not edit. The same parameters, with more about
when to change them, as a file to start from: [memspec.yaml](../config/memspec.yaml).

*Fixed* ones may be set until the node is configured; *run time* ones at any moment. Texts have at
most 4,096 bytes. `memspec --config` reads the same files as the node.

| name | type | default | range | change | meaning |
|---|---|---|---|---|---|
"""

TYPES = {bool: "bool", int: "integer", float: "double", str: "string", list: "string array"}


def page() -> str:
    """Return the whole page."""
    names = next(i for i, p in enumerate(PARAMETERS) if p.name == "drafts.names")
    path = draft_path_parameter("<name>")
    listed = [*PARAMETERS[: names + 1], path, *PARAMETERS[names + 1 :]]
    return HEAD + "".join(f"{_row(parameter)}\n" for parameter in listed)


def _row(parameter: Parameter) -> str:
    cells = (
        f"`{parameter.name}`",
        TYPES[type(parameter.default)],
        f"`{json.dumps(parameter.default)}`",
        _range(parameter),
        "fixed" if parameter.read_only else "run time",
        parameter.description.replace("|", r"\|").replace("<", r"\<"),
    )
    return f"| {' | '.join(cells)} |"


def _range(parameter: Parameter) -> str:
    if parameter.choices:
        return ", ".join(f"`{choice}`" for choice in parameter.choices)
    if parameter.minimum is None or parameter.maximum is None:
        return ""
    return f"{parameter.minimum:,} to {parameter.maximum:,}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
