"""Tokenizers of GGUF files that are kept: the same ones, made anew where they do not fit."""

from pathlib import Path
from typing import Any

import pytest

from memspec_core.models import tokenizer as loading
from memspec_core.models.checkpoint import Checkpoint, open_checkpoint
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.request import ChatMessage, GenerationRequest

TEXTS = (
    "Hello there",
    " Grüße, 世界 🤖",
    "1,2;  3\n\n\tdef f(x):",
    "<|im_start|>user\nHi<|im_end|>",
    "",
)


@pytest.fixture
def embedded() -> Checkpoint:
    return open_checkpoint("default")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str | None]:
    """Keep tokenizers in a folder of the test's own; return what was loaded, None for kept ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loads: list[str | None] = []
    load = loading._loaded

    def counted(folder: Path, gguf_file: str | None = None) -> Any:
        loads.append(gguf_file)
        return load(folder, gguf_file)

    monkeypatch.setattr(loading, "_loaded", counted)
    return loads


def kept_files(folder: Path) -> list[Path]:
    return list(folder.glob("memspec/tokenizers/*/tokenizer.json"))


def test_the_kept_one_is_the_same(
    embedded: Checkpoint, made: list[str | None], tmp_path: Path
) -> None:
    first, kept = Tokenizer.of(embedded), Tokenizer.of(embedded)
    assert made == [embedded.gguf_file, None]
    assert first.sha256() == kept.sha256()
    assert first.end_of_sequence_ids() == kept.end_of_sequence_ids()
    messages = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"))
    requests = [GenerationRequest(prompt=text, raw=True) for text in TEXTS]
    for request in (*requests, GenerationRequest(messages=messages)):
        ids = first.prompt_ids(request)
        assert kept.prompt_ids(request) == ids
        assert kept.decode(ids) == first.decode(ids)

    # What a power cut or a user left behind is no harm.
    (damaged,) = kept_files(tmp_path)
    damaged.write_text("{")
    assert Tokenizer.of(embedded).sha256() == first.sha256()
    assert made[2:] == [None, embedded.gguf_file]


def test_another_version_of_the_file_is_another_tokenizer(
    made: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.of(open_checkpoint("default")).backend
    made.clear()
    monkeypatch.setattr(loading, "_loaded", lambda *_: made.append(None) or tokenizer)
    file = tmp_path / "model.gguf"
    for content in ("one", "three"):
        file.write_text(content)
        loading.kept_tokenizer(file, loading._loaded, lambda: tokenizer)
        assert made == []
        loading.kept_tokenizer(file, loading._loaded, lambda: tokenizer)
        assert made.pop() is None
    assert len(kept_files(tmp_path)) == 2  # that of the embedded target, and the newest


def test_where_none_can_be_kept_it_is_made_each_time(
    embedded: Checkpoint, made: list[str | None], tmp_path: Path
) -> None:
    (tmp_path / "memspec").touch()
    assert Tokenizer.of(embedded).sha256() == Tokenizer.of(embedded).sha256()
    assert made == [embedded.gguf_file] * 2
