"""The files of config/ agree with the node's own parameters."""

import re
import xml.dom.minidom

import pytest
from ros_harness import ROOT

from memspec_core.settings import PARAMETERS, Settings, read_parameters

CONFIG = ROOT / "config"
TEXT = (CONFIG / "memspec.yaml").read_text(encoding="utf-8")


def comment_of(parameter):
    """Return the comment right above the parameter's line."""
    key = parameter.name.split(".")[-1]
    indent = "    " * (1 + parameter.name.count("."))
    lines = TEXT.splitlines()
    pattern = re.compile(rf" {{{4 + 2 * parameter.name.count('.')}}}{key}:")
    places = [n for n, line in enumerate(lines) if pattern.match(line)]
    assert places, f"{parameter.name} is not in memspec.yaml ({indent!r})"
    above = []
    for line in reversed(lines[: places[0]]):
        if not line.strip().startswith("#"):
            break
        above.append(line.strip("# "))
    return " ".join(reversed(above))


def test_the_default_file_holds_the_defaults():
    given = read_parameters(CONFIG / "memspec.yaml")

    assert {p.name: p.default for p in PARAMETERS} == {
        name: value for name, value in given.items() if not name.endswith("general.path")
    }
    assert Settings.from_parameters(given) == Settings.from_parameters()


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_every_parameter_is_explained(parameter):
    comment = comment_of(parameter)

    assert len(comment) > 30
    assert ("Fixed at configure." in comment) == parameter.read_only
    assert ("Run time." in comment) != parameter.read_only
    if parameter.minimum is not None:
        assert f"Range: {parameter.minimum} to {parameter.maximum}." in comment
    if parameter.choices:
        assert f"One of: {', '.join(parameter.choices)}." in comment


@pytest.mark.parametrize("board", ["orin_nano", "agx_orin"])
def test_the_files_for_boards_are_valid(board):
    settings = Settings.from_parameters(read_parameters(CONFIG / f"{board}.yaml"))

    assert settings.device == "cuda"
    assert settings.memory_budget_mib > 0


def test_the_policy_is_well_formed():
    policy = xml.dom.minidom.parse(str(CONFIG / "memspec_policy.xml"))

    assert policy.documentElement.tagName == "policy"
