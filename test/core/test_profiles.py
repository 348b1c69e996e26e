"""Hardware profiles: those that come along, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memspec_core.errors import ProfileError
from memspec_core.evaluation.profiles import (
    FOLDER,
    load_profile,
    parse_profile,
    profile_names,
    write_profile,
)


def fields(name: str = "orin_nano") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", profile_names())
def test_the_profiles_that_come_along(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert 0.1 < profile.load_seconds / profile.iteration_seconds(4) < 20
    for number in fields(name)["numbers"].values():
        assert len(number["source"]) > 20


def test_the_papers_board_has_the_papers_ratio() -> None:
    assert set(profile_names()) == {"agx_orin", "orin_nano", "orin_nano_super", "two_cores"}
    profile = load_profile("orin_nano")
    assert profile.load_seconds / profile.iteration_seconds(4) == pytest.approx(2.7, abs=1e-3)


def test_the_lean_board_decodes_plainly_at_the_published_rate() -> None:
    assert 1 / load_profile("orin_nano_super").iteration_seconds(0) == pytest.approx(21.75, 1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draft_bytes", -1),
        ("draft_bytes", "8e8"),
        ("draft_bytes", True),
        ("storage_bytes_per_second", 0),
        ("memory_bytes_per_second", 1e20),
        ("load_slowdown", 0.5),
        ("draft_step_seconds", None),
        ("prediction_seconds", float("nan")),
        ("verify_seconds", 0.1),
        ("verify_seconds", [0.1]),
        ("verify_seconds", [0.1, -0.2]),
        ("verify_seconds", [0.2, 0.1]),
        ("verify_seconds", [0.1, "x"]),
    ],
)
def test_a_number_that_cannot_be_is_named(name: str, value: object) -> None:
    bad = fields()
    bad["numbers"][name]["value"] = value
    with pytest.raises(ProfileError, match=name):
        parse_profile(bad, "board.json")


def test_what_is_missing_or_unknown_is_named() -> None:
    for name in fields()["numbers"]:
        bad = fields()
        del bad["numbers"][name]
        with pytest.raises(ProfileError, match=f"{name} is missing"):
            parse_profile(bad, "board.json")
        bad = fields()
        del bad["numbers"][name]["source"]
        with pytest.raises(ProfileError, match=f"{name}: source is missing"):
            parse_profile(bad, "board.json")
        bad["numbers"][name] = 3
        with pytest.raises(ProfileError, match=f"{name} is no JSON object"):
            parse_profile(bad, "board.json")
    bad = fields()
    bad["numbers"]["draft_byte"] = bad["numbers"]["draft_bytes"]
    with pytest.raises(ProfileError, match="unknown number 'draft_byte'"):
        parse_profile(bad, "board.json")
    with pytest.raises(ProfileError, match="name is missing"):
        parse_profile(fields() | {"name": ""}, "board.json")
    with pytest.raises(ProfileError, match="numbers is no JSON object"):
        parse_profile({"name": "x", "description": "y"}, "board.json")
    with pytest.raises(ProfileError, match="the file is no JSON object"):
        parse_profile([], "board.json")


def test_drafts_of_their_own() -> None:
    own = {"general_only": {"draft_step_seconds": {"value": 0.09, "source": "measured here"}}}
    profile = parse_profile(fields() | {"drafts": own}, "board.json")
    assert profile.of("general_only").draft_step_seconds == 0.09
    assert profile.of("general_only").load_seconds == profile.load_seconds
    assert profile.of("code") == profile
    for wrong, words in (
        ({"x": {"verify_seconds": {"value": [1, 2], "source": "s"}}}, "number 'verify_seconds'"),
        ({"x": {"draft_bytes": {"value": -1, "source": "s"}}}, "x: draft_bytes is -1"),
        ({"x": 3}, "x: the draft's numbers is no JSON object"),
    ):
        with pytest.raises(ProfileError, match=words):
            parse_profile(fields() | {"drafts": wrong}, "board.json")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="neither a file nor one of agx_orin"):
        load_profile("orin")
    own = tmp_path / "own.json"
    own.write_text(json.dumps(fields() | {"name": "own"}))
    assert load_profile(str(own)).name == "own"
    own.write_text(own.read_text()[:100])
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(str(own))


def test_passes_of_more_rows_than_are_known() -> None:
    profile = load_profile("orin_nano")
    with pytest.raises(ProfileError, match="draft_length is 16"):
        profile.iteration_seconds(16)


def test_a_profile_that_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    own = {"code": {"draft_step_seconds": 0.09}}
    profile = replace(load_profile("orin_nano"), name="mine", drafts=own)
    sources = dict.fromkeys((*fields()["numbers"], "drafts"), "measured here")
    write_profile(profile, sources, tmp_path / "mine.json")
    assert load_profile(str(tmp_path / "mine.json")) == profile
