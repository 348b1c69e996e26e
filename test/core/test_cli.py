"""The commands, run in this process."""

import io
import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from memspec_core.cli.main import main
from memspec_core.measurement.decisions import Decision
from memspec_core.measurement.record import read_record
from memspec_core.request import FinishReason, GenerationStats


@pytest.fixture
def config(target_folder: Path, distilled: Path, tmp_path: Path) -> Path:
    parameters = {
        "target": {"path": str(target_folder)},
        "drafts": {"names": ["tiny"], "tiny": {"path": str(distilled)}},
        "dtype": "fp32",
        "context_tokens": 256,
        "default_max_new_tokens": 6,
        "draft_length": 2,
        "memory": {"floor_mib": 0, "budget_mib": 1000},
    }
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump({"/**": {"ros__parameters": parameters}}))
    return file


def generated(capsys: pytest.CaptureFixture[str], config: Path, *arguments: str) -> dict[str, Any]:
    assert main(["generate", "Hello", "--config", str(config), "--json", *arguments]) == 0
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("memspec: ")
    assert err.count("\n") == 1
    return err


def test_text_goes_to_stdout_and_the_summary_to_stderr(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = generated(capsys, config)["text"]
    assert main(["generate", "Hello", "--config", str(config)]) == 0
    out, err = capsys.readouterr()
    assert out == expected + "\n"
    assert "6 tokens" in err


def test_a_schema_from_a_file_shapes_the_answer(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}')
    schema = ("--json-schema", str(file))
    found = generated(capsys, config, *schema, "--max-new-tokens", "20")
    assert found["text"] in ("[1, 1]", "[1, 2]", "[2, 1]", "[2, 2]")
    assert found["finish_reason"] == "END_OF_SEQUENCE"

    assert "not both" in refused(capsys, "generate", "Hello", *schema, "--stop", "x")
    file.write_text('{"type": "array", "uniqueItems": true}')
    assert "uniqueItems" in refused(capsys, "generate", "Hello", *schema)
    file.write_bytes(b"\xff")
    assert "not UTF-8" in refused(capsys, "generate", "Hello", *schema)
    file.unlink()
    assert "cannot be read" in refused(capsys, "generate", "Hello", *schema)


def test_json_has_every_field_of_the_statistics(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = generated(capsys, config)
    assert set(found) >= {"text", "token_ids", "finish_reason", "stats"}
    assert set(found["stats"]) == {field.name for field in fields(GenerationStats)}
    assert found["finish_reason"] == "LENGTH"
    assert len(found["token_ids"]) == found["stats"]["generated_tokens"] == 6
    assert found["stats"]["drafted_tokens"] > 0
    [used] = [usage for usage in found["stats"]["drafts"] if usage["drafted_tokens"]]
    assert sum(used["accepted_at"]) == used["accepted_tokens"]
    assert used["judged_at"][0] == used["iterations"]


def test_arguments_reach_the_request(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = generated(capsys, config, "--draft", "none", "--max-new-tokens", "9")
    assert len(plain["token_ids"]) == 9
    assert plain["stats"]["drafted_tokens"] == 0
    drafted = generated(capsys, config, "--draft", "tiny", "--max-new-tokens", "9")
    assert drafted["token_ids"] == plain["token_ids"]
    stop = plain["text"][3:6]
    stopped = generated(capsys, config, "--max-new-tokens", "9", "--stop", stop)
    assert stopped["finish_reason"] == "STOP_STRING"
    assert stopped["text"] == plain["text"][: plain["text"].index(stop)]
    warm = ("--temperature", "2", "--top-k", "40", "--top-p", "0.9", "--seed")
    one, again, other = (generated(capsys, config, *warm, seed) for seed in ("1", "1", "2"))
    assert one["token_ids"] == again["token_ids"] != other["token_ids"]
    raw = generated(capsys, config, "--raw")
    assert raw["stats"]["prompt_tokens"] < plain["stats"]["prompt_tokens"]


def test_a_record_holds_what_was_generated(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.jsonl"
    found = generated(capsys, config, "--record", str(path))
    generated(capsys, config, "--record", str(path), "--draft", "none")
    first, second = read_record(path)
    iterations = [recorded.iteration for recorded in first.iterations]
    assert "".join(iteration.text for iteration in iterations) == found["text"]
    assert [t for i in iterations for t in i.token_ids] == found["token_ids"]
    assert len(iterations) == found["stats"]["iterations"]
    assert first.finish_reason is FinishReason.LENGTH
    assert (first.beginning.prompt, first.beginning.drafts) == ("Hello", ("tiny",))
    assert first.iterations[-1].resident == ("tiny",)
    decision = first.events[0]
    assert isinstance(decision, Decision)
    assert decision.context_hash == first.beginning.prompt_sha256
    assert {recorded.iteration.draft for recorded in second.iterations} == {"none"}
    assert "cannot be recorded" in refused(
        capsys, "generate", "a", "--config", str(config), "--record", str(tmp_path)
    )


def test_the_prompt_from_standard_input(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    expected = generated(capsys, config)
    given(b"Hello")
    assert main(["generate", "-", "--config", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected["token_ids"]
    given(b"\xff\xfe not UTF-8")
    assert "UTF-8" in refused(capsys, "generate", "-", "--config", str(config))
    given(b"a" * 2**22)
    assert "longer" in refused(capsys, "generate", "-", "--config", str(config))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["", "--draft", "none"], "empty"),
        (["\udcff"], "UTF-8"),
        (["a", "--temperature", "nan"], "temperature"),
        (["a", "--temperature", "-1"], "temperature"),
        (["a", "--top-p", "inf"], "top_p"),
        (["a", "--max-new-tokens", "-1"], "max_new_tokens"),
        (["a", "--seed", "9" * 400], "seed"),
        (["a", "--draft", "poetry"], "poetry"),
        (["a", "--strategy", "oracle"], "oracle"),
        (["a", "--dtype", "int3"], "int3"),
        (["a", "--stop", ""], "stop string"),
        (["a", "--time-limit", "nan"], "time_limit"),
        (["a", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [] if "--config" in arguments else ["--config", str(config)]
    assert said in refused(capsys, "generate", *arguments, *chosen)


def test_a_prompt_that_is_too_long_is_wrong_input(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "context" in refused(capsys, "generate", "word " * 300, "--config", str(config))


def test_arguments_that_cannot_be_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["fly"], ["generate"], ["generate", "a", "--seed", "x"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    for arguments in (["--help"], ["generate", "--help"], ["inspect", "--help"], ["doctor", "-h"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_inspecting_a_checkpoint(target_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(target_folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(target_folder)
    assert found["gguf_file"] is None
    assert (found["family"], found["layers"], found["hidden_size"]) == ("llama", 3, 64)
    assert (found["heads"], found["kv_heads"], found["vocabulary_size"]) == (4, 2, 49152)
    assert (found["quantisation"], found["cpu_backend"]) == ("none", "torch")
    assert found["end_of_sequence_ids"] == [2]
    assert len(found["tokenizer_sha256"]) == len(found["sha256"]) == 64
    assert main(["inspect", str(target_folder)]) == 0
    assert "llama" in capsys.readouterr().out


def test_inspecting_the_embedded_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "default", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (Path(found["path"]) / found["gguf_file"]).is_file()
    assert (found["family"], found["format"], found["layers"]) == ("llama", "gguf", 30)
    assert found["chat_template"] is True
    assert "Q4_1" in found["quantisation"]


def test_inspecting_a_draft(
    distilled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(distilled, tmp_path / "draft"))
    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["layers"], found["weights_whole"]) == ("independent", [0], True)
    with (folder / "draft.safetensors").open("ab") as file:
        file.write(b"more")
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_whole"] is False


def test_inspecting_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere" in refused(capsys, "inspect", "nowhere")
    assert str(tmp_path) in refused(capsys, "inspect", str(tmp_path))


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["healthy"] else 1)
    for check in ("python", "packages", "default target", "4-bit kernel", "memory"):
        assert found["checks"][check]["ok"], found["checks"][check]
    assert found["checks"]["native step"]["needed"] is False
    assert found["checks"]["json_schema"]["ok"]
    assert main(["doctor"]) == code
    assert "default target" in capsys.readouterr().out


def test_distilling_from_a_broken_file_is_wrong_input(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\nnonsense\n')
    places = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    common = ["distill", "tiny", "--target", str(target_folder), *places]
    said = refused(capsys, *common, "--layers", "0", "--prompts", str(prompts))
    assert "line 2" in said
    prompts.write_text('{"prompt": "a"}\n')
    assert "layers" in refused(capsys, *common, "--layers", "7", "--prompts", str(prompts))
