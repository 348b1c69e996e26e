"""All parameters: types, ranges, names, and what may change while running."""

import math
from pathlib import Path

import pytest

from memspec_core.errors import SettingsError
from memspec_core.request import MAX_DRAFT_NAME_BYTES
from memspec_core.settings import (
    MAX_DRAFTS,
    MAX_TEXT_BYTES,
    PARAMETERS,
    Parameter,
    Settings,
    read_parameters,
)

NUMBERS = [p for p in PARAMETERS if type(p.default) in (int, float)]
IDS = {"ids": lambda parameter: parameter.name}


def refused(**values: object) -> str:
    with pytest.raises(SettingsError) as error:
        Settings.from_parameters({name.replace("__", "."): v for name, v in values.items()})
    return str(error.value)


def test_the_defaults_are_in_their_own_ranges() -> None:
    settings = Settings.from_parameters()
    assert settings.draft_names == ("general", "code", "math", "medical", "law", "robot")
    for parameter in PARAMETERS:
        assert parameter.check(parameter.default) == parameter.default
        assert parameter.description


@pytest.mark.parametrize("parameter", NUMBERS, **IDS)
def test_ranges_are_inclusive_and_bound(parameter: Parameter) -> None:
    assert parameter.minimum is not None
    assert parameter.maximum is not None
    kind = type(parameter.default)
    low, high = kind(parameter.minimum), kind(parameter.maximum)
    for value in (low, high):
        field = parameter.name.replace(".", "_")
        assert getattr(Settings.from_parameters({parameter.name: value}), field) == value
    step = 1 if kind is int else 0.001
    for value in (low - step, high + step, -(10**30), 10**400 if kind is int else 1e300):
        said = refused(**{parameter.name: value})
        assert parameter.name in said


@pytest.mark.parametrize("parameter", PARAMETERS, **IDS)
def test_values_of_a_wrong_type(parameter: Parameter) -> None:
    wrong: list[object] = [None, {}, b"x", math.nan, math.inf, -math.inf, 1.5, "seven", True, [1]]
    for value in wrong:
        if type(value) is type(parameter.default) and value not in (math.nan, math.inf):
            continue
        if isinstance(parameter.default, str) and isinstance(value, str):
            continue
        if isinstance(parameter.default, float) and value == 1.5:
            continue
        assert parameter.name in refused(**{parameter.name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400], ids=lambda _: "")
def test_numbers_that_are_none(value: float) -> None:
    for parameter in NUMBERS:
        assert parameter.name in refused(**{parameter.name: value})


def test_a_whole_number_will_do_for_a_real_one() -> None:
    settings = Settings.from_parameters({"diagnostics_period": 2})
    assert settings.diagnostics_period == 2.0
    assert isinstance(settings.diagnostics_period, float)


@pytest.mark.parametrize("name", ["resident_capacity", "scheduling_interval"])
def test_k_and_n_of_zero(name: str) -> None:
    assert name in refused(**{name: 0})


@pytest.mark.parametrize(
    ("name", "value"),
    [("strategy", "oracle"), ("dtype", "int3"), ("draft_shape", "bush"), ("strategy", "")],
)
def test_unknown_choices_name_the_known_ones(name: str, value: str) -> None:
    said = refused(**{name: value})
    choices = next(p.choices for p in PARAMETERS if p.name == name)
    assert f"'{value}'" in said
    assert all(choice in said for choice in choices)


@pytest.mark.parametrize("name", ["resident_capacityy", "drafts.general", "target", ""])
def test_unknown_names(name: str) -> None:
    assert f"'{name}'" in refused(**{name: 1})


def test_drafts_and_their_paths() -> None:
    settings = Settings.from_parameters(
        {"drafts.names": ("general", "code"), "drafts.code.path": "/models/code"}
    )
    assert settings.draft_names == ("general", "code")
    assert [draft.path for draft in settings.drafts] == ["default", "/models/code"]
    assert Settings.from_parameters({"drafts.names": []}).drafts == ()


@pytest.mark.parametrize(
    "names", [["a", "a"], ["none"], ["a.b"], ["1a"], ["a b"], ["_a"], "general", [1]]
)
def test_draft_names_that_cannot_be(names: object) -> None:
    assert "drafts.names" in refused(drafts__names=names)


@pytest.mark.parametrize(
    "parameter", [p for p in PARAMETERS if isinstance(p.default, str) and not p.choices], **IDS
)
def test_texts_are_bound(parameter: Parameter) -> None:
    assert parameter.check("a" * MAX_TEXT_BYTES)
    said = refused(**{parameter.name: "é" * (MAX_TEXT_BYTES // 2 + 1)})
    assert f"{parameter.name} is longer than {MAX_TEXT_BYTES} bytes" in said


def test_drafts_and_their_names_are_bound() -> None:
    names = [f"a{i}" for i in range(MAX_DRAFTS + 1)]
    assert len(Settings.from_parameters({"drafts.names": names[:-1]}).drafts) == MAX_DRAFTS
    assert f"more than {MAX_DRAFTS} names" in refused(drafts__names=names)
    longest = "a" * MAX_DRAFT_NAME_BYTES
    assert Settings.from_parameters({"drafts.names": [longest]}).draft_names == (longest,)
    assert f"at most {MAX_DRAFT_NAME_BYTES}" in refused(drafts__names=[longest + "a"])


def test_duplicate_draft_names_are_said_to_be() -> None:
    assert "'a' twice" in refused(drafts__names=["a", "b", "a"])


def test_a_path_of_a_wrong_type() -> None:
    assert "drafts.code.path" in refused(**{"drafts.code.path": 7})


def test_what_may_change_while_running() -> None:
    settings = Settings.from_parameters()
    changed = settings.with_changes({"resident_capacity": 3, "draft_length": 5})
    assert (changed.resident_capacity, changed.draft_length) == (3, 5)
    assert settings.resident_capacity == 2
    assert changed.drafts == settings.drafts
    may_change = {parameter.name for parameter in PARAMETERS if not parameter.read_only}
    assert may_change == {
        "resident_capacity",
        "scheduling_interval",
        "recent_tokens",
        "draft_length",
        "fallback_warn_ratio",
        "memory.warn_ratio",
        "stream_period",
        "temperature_warn",
    }


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("target.path", "/x", "cannot change"),
        ("queue_size", 4, "cannot change"),
        ("draft_length", -1, "between"),
        ("draft_length", math.nan, "draft_length"),
        ("drafts.general.path", "/x", "Unknown|cannot change"),
        ("nonsense", 1, "Unknown"),
    ],
)
def test_changes_that_are_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Settings.from_parameters().with_changes({"recent_tokens": 9, name: value})


# The YAML of ROS 2


def read(tmp_path: Path, text: str) -> dict[str, object]:
    file = tmp_path / "params.yaml"
    file.write_text(text, encoding="utf-8")
    return read_parameters(file)


@pytest.mark.parametrize("node", ["memspec", "/memspec", "/robot/arm/memspec", "/**"])
def test_sections_that_count(node: str, tmp_path: Path) -> None:
    text = f"{node}:\n  ros__parameters:\n    draft_length: 4\n    target: {{path: /x}}\n"
    assert read(tmp_path, text) == {"draft_length": 4, "target.path": "/x"}


def test_dotted_and_nested_names_are_the_same(tmp_path: Path) -> None:
    dotted = read(tmp_path, "memspec:\n  ros__parameters:\n    drafts.a.path: /x\n")
    nested = read(tmp_path, "memspec:\n  ros__parameters:\n    drafts: {a: {path: /x}}\n")
    assert dotted == nested == {"drafts.a.path": "/x"}


def test_a_later_section_wins(tmp_path: Path) -> None:
    text = (
        "/**:\n  ros__parameters: {draft_length: 2, recent_tokens: 7}\n"
        "other_node:\n  ros__parameters: {draft_length: 9}\n"
        "memspec:\n  ros__parameters: {draft_length: 4}\n"
    )
    assert read(tmp_path, text) == {"draft_length": 4, "recent_tokens": 7}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just words",
        "- a\n- b\n",
        "memspec: 3\n",
        "memspec:\n  parameters: {a: 1}\n",
        "memspec:\n  ros__parameters: [1]\n",
        "other:\n  ros__parameters: {a: 1}\n",
        "memspec: {unclosed\n",
        "memspec:\n\t- tab",
        f"memspec: {{ros__parameters: {{draft_length: {'9' * 5000}}}}}\n",
        "memspec: !!python/object/apply:os.system ['true']\n",
    ],
    ids=range(11),
)
def test_files_without_parameters(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"params\.yaml"):
        read(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(SettingsError, match=str(path)):
            read_parameters(path)
    (tmp_path / "latin.yaml").write_bytes(b"memspec: \xff\n")
    with pytest.raises(SettingsError, match=r"latin\.yaml"):
        read_parameters(tmp_path / "latin.yaml")


def test_an_empty_name_stands_for_no_drafts_and_paths_of_others_are_passed_over() -> None:
    values = {"drafts.names": [""], "drafts.general.path": "/somewhere"}
    assert Settings.from_parameters(values).drafts == ()
