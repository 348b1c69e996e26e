"""Prompts said otherwise."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspec_core.cli.main import main
from memspec_core.errors import PromptFileError
from memspec_core.evaluation.paraphrase import (
    MIXED,
    PARAPHRASES,
    instruction_last,
    mixed_pairs,
    two_topics,
)
from memspec_core.training.paraphrases import write_paraphrases
from memspec_core.training.prompts import read_prompt_sets, read_prompts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Do it.\n\nfirst\n\nsecond", "first\n\nsecond\n\nDo it."),
        ("Do it. Here is why. And how.", "Here is why. And how. Do it."),
        ("Sum these: 1, 2", "1, 2 Sum these:"),
        ("Only one sentence", "Only one sentence"),
        ("Ends in a gap.\n\n", "Ends in a gap."),
    ],
)
def test_the_instruction_moves_to_the_end(text: str, said: str) -> None:
    assert instruction_last(text) == said


@given(st.text(min_size=1).filter(lambda text: text.strip() != ""))
def test_every_rule_gives_the_same_again_and_never_nothing(text: str) -> None:
    for said in PARAPHRASES.values():
        assert said(text).strip()
        assert said(text) == said(text)


@given(st.text(alphabet="ab .?\n", min_size=1).filter(lambda text: text.strip() != ""))
def test_moving_the_instruction_loses_no_words(text: str) -> None:
    assert sorted(instruction_last(text).split()) == sorted(text.split())


def test_two_topics_hold_both_and_each_pair_comes_once() -> None:
    assert "one" in two_topics("one", "other")
    assert "other" in two_topics("one", "other")
    assert mixed_pairs(["a", "b", "c"]) == [("a", "b"), ("a", "c"), ("b", "c")]


def files(folder: Path) -> list[Path]:
    for domain in ("code", "math"):
        (folder / domain).mkdir(parents=True)
        lines = [
            json.dumps({"prompt": f"{domain} {n}", "source": domain, "license": "MIT"})
            for n in range(4)
        ]
        (folder / domain / "eval.jsonl").write_text("\n".join(lines))
    return [folder / domain / "eval.jsonl" for domain in ("code", "math")]


def test_files_for_each_rule_and_domain(tmp_path: Path) -> None:
    counts = write_paraphrases(files(tmp_path), 2, tmp_path / "out")
    assert set(counts.values()) == {2}
    assert len(counts) == 2 * len(PARAPHRASES) + 1
    lower = read_prompts(tmp_path / "out" / "lower_case" / "code.jsonl")
    assert [p.text for p in lower] == ["code 0", "code 2"]
    assert {(p.source, p.license) for p in lower} == {("code", "MIT")}
    mixed = read_prompts(tmp_path / "out" / MIXED / "code+math.jsonl")
    assert {(p.source, p.license) for p in mixed} == {("code and math", "MIT")}
    sets = read_prompt_sets(sorted((tmp_path / "out" / "lower_case").iterdir()), None)
    assert [s.name for s in sets] == ["code", "math"]


def test_the_same_bytes_again(tmp_path: Path) -> None:
    sources = files(tmp_path)
    for name in ("one", "two"):
        write_paraphrases(sources, None, tmp_path / name)
    one, two = (
        [p.read_bytes() for p in sorted((tmp_path / name).rglob("*.jsonl"))]
        for name in ("one", "two")
    )
    assert one == two


def test_two_files_of_one_domain_are_refused(tmp_path: Path) -> None:
    sources = files(tmp_path)
    (tmp_path / "code" / "train.jsonl").write_text('{"prompt": "x"}')
    with pytest.raises(PromptFileError, match="twice"):
        write_paraphrases([*sources, tmp_path / "code" / "train.jsonl"], None, tmp_path / "out")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [str(file) for file in files(tmp_path)]
    assert main(["paraphrase", *sources, "--out", str(tmp_path / "out"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) == 11
    assert main(["paraphrase", str(tmp_path / "no.jsonl"), "--out", str(tmp_path / "o")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
