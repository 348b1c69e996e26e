"""Making drafts: prompts, the target's text, training and export."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel

from core.tiny import decode, greedy_by_transformers, ids_of, load_draft
from memspec_core.errors import CacheMismatchError, PromptFileError, SettingsError
from memspec_core.models.draft import read_manifest, weights_are_whole
from memspec_core.models.target import Target
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.training import export
from memspec_core.training.continuations import (
    TOP_LOGITS,
    Continuation,
    ContinuationPlan,
    read_continuations,
    write_continuations,
)
from memspec_core.training.distil import DistilPlan, distil
from memspec_core.training.examples import Collator, Examples, frequent_tokens
from memspec_core.training.export import Provenance, export_draft
from memspec_core.training.fitting import FitPlan
from memspec_core.training.prompts import Prompt, read_prompts, sha256_of_prompts
from memspec_core.training.truncated import TruncatedDraft

# Prompt files


def prompts_in(tmp_path: Path, content: str | bytes) -> list[Prompt]:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts(file)


def test_prompts_with_their_sources(tmp_path: Path) -> None:
    found = prompts_in(
        tmp_path,
        '{"prompt": "a", "source": "s", "license": "MIT", "id": 3}\n\n{"prompt": "b"}\n',
    )
    assert found == [Prompt("a", "s", "MIT"), Prompt("b", "unknown", "unknown")]


def test_each_text_counts_once_and_the_order_stays(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": text}) for text in ("b", "a", "b", "c", "a")]
    assert [p.text for p in prompts_in(tmp_path, "\n".join(lines))] == ["b", "a", "c"]


def test_line_separators_inside_a_prompt_are_no_ends_of_lines(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four"
    content = json.dumps({"prompt": text}, ensure_ascii=False) + "\n"
    assert [p.text for p in prompts_in(tmp_path, content)] == [text]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "not JSON"),
        ('{"prompt": "a"', "not JSON"),
        ('["a"]', "object"),
        ('"a"', "object"),
        ("{}", "prompt"),
        ('{"prompt": ""}', "prompt"),
        ('{"prompt": "  "}', "prompt"),
        ('{"prompt": 3}', "prompt"),
        ('{"prompt": null}', "prompt"),
    ],
)
def test_a_bad_line_is_named(bad: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=said) as error:
        prompts_in(tmp_path, f'{{"prompt": "a"}}\n\n{bad}\n{{"prompt": "b"}}\n')
    assert "prompts.jsonl, line 3" in str(error.value)


def test_files_without_prompts(tmp_path: Path) -> None:
    for content in ("", "\n\n"):
        with pytest.raises(PromptFileError, match=r"prompts\.jsonl holds no prompts"):
            prompts_in(tmp_path, content)
    with pytest.raises(PromptFileError, match="missing"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl"):
        prompts_in(tmp_path, b'{"prompt": "\xff"}\n')


def test_the_hash_follows_texts_and_order() -> None:
    one, two = Prompt("a"), Prompt("b")
    assert sha256_of_prompts([one, two]) != sha256_of_prompts([two, one])
    assert sha256_of_prompts([one]) == sha256_of_prompts([Prompt("a", "elsewhere")])


# The target's text

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16]]
PLAN = ContinuationPlan(
    target_sha256="t",
    prompts_sha256="p",
    temperature=0.8,
    seed=3,
    max_new_tokens=6,
    max_prompt_tokens=3,
    batch_size=2,
)


class SwitchedOffError(Exception):
    """The machine is switched off."""


@pytest.fixture
def write(
    target_model: PreTrainedModel, tokenizer: Tokenizer
) -> Callable[..., list[tuple[int, int]]]:
    def run(folder: Path, plan: ContinuationPlan = PLAN, cut_after: int = 99) -> Any:
        seen: list[tuple[int, int]] = []

        def progress(done: int, total: int) -> None:
            seen.append((done, total))
            if done >= cut_after:
                raise SwitchedOffError

        write_continuations(
            folder,
            plan,
            PROMPTS,
            model=target_model,
            tokenizer=tokenizer.backend,
            progress=progress,
        )
        return seen

    return run


def same(one: list[Continuation], two: list[Continuation]) -> bool:
    return len(one) == len(two) and all(
        np.array_equal(a.prompt_ids, b.prompt_ids) and np.array_equal(a.token_ids, b.token_ids)
        for a, b in zip(one, two, strict=True)
    )


def test_greedy_text_is_the_targets_own(
    write: Callable[..., Any], target_model: PreTrainedModel, tmp_path: Path
) -> None:
    assert write(tmp_path, replace(PLAN, temperature=0.0)) == [(1, 2), (2, 2)]
    found = list(read_continuations(tmp_path))
    # The prompt of four tokens is too long; the others come by length.
    assert sorted(c.prompt_ids.tolist() for c in found) == sorted(
        prompt for prompt in PROMPTS if len(prompt) <= 3
    )
    for continuation in found:
        expected = greedy_by_transformers(target_model, continuation.prompt_ids.tolist(), 6)
        assert continuation.token_ids.tolist() == expected
        assert continuation.top_ids.shape == (6, TOP_LOGITS)
        assert continuation.top_ids[:, 0].tolist() == expected
        logs = continuation.top_log_probabilities.astype(np.float32)
        assert (np.diff(logs, axis=1) <= 0).all()
        assert (np.exp(logs).sum(axis=1) <= 1.01).all()


def test_text_ends_with_the_end_of_sequence(
    write: Callable[..., Any],
    target_model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    greedy = replace(PLAN, temperature=0.0)
    end = greedy_by_transformers(target_model, [5, 6, 7], 6)[2]
    monkeypatch.setattr(target_model.generation_config, "eos_token_id", end)
    write(tmp_path, greedy)
    found = next(c for c in read_continuations(tmp_path) if len(c.prompt_ids) == 3)
    assert len(found.token_ids) <= 3
    assert found.token_ids[-1] == end
    assert len(found.top_ids) == len(found.token_ids)


def test_a_run_that_was_cut_goes_on_to_the_same_text(
    write: Callable[..., Any], tmp_path: Path
) -> None:
    write(tmp_path / "whole")
    with pytest.raises(SwitchedOffError):
        write(tmp_path / "cut", cut_after=1)
    first = tmp_path / "cut" / "shard-00000.npz"
    written = first.stat().st_mtime_ns
    (tmp_path / "cut" / "shard-00001.partial").write_bytes(b"half a shard")
    assert write(tmp_path / "cut") == [(1, 2), (2, 2)]
    assert first.stat().st_mtime_ns == written
    whole, cut = (list(read_continuations(tmp_path / name)) for name in ("whole", "cut"))
    assert same(whole, cut)


def test_a_partial_shard_is_not_read(write: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(SwitchedOffError):
        write(tmp_path, cut_after=1)
    (tmp_path / "shard-00001.partial").write_bytes(b"half a shard")
    assert len(list(read_continuations(tmp_path))) == 2


@pytest.mark.parametrize(
    "changes", [{"seed": 4}, {"temperature": 0.0}, {"target_sha256": "u", "batch_size": 3}]
)
def test_text_of_another_plan_is_refused(
    changes: dict[str, Any], write: Callable[..., Any], tmp_path: Path
) -> None:
    write(tmp_path)
    before = sorted(file.stat().st_mtime_ns for file in tmp_path.iterdir())
    with pytest.raises(CacheMismatchError) as refused:
        write(tmp_path, replace(PLAN, **changes))
    assert all(name in str(refused.value) for name in (*changes, str(tmp_path)))
    assert sorted(file.stat().st_mtime_ns for file in tmp_path.iterdir()) == before


# Examples and the model in training


def continuation(prompt: list[int], tokens: list[int]) -> Continuation:
    top = np.tile(np.arange(TOP_LOGITS, dtype=np.int32), (len(tokens), 1))
    top[:, 0] = tokens
    logs = np.full(top.shape, -3.0, dtype=np.float16)
    return Continuation(np.array(prompt, np.int32), np.array(tokens, np.int32), top, logs)


def test_frequent_tokens_in_ascending_order() -> None:
    text = [continuation([1], [9, 7, 9]), continuation([1], [7, 9, 5, 30])]
    assert frequent_tokens(text, 2).tolist() == [7, 9]
    assert frequent_tokens(text, 99).tolist() == [5, 7, 9, 30]


def test_a_batch_predicts_each_token_from_the_one_before() -> None:
    examples = Examples([continuation([1, 2, 3], [20, 21]), continuation([4], [22, 23, 99])])
    batch = Collator(torch.tensor([20, 21, 22, 23]), 100)([examples[0], examples[1]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 20], [4, 22, 23, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["rows"].tolist() == [2, 3, 4, 5, 6]
    # Outputs of the head for the target's top token; 99 is none of its tokens.
    assert batch["top_index"][:, 0].tolist() == [0, 1, 2, 3, -1]


def test_a_draft_of_all_layers_agrees_with_its_target(target_model: PreTrainedModel) -> None:
    tokens = greedy_by_transformers(target_model, [5, 6, 7], 8)
    draft = TruncatedDraft(target_model, (0, 1, 2), torch.tensor(sorted(set(tokens))))
    batch = Collator(draft.head_token_ids, 49152)([Examples([continuation([5, 6, 7], tokens)])[0]])
    found = draft(**batch)
    # The 4-bit rounding is in the loop, so that it need not agree in all.
    assert float(found["agreement"]) >= 0.5
    found["loss"].backward()
    assert draft.body.embed_tokens.weight.grad is None
    trained = [p for p in draft.body.layers.parameters() if p.requires_grad]
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in trained)


# From end to end


@pytest.fixture
def plan(target_folder: Path, tmp_path: Path) -> DistilPlan:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": f"What is {n} plus {n}?", "source": "sums", "license": "CC0-1.0"}
        for n in range(8)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    return DistilPlan(
        name="tiny",
        target=str(target_folder),
        prompt_file=prompts,
        work_folder=tmp_path / "work",
        output_folder=tmp_path / "drafts" / "tiny",
        layers=(0,),
        head_tokens=40,
        temperatures=(0.0,),
        max_new_tokens=8,
        text_batch_size=4,
        fit=FitPlan(epochs=1.0, batch_size=4),
    )


def nothing(*_: object) -> None:
    pass


def test_distilling_writes_a_draft_that_decodes(
    plan: DistilPlan, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    manifest, fit = distil(plan, lambda what, done, total: told.append((what, done, total)))
    assert [(done, total) for _, done, total in told] == [(1, 2), (2, 2)]
    assert fit.steps >= 2
    assert 0.0 <= fit.agreement <= 1.0
    folder = plan.output_folder
    assert read_manifest(folder) == manifest
    assert weights_are_whole(folder, manifest)
    assert (manifest.name, manifest.layers, manifest.hidden_size) == ("tiny", (0,), 64)
    assert manifest.target_sha256 == target.checkpoint.sha256()
    assert manifest.card["prompt_sources"] == [
        {"source": "sums", "license": "CC0-1.0", "prompts": 8}
    ]
    card = (folder / "README.md").read_text()
    assert "| sums | CC0-1.0 | 8 |" in card
    assert "plus" not in card  # no text of the prompts
    prompt = [30, 40, 50]
    events = decode(target, prompt, load_draft("tiny", folder, target))
    assert ids_of(events) == ids_of(decode(target, prompt))
    assert sum(event.proposed for event in events) > 0

    # Again, with the text that is there: nothing is generated, and the folder is whole again.
    def generate(*_: object, **__: object) -> None:
        raise AssertionError("the text was there already")

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    again, _ = distil(plan, nothing)
    assert weights_are_whole(folder, again)


def test_bad_plans_are_refused_before_any_work(plan: DistilPlan, tmp_path: Path) -> None:
    for layers in ((), (3,), (-1,), (0, 99)):
        with pytest.raises(SettingsError, match="layers"):
            distil(replace(plan, layers=layers), nothing)
    with pytest.raises(PromptFileError, match="nowhere"):
        distil(replace(plan, prompt_file=tmp_path / "nowhere.jsonl"), nothing)
    with pytest.raises(PromptFileError, match="too long"):
        distil(replace(plan, max_prompt_tokens=3), nothing)
    assert not plan.output_folder.exists()


def test_long_prompts_are_left_out_with_a_warning(
    plan: DistilPlan, caplog: pytest.LogCaptureFixture
) -> None:
    with plan.prompt_file.open("a") as file:
        file.write("\n" + json.dumps({"prompt": "long " * 600}))
    with caplog.at_level(logging.WARNING):
        distil(plan, nothing)
    assert "1 prompts are longer than 512 tokens" in caplog.text


def test_an_export_that_fails_leaves_the_old_folder(
    distilled: Path,
    target_model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = read_manifest(distilled)
    model = TruncatedDraft(target_model, (0,), torch.arange(8))
    provenance = Provenance("d", (0,), 256, "t", "k", manifest.card)
    folder = tmp_path / "d"
    first = export_draft(model, provenance, folder)

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(export, "_model_card", fail)
        with pytest.raises(OSError, match="no space"):
            export_draft(model, provenance, folder)
    assert read_manifest(folder) == first
    assert weights_are_whole(folder, first)
    (folder / "stray").touch()
    export_draft(model, replace(provenance, name="e"), folder)
    assert read_manifest(folder).name == "e"
    assert sorted(f.name for f in folder.iterdir()) == [
        "README.md",
        "draft.safetensors",
        "manifest.json",
    ]
    assert [place.name for place in tmp_path.iterdir()] == ["d"]
