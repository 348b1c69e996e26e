"""The timeline of a recorded generation: what it shows, as a picture and as a page."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from core.test_record import BEGINNING, write
from memspec_core.cli.main import main
from memspec_core.errors import RecordError
from memspec_core.evaluation.timeline import SECONDS, Span, Timeline, timeline
from memspec_core.evaluation.timeline_colours import colours_of, darker, paler
from memspec_core.evaluation.timeline_figure import draw
from memspec_core.evaluation.timeline_page import page
from memspec_core.evaluation.timeline_words import summary, title
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.measurement.decisions import Decision
from memspec_core.measurement.record import RecordedGeneration, RecordedIteration
from memspec_core.request import FinishReason

START = replace(BEGINNING, drafts=("math", "code"), prompt="Add $2$ & <b>3</b>")


def decision(at: float, place: int, wanted: str, active: str, **more: object) -> Decision:
    fields: dict[str, object] = {
        "at_seconds": at,
        "context_hash": "",
        "place": place,
        "strategy": "memspec",
        "scores": {wanted: 0.75, "law": float("nan")},
        "resident": (active,),
        "loading": () if wanted == active else (wanted,),
        "wanted": wanted,
        "active": active,
        "prediction_seconds": 0.5,
        "load_wait_seconds": 0.0,
    }
    return Decision(**fields | more)  # type: ignore[arg-type]


def iteration(
    at: float, tokens: int, draft: str, wanted: str = "", text: str = " a<b", **more: float
) -> RecordedIteration:
    made = Iteration(
        sequence=0,
        draft=draft,
        wanted=wanted or draft,
        proposed=3,
        accepted=1,
        committed=2,
        token_ids=(),
        text=text,
        generated_tokens=tokens,
        seconds=IterationSeconds(**{"decode": 1.0} | more),
    )
    return RecordedIteration(at, (draft,), () if made.wanted == draft else (wanted,), made)


def landed(event: RecordedIteration) -> RecordedIteration:
    return replace(event, resident=(*event.resident, *event.loading), loading=())


FALLBACK = (
    decision(10.0, 0, "math", "math"),
    iteration(11.0, 2, "math", prompt=5.0, load_wait=3.0),
    iteration(12.0, 4, "math"),
    decision(12.5, 4, "code", "math"),
    iteration(13.5, 6, "math", "code", prediction=0.5),
    landed(iteration(14.5, 8, "math", "code")),
    decision(14.5, 8, "code", "code", resident=("math", "code")),
    iteration(15.5, 10, "code"),
)
"""Math runs, code is wanted, and lands in the second iteration of fallback."""

WAIT = (
    decision(10.0, 0, "math", "math"),
    iteration(11.0, 2, "math"),
    decision(14.0, 2, "code", "code", load_wait_seconds=3.0, prediction_seconds=0.0),
    iteration(15.0, 4, "code", load_wait=3.0),
)
"""Decoding stops for three seconds until code is loaded."""


def laid_out(events: Sequence[Decision | RecordedIteration], axis: str = "tokens") -> Timeline:
    return timeline(RecordedGeneration(START, tuple(events)), axis)


def test_along_tokens() -> None:
    found = laid_out(FALLBACK)
    assert found.rows == ("math", "code")
    assert [step.span for step in found.steps] == [Span(n, n + 2) for n in (0, 2, 4, 6, 8)]
    assert found.points == (0, 4, 8)
    assert list(found.runs()) == [("math", Span(0, 8)), ("code", Span(8, 10))]
    assert list(found.wanted_runs()) == [("math", Span(0, 4)), ("code", Span(4, 10))]
    assert found.fallback == (Span(4, 8),)
    assert found.loading == {"code": (Span(4, 8),)}
    assert found.resident == {"math": (Span(0, 10),), "code": (Span(8, 10),)}
    assert (found.end, found.tokens, found.waits) == (10, 10, ())
    assert [step.decision.place for step in found.steps if step.decision] == [0, 0, 4, 4, 8]


def test_along_seconds() -> None:
    found = laid_out(FALLBACK, SECONDS)
    assert [step.span.start for step in found.steps] == [0.0, 1.0, 2.5, 3.5, 4.5]
    assert found.points == (0.0, 2.0, 4.5)
    assert list(found.wanted_runs()) == [("math", Span(0.0, 2.0)), ("code", Span(2.0, 5.5))]
    assert found.loading == {"code": (Span(2.0, 4.5),)}
    assert found.seconds == pytest.approx(5.5)
    assert found.fallback_share == pytest.approx(2.0 / 5.5)
    assert found.wait_share == 0.0


def test_a_wait_is_a_load_during_which_nothing_runs() -> None:
    found = laid_out(WAIT, SECONDS)
    assert found.waits == (Span(1.0, 4.0),)
    assert found.loading == {"code": (Span(1.0, 4.0),)}
    assert found.resident == {"math": (Span(0.0, 1.0),), "code": (Span(4.0, 5.0),)}
    assert list(found.wanted_runs()) == [("math", Span(0.0, 1.0)), ("code", Span(1.0, 5.0))]
    assert found.wait_share == pytest.approx(3.0 / 5.0)
    assert "60.0 % waiting for loads" in summary(found)
    assert laid_out(WAIT).waits == ()


def test_what_is_no_candidate_has_a_row_below() -> None:
    events = [*FALLBACK, iteration(16.5, 11, "none"), iteration(17.5, 13, "lookup")]
    assert laid_out(events).rows == ("math", "code", "lookup", "none")
    assert laid_out([iteration(1.0, 2, "poetry")]).rows == ("math", "code", "poetry")


def test_a_stop_string_takes_tokens_off_again() -> None:
    events = [iteration(1.0, 4, "math"), iteration(2.0, 3, "math")]
    assert [step.span for step in laid_out(events).steps] == [Span(0, 4), Span(4, 4)]


def test_a_closing_event_is_no_step() -> None:
    rest = iteration(16.0, 10, "none")
    closing = replace(rest.iteration, committed=0, accepted=0, seconds=IterationSeconds())
    found = laid_out([*FALLBACK, replace(rest, iteration=closing)])
    assert len(found.steps) == 5
    assert found.rows == ("math", "code")


@pytest.mark.parametrize(
    "events", [[], [decision(1.0, 0, "math", "math")], [iteration(1.0, 0, "math")]]
)
def test_without_a_token_there_is_nothing_to_draw(
    events: Sequence[Decision | RecordedIteration],
) -> None:
    with pytest.raises(RecordError, match="before its first token"):
        laid_out(events)


def test_words() -> None:
    found = laid_out(FALLBACK)
    assert title(found) == "“Add $2$ & <b>3</b>”"
    assert title(found, 5) == "“Add …”"
    assert "10 tokens in 5 iterations (2.00 each), 36.4 % of the time in fallback" in summary(found)
    assert summary(found).endswith("cut off")
    simulated = replace(START, prompt="law", profile="orin_nano", draft_length=3)
    other = replace(found, beginning=simulated, finish_reason=FinishReason.LENGTH)
    assert title(other) == "memspec on a prompt of law, simulated: orin_nano"
    assert "γ = 3" in summary(other)
    assert "cut off" not in summary(other)


def test_a_draft_has_its_colour_in_every_picture() -> None:
    few, many = ("law", "none"), [f"draft{number}" for number in range(20)]
    assert colours_of(few)["law"] == colours_of(("code", "law"))["law"]
    coloured = colours_of(("law", *many))
    assert set(many) < set(coloured)
    assert coloured["law"] not in [coloured[name] for name in many]
    assert (paler("#000000", 0.5), darker("#ffffff", 1.0)) == ("#808080", "#000000")


@pytest.mark.parametrize("axis", ["tokens", "seconds"])
@pytest.mark.parametrize("events", [FALLBACK, WAIT, [iteration(1.0, 2, "none", text="")]])
def test_pictures(events: Sequence[Decision | RecordedIteration], axis: str) -> None:
    found = laid_out(events, axis)
    for kind, beginning in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        files = BytesIO(), BytesIO()
        for file in files:
            draw(found, file, kind)
        assert files[0].getvalue().startswith(beginning)
        assert files[0].getvalue() == files[1].getvalue()


def test_all_letters_can_be_drawn(recwarn: pytest.WarningsRecorder) -> None:
    text = "$x_{$ \\$ 漢字 🤖 \x00 tab\t" + "l" * 2000
    draw(laid_out([iteration(1.0, 2, "math", text=text)]), BytesIO(), "png")
    assert not recwarn.list


def test_the_page_shows_the_same_and_needs_nothing_else() -> None:
    found = page(laid_out(FALLBACK))
    assert not re.search(r"https?:|//[a-z]|<link|@import| src=", found)
    assert "default-src 'none'" in found
    assert "Add $2$ &amp; &lt;b&gt;3&lt;/b&gt;" in found
    assert found.count('<span class="d0 fallback" data-step=') == 2
    assert ' a&lt;b</span><span class="d1" data-step="4">' in found
    assert "prefers-color-scheme: dark" in found
    data = json.loads(re.findall(r'id="data">(.*?)</script>', found)[0])
    assert [step["point"] for step in data["steps"]] == [0, 0, 1, 1, 2]
    assert "math runs, code is wanted: fallback" in data["steps"][2]["lines"]
    assert "in memory: math; loading: code" in data["points"][1]["lines"]
    assert ["code", "0.75", 1.0, "d1"] in data["points"][1]["scores"]


def test_texts_bring_no_markup_into_the_page() -> None:
    evil = "</script><script>alert(1)</script>"
    events = [decision(0.5, 0, evil, evil), iteration(1.0, 2, evil, text=evil)]
    generation = RecordedGeneration(replace(START, prompt=evil, strategy=evil), tuple(events))
    assert "<script>alert" not in page(timeline(generation))


# The command


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "record.jsonl"
    write(path)
    write(path)
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["timeline", *map(str, arguments)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("ending", ["png", "svg", "html"])
def test_the_command_draws(record: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = record.with_suffix(f".{ending}")
    assert main(["timeline", str(record), "-o", str(out)]) == 0
    first = out.read_bytes()
    assert b"<" in first or first.startswith(b"\x89PNG")
    assert "exists already" in refused(capsys, record, "-o", out)
    again = ["--generation", "1", "--axis", "seconds", "--force"]
    assert main(["timeline", str(record), "-o", str(out), *again]) == 0
    assert out.read_bytes() != first
    assert {file.name for file in record.parent.iterdir()} == {record.name, out.name}


def test_the_command_lists(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(record), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2
    assert lines[2].split()[:5] == ["2", "memspec", "8", "2", "end_of_sequence"]
    assert lines[2].endswith(BEGINNING.prompt)


def test_the_command_refuses_in_one_line(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record.parent
    assert "-o out.png" in refused(capsys, record)
    assert "none of the endings" in refused(capsys, record, "-o", folder / "a.pdf")
    assert "no folder" in refused(capsys, record, "-o", folder / "nowhere" / "a.png")
    too_many = refused(capsys, record, "-o", folder / "a.png", "--generation", 3)
    assert "no generation 3" in too_many
    assert "Cannot read" in refused(capsys, folder / "other", "-o", folder / "a.png")
    assert not (folder / "a.png").exists()


def test_a_record_that_was_cut_off_is_drawn(record: Path, caplog: pytest.LogCaptureFixture) -> None:
    record.write_bytes(record.read_bytes()[:-30])
    out = record.with_suffix(".html")
    assert main(["timeline", str(record), "-o", str(out)]) == 0
    assert len(caplog.records) == 1
    assert "cut off" in out.read_text()
    assert 'data-step="1"' not in out.read_text()
