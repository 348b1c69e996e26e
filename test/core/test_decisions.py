"""The record of scheduling decisions."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspec_core.errors import SettingsError
from memspec_core.measurement.decisions import (
    Decision,
    decision_writer,
    digest_of_prompt,
    hash_of_context,
)

DECISION = Decision(
    at_seconds=1.5,
    context_hash=hash_of_context(digest_of_prompt([1, 2]), [3]),
    place=4,
    strategy="memspec",
    scores={"code": 0.75, "math": 0.25},
    resident=("math",),
    loading=("code",),
    wanted="code",
    active="math",
    prediction_seconds=0.001,
    load_wait_seconds=0.0,
)


def test_a_line_is_the_decision() -> None:
    assert Decision.from_json(DECISION.to_json()) == DECISION
    assert "\n" not in DECISION.to_json()


@given(st.integers(0, len(DECISION.to_json()) - 1))
def test_a_line_that_was_cut_off_is_refused(length: int) -> None:
    with pytest.raises(ValueError):
        Decision.from_json(DECISION.to_json()[:length])


@pytest.mark.parametrize("line", ["[]", "{}", "3", '{"place": 1}'])
def test_other_records_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not the record of a decision"):
        Decision.from_json(line)


def test_the_hash_tells_contexts_apart() -> None:
    assert len(DECISION.context_hash) == 16
    assert hash_of_context(digest_of_prompt([1, 2]), [3]) == DECISION.context_hash
    assert hash_of_context(digest_of_prompt([1, 2]), [4]) != DECISION.context_hash


def test_lines_are_appended_and_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    for _ in range(2):
        write = decision_writer(path)
        write(DECISION)
        assert Decision.from_json(path.read_text().splitlines()[-1]) == DECISION
    assert len(path.read_text().splitlines()) == 2


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"recorded in {tmp_path}"):
        decision_writer(tmp_path)


def test_a_full_disc_ends_the_record_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    write = decision_writer(full)
    write(DECISION)
    write(DECISION)

    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith("Decisions are no longer recorded in /dev/full")
