"""The record of generations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from core.test_decisions import DECISION
from memspec_core.errors import RecordError, SettingsError
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.measurement.record import (
    PROMPT_CHARACTERS,
    Beginning,
    RecordedGeneration,
    RecordedIteration,
    RecordWriter,
    read_record,
)
from memspec_core.request import FinishReason
from memspec_core.settings import Settings

BEGINNING = Beginning.of("Why?", [1, 2], "memspec", Settings.from_parameters())
ITERATION = Iteration(
    sequence=0,
    draft="math",
    wanted="code",
    proposed=3,
    accepted=1,
    committed=2,
    token_ids=(7, 8),
    text="So é",
    generated_tokens=6,
    seconds=IterationSeconds(decode=0.25, prediction=0.001),
)
LAST = replace(
    ITERATION, sequence=1, generated_tokens=8, finish_reason=FinishReason.END_OF_SEQUENCE
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A record of one generation."""
    path = tmp_path / "record.jsonl"
    write(path)
    return path


def write(path: Path) -> None:
    writer = RecordWriter(path)
    writer.begin(BEGINNING)
    writer.decision(DECISION)
    writer.iteration(ITERATION, 1.75, {"math": object()}, ("code",))
    writer.iteration(LAST, 2.0, ("math", "code"), ())


WHOLE = RecordedGeneration(
    BEGINNING,
    (
        DECISION,
        RecordedIteration(1.75, ("math",), ("code",), ITERATION),
        RecordedIteration(2.0, ("math", "code"), (), LAST),
    ),
)


def test_what_is_written_is_read(path: Path) -> None:
    assert read_record(path) == [WHOLE]
    assert WHOLE.finish_reason is FinishReason.END_OF_SEQUENCE
    assert WHOLE.iterations == WHOLE.events[1:]
    write(path)
    assert read_record(path) == [WHOLE, WHOLE]


def test_the_beginning_says_what_ran() -> None:
    settings = Settings.from_parameters({"resident_capacity": 3, "lookup": False})
    beginning = Beginning.of("x" * 1000, [1, 2], "mab_async", settings, "orin_nano")
    assert len(beginning.prompt) == PROMPT_CHARACTERS
    assert (beginning.resident_capacity, beginning.lookup) == (3, False)
    assert beginning.prompt_sha256 == BEGINNING.prompt_sha256
    assert beginning.drafts == settings.draft_names
    assert (beginning.strategy, beginning.profile) == ("mab_async", "orin_nano")


@pytest.mark.parametrize("lost", [1, 30, 200])
def test_a_record_that_was_cut_off_gives_what_was_whole(
    path: Path, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(path.read_bytes()[: -1 - lost])
    (generation,) = read_record(path)
    assert generation == replace(WHOLE, events=WHOLE.events[:2])
    assert generation.finish_reason is None
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning == f"The record {path} was cut off in line 4, which is left out"


def test_one_goes_on_after_a_cut(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(path.read_bytes()[:-50] + b"\x00" * 20)  # as some file systems leave it
    write(path)
    cut, whole = read_record(path)
    assert (len(cut.events), whole) == (2, WHOLE)
    assert len(caplog.records) == 1


GONE = "gone"


def changed(path: Path, number: int, **values: object) -> None:
    """Change fields of a line; `GONE` takes one away."""
    lines = path.read_text().splitlines()
    fields = json.loads(lines[number - 1]) | values
    lines[number - 1] = json.dumps({name: v for name, v in fields.items() if v != GONE})
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("number", "values", "words"),
    [
        (1, {"line": "poem"}, "'poem' is no kind of line"),
        (1, {"line": GONE}, "does not say which kind"),
        (1, {"version": 2}, "format 2; 1 is supported"),
        (1, {"drafts": "code"}, "its drafts is 'code'"),
        (1, {"colour": 1}, "unknown fields: colour"),
        (2, {"place": GONE}, "unknown fields: place"),
        (2, {"scores": {"code": "much"}}, "its scores is"),
        (3, {"accepted": 1.5}, "its accepted is 1.5"),
        (3, {"generated_tokens": True}, "its generated_tokens is True"),
        (3, {"seconds": {}}, "unknown fields"),
        (3, {"seconds": 3}, "unknown fields"),
        (3, {"resident": GONE}, "resident"),
        (4, {"finish_reason": "BORED"}, "BORED"),
        (4, {"at_seconds": 0.5}, "earlier than the line before"),
        (4, {"at_seconds": float("nan")}, "earlier than the line before"),
    ],
)
def test_a_line_of_something_else_is_refused_with_its_number(
    path: Path, number: int, values: dict[str, object], words: str
) -> None:
    changed(path, number, **values)
    with pytest.raises(RecordError, match=f"^Line {number} of {path} .*{words}"):
        read_record(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no generation"),
        (b"\n\n", "no generation"),
        (b"# A README\n", "Line 1 .* no JSON"),
        (b"\x89PNG\r\n\x1a\n", "Line 1 .* no JSON"),
        (b"[1]\n", "Line 1 .* which kind"),
        (DECISION.to_json().encode() + b"\n", "a decision of decisions.path"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=words):
        read_record(path)
    with pytest.raises(RecordError, match="Cannot read"):
        read_record(tmp_path)


def test_a_broken_line_in_the_midst_of_a_generation_is_no_cut(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:-5], *lines[2:]]))
    with pytest.raises(RecordError, match=r"Line 2 .* no JSON"):
        read_record(path)


def test_events_before_any_generation_are_refused(path: Path) -> None:
    path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[1:]))
    with pytest.raises(RecordError, match=r"Line 1 .* before any generation"):
        read_record(path)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"Generations cannot be recorded in {tmp_path}"):
        RecordWriter(tmp_path)
