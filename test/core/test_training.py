"""Making drafts: prompts, the target's text, training and export."""

import errno
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.trainer_utils import get_last_checkpoint

from core.tiny import (
    decode,
    greedy_by_transformers,
    ids_of,
    load_draft,
    load_feature_draft,
    load_target,
)
from memspec_core.errors import CacheMismatchError, PromptFileError, SettingsError
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.draft import read_manifest, weights_are_whole
from memspec_core.models.kv_cache import common_length
from memspec_core.models.target import Target
from memspec_core.request import SamplingSettings
from memspec_core.speculation.model_draft import ModelDraft
from memspec_core.speculation.sampling import Sampler
from memspec_core.training import export
from memspec_core.training.answers import Answering
from memspec_core.training.continuations import (
    PROMPTS_A_SHARD,
    TOP_LOGITS,
    Continuation,
    ContinuationPlan,
    read_continuations,
    write_continuations,
)
from memspec_core.training.distil import DistilPlan, distil, taps_of
from memspec_core.training.examples import (
    TOKENS,
    Examples,
    PackedCollator,
    PaddedCollator,
    head_tokens,
)
from memspec_core.training.export import Provenance, export_draft
from memspec_core.training.feature import FeatureDraft as FeatureTraining
from memspec_core.training.fitting import FitPlan
from memspec_core.training.prompts import Prompt, read_prompts, sha256_of_prompts
from memspec_core.training.reference import transformers_model
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


def test_bad_lines_may_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{\n{"prompt": ""}\n{"prompt": "b"}\n')
    with caplog.at_level(logging.WARNING):
        assert [p.text for p in read_prompts(file, skip_broken=True)] == ["a", "b"]
    assert "line 2" in caplog.text
    assert "line 3" in caplog.text
    file.write_text("{\n")
    with pytest.raises(PromptFileError, match="holds no prompts"):
        read_prompts(file, skip_broken=True)


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

PROMPTS = [[5, 6, 7], [8, 9], *([n, n + 1, n + 2] for n in range(20, 60))]
PLAN = ContinuationPlan(
    target_sha256="t",
    prompts_sha256="p",
    taps=(),
    temperature=0.8,
    seed=3,
    max_new_tokens=6,
    most_prompts=0,
)


class SwitchedOffError(Exception):
    """The machine is switched off."""


@pytest.fixture
def write(target: Target) -> Callable[..., list[tuple[int, int]]]:
    def run(
        folder: Path, plan: ContinuationPlan = PLAN, cut_after: int = 99, of: Target = target
    ) -> Any:
        seen: list[tuple[int, int]] = []

        def progress(done: int, total: int) -> None:
            seen.append((done, total))
            if done >= cut_after:
                raise SwitchedOffError

        write_continuations(folder, plan, PROMPTS, of, progress)
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
    assert sorted(c.prompt_ids.tolist() for c in found) == sorted(PROMPTS)
    for continuation in found:
        expected = greedy_by_transformers(target_model, continuation.prompt_ids.tolist(), 6)
        assert continuation.token_ids.tolist() == expected
        assert continuation.top_ids.shape == (len(expected), TOP_LOGITS)
        assert continuation.top_ids[:, 0].tolist() == expected
        assert continuation.features is None
        logs = continuation.top_log_probabilities.astype(np.float32)
        assert (np.diff(logs, axis=1) <= 0).all()
        assert (np.exp(logs).sum(axis=1) <= 1.01).all()


def test_states_are_those_that_decoding_keeps(
    write: Callable[..., Any], target_folder: Path, tmp_path: Path
) -> None:
    target = load_target(target_folder, taps=(0, 2))
    write(tmp_path, replace(PLAN, taps=(0, 2), most_prompts=3), of=target)
    found = list(read_continuations(tmp_path))
    assert len(found) == 3
    assert target.cache.features is not None
    for continuation in found:
        context = [*continuation.prompt_ids.tolist(), *continuation.token_ids.tolist()]
        target.cache.truncate(0)
        target.decoder.forward(context, target.cache)
        expected = target.cache.features[: len(context)].numpy()
        assert continuation.features is not None
        np.testing.assert_allclose(continuation.features, expected, rtol=1e-2, atol=1e-2)


def test_text_ends_with_the_end_of_sequence(
    write: Callable[..., Any], target: Target, target_model: PreTrainedModel, tmp_path: Path
) -> None:
    end = greedy_by_transformers(target_model, [5, 6, 7], 6)[2]
    ending = replace(target, end_of_sequence_ids=frozenset([end]))
    write(tmp_path, replace(PLAN, temperature=0.0), of=ending)
    found = next(c for c in read_continuations(tmp_path) if c.prompt_ids.tolist() == [5, 6, 7])
    assert len(found.token_ids) <= 2
    assert end not in found.token_ids
    assert len(found.top_ids) == len(found.token_ids)


def test_a_run_that_was_cut_goes_on_to_the_same_text(
    write: Callable[..., Any], tmp_path: Path
) -> None:
    write(tmp_path / "whole")
    with pytest.raises(SwitchedOffError):
        write(tmp_path / "cut", cut_after=1)
    first = tmp_path / "cut" / "text-00000.npz"
    written = first.stat().st_mtime_ns
    (tmp_path / "cut" / "text-00001.npz.partial").write_bytes(b"half a shard")
    assert write(tmp_path / "cut") == [(1, 2), (2, 2)]
    assert first.stat().st_mtime_ns == written
    whole, cut = (list(read_continuations(tmp_path / name)) for name in ("whole", "cut"))
    assert same(whole, cut)


def test_half_a_shard_is_not_read_and_is_made_whole(
    write: Callable[..., Any], tmp_path: Path
) -> None:
    write(tmp_path)
    (tmp_path / "top-00001.npz").unlink()  # text is there, what the target thought is not
    assert len(list(read_continuations(tmp_path))) == PROMPTS_A_SHARD
    write(tmp_path)
    assert len(list(read_continuations(tmp_path))) == len(PROMPTS)


def test_a_full_disc_leaves_nothing_half_written(
    write: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("memspec_core.files.os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path)
    assert not list(tmp_path.glob("*.npz"))
    assert not (tmp_path / "plan.json").exists()
    write(tmp_path)
    assert len(list(read_continuations(tmp_path))) == len(PROMPTS)


@pytest.mark.parametrize(
    "changes", [{"seed": 4}, {"temperature": 0.0}, {"target_sha256": "u", "max_new_tokens": 3}]
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
    features = np.zeros((len(prompt) + len(tokens), 4), dtype=np.float16)
    return Continuation(np.array(prompt, np.int32), np.array(tokens, np.int32), top, logs, features)


def test_a_head_covers_the_most_frequent_tokens_in_ascending_order() -> None:
    text = [continuation([1], [9, 7, 9]), continuation([1], [7, 9, 5, 30])]
    assert head_tokens(text, 3, 40).tolist() == [1, 7, 9]
    # What the text does not have is filled up from the vocabulary's beginning.
    assert head_tokens(text, 8, 40).tolist() == [0, 1, 2, 3, 5, 7, 9, 30]
    assert head_tokens(text, 99, 40).tolist() == list(range(32))


def test_a_padded_batch_predicts_each_token_from_the_one_before() -> None:
    examples = Examples([continuation([1, 2, 3], [20, 21]), continuation([4], [22, 23, 99])])
    batch = PaddedCollator(torch.tensor([20, 21, 22, 23]), 100)([examples[0], examples[1]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 20], [4, 22, 23, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["rows"].tolist() == [2, 3, 4, 5, 6]
    # Outputs of the head for the target's top token; 99 is none of its tokens.
    assert batch["top_index"][:, 0].tolist() == [0, 1, 2, 3, -1]


def test_a_packed_batch_is_one_sequence_after_the_other() -> None:
    examples = Examples([continuation([1, 2, 3], [20, 21]), continuation([4, 5], [22, 99])])
    batch = PackedCollator(torch.tensor([20, 21, 22, 23]), 100)([examples[0], examples[1]])
    assert batch["token_ids"].tolist() == [1, 2, 3, 20, 21, 4, 5, 22, 99]
    assert batch["features"].shape == (9, 4)
    assert (batch["lengths"].tolist(), batch["prompt_lengths"].tolist()) == ([5, 4], [3, 2])
    assert batch["top_index"][:, 0].tolist() == [0, 1, 2, -1]


def test_a_batch_may_teach_the_best_token_alone() -> None:
    examples = Examples([continuation([1, 2], [20, 21])])
    covered = torch.tensor([20, 21, 22, 23])
    for collator in (PaddedCollator, PackedCollator):
        whole = collator(covered, 100)([examples[0]])
        best = collator(covered, 100, TOKENS)([examples[0]])
        assert best["top_index"].tolist() == whole["top_index"][:, :1].tolist()
        assert best["top_probability"].shape == (2, 1)


def test_a_draft_of_all_layers_agrees_with_its_target(target_model: PreTrainedModel) -> None:
    tokens = greedy_by_transformers(target_model, [5, 6, 7], 8)
    draft = TruncatedDraft(target_model, (0, 1, 2), torch.tensor(sorted(set(tokens))))
    batch = PaddedCollator(draft.head_token_ids, 49152)(
        [Examples([continuation([5, 6, 7], tokens)])[0]]
    )
    found = draft(**batch)
    # The 4-bit rounding is in the loop, so that it need not agree in all.
    assert float(found["accepted"]) >= 0.5
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
        prompt_files=(prompts,),
        work_folder=tmp_path / "work",
        output_folder=tmp_path / "drafts" / "tiny",
        layers=(0,),
        head_tokens=40,
        temperatures=(0.0,),
        max_new_tokens=8,
        kind="independent",
        fit=FitPlan(epochs=1.0, batch_size=4),
    )


def nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize("kind", ["independent", "feature"])
def test_distilling_writes_a_draft_that_decodes(
    kind: str, plan: DistilPlan, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(plan, kind=kind)
    taps = taps_of(3) if kind == "feature" else ()
    target = load_target(target_folder, taps=taps)
    told: list[tuple[str, int, int]] = []
    manifest, fit = distil(plan, lambda what, done, total: told.append((what, done, total)))
    assert [(done, total) for what, done, total in told if what.startswith("text")] == [(1, 1)]
    assert told[-1] == ("training tiny", fit.steps, fit.steps)
    assert fit.steps >= 2
    assert 0.0 <= fit.accepted <= 3.0
    assert fit.curve[-1] == (fit.steps, fit.accepted)
    told_of = manifest.card["training"]
    assert told_of["accepted_after_steps"][-1] == [fit.steps, told_of["accepted"]]
    folder = plan.output_folder
    assert read_manifest(folder) == manifest
    assert weights_are_whole(folder, manifest)
    assert (manifest.name, manifest.kind, manifest.taps) == ("tiny", kind, taps)
    assert (manifest.layers, manifest.hidden_size) == ((0,), 64)
    assert manifest.target_sha256 == target.checkpoint.sha256()
    assert manifest.card["prompt_sources"] == [
        {"source": "sums", "license": "CC0-1.0", "prompts": 8}
    ]
    card = (folder / "README.md").read_text()
    assert "| sums | CC0-1.0 | 8 |" in card
    assert "plus" not in card  # no text of the prompts
    prompt = [30, 40, 50]
    load = load_feature_draft if kind == "feature" else load_draft
    events = decode(target, prompt, load("tiny", folder, target))
    assert ids_of(events) == ids_of(decode(target, prompt))
    assert sum(event.proposed for event in events) > 0

    # Again, with the text that is there: nothing is generated, and the folder is whole again.
    def answers(*_: object) -> None:
        raise AssertionError("the text was there already")

    monkeypatch.setattr(Answering, "answers", answers)
    again, _ = distil(plan, nothing)
    assert weights_are_whole(folder, again)

    # A specialist begins with what the base has learned; with no training it is the base.
    untrained = FitPlan(epochs=1.0, batch_size=8, learning_rate=0.0)
    specialist = replace(
        plan, name="more", base="tiny", output_folder=plan.output_folder.with_name("more")
    )
    made, _ = distil(replace(specialist, fit=untrained), nothing)
    assert made.weights_sha256 == again.weights_sha256
    # A feature draft may go deeper: its new layer begins as the identity.
    deeper = replace(specialist, name="deep", layers=(*plan.layers, 0), fit=untrained)
    if kind == "feature":
        _, deep = distil(deeper, nothing)
        assert deep.accepted == pytest.approx(fit.accepted, abs=1e-3)
    else:
        with pytest.raises(SettingsError, match="other layers than 'deep'"):
            distil(deeper, nothing)


def test_what_is_trained_is_what_proposes(plan: DistilPlan, target_folder: Path) -> None:
    """The rolled steps of training and those of decoding are the same computation."""
    distil(replace(plan, kind="feature"), nothing)
    target = load_target(target_folder, taps=taps_of(3))
    draft = load_feature_draft("tiny", plan.output_folder, target)
    text = next(read_continuations(next(plan.work_folder.glob("text-*"))))
    model = trained_feature_draft(plan, target_folder, draft)
    batch = PackedCollator(model.head_token_ids, 49152)([Examples([text])[0]])
    context = [*text.prompt_ids.tolist(), *text.token_ids.tolist()]
    greedy = Sampler(SamplingSettings(), torch.device("cpu"))
    right = reached = 0
    for end in range(len(text.prompt_ids), len(context)):
        target.cache.truncate(0)
        target.decoder.forward(context[: end - 1], target.cache)
        count = min(model.steps, len(context) - end)
        proposed = draft.propose(context[:end], count, greedy).token_ids
        agreed = common_length(proposed, context[end : end + count])
        right, reached = right + agreed, reached + 1
    with torch.inference_mode():
        accepted = float(model(**batch)["accepted"])
    assert accepted == pytest.approx(right / reached, abs=0.15)


def trained_feature_draft(
    plan: DistilPlan, target_folder: Path, draft: ModelDraft
) -> FeatureTraining:
    source = transformers_model(open_checkpoint(str(target_folder)), torch.float32, "cpu")
    ids = draft._decoder.head_token_ids
    assert ids is not None
    model = FeatureTraining(source, plan.layers, taps_of(3), ids, plan.steps)
    last = get_last_checkpoint(str(plan.work_folder / "fit-tiny"))
    model.load_state_dict(load_file(Path(str(last)) / "model.safetensors"))
    return model


def test_bad_plans_are_refused_before_any_work(plan: DistilPlan, tmp_path: Path) -> None:
    for layers in ((), (3,), (-1,), (0, 99)):
        with pytest.raises(SettingsError, match="layers"):
            distil(replace(plan, layers=layers), nothing)
    with pytest.raises(PromptFileError, match="nowhere"):
        distil(replace(plan, prompt_files=(tmp_path / "nowhere.jsonl",)), nothing)
    with pytest.raises(PromptFileError, match="too long"):
        distil(replace(plan, max_prompt_tokens=3), nothing)
    with pytest.raises(SettingsError, match="kind is 'other'"):
        distil(replace(plan, kind="other"), nothing)
    with pytest.raises(SettingsError, match="no trained draft 'nobody'"):
        distil(replace(plan, base="nobody"), nothing)
    assert not plan.output_folder.exists()


def test_long_prompts_are_left_out_with_a_warning(
    plan: DistilPlan, caplog: pytest.LogCaptureFixture
) -> None:
    with plan.prompt_files[0].open("a") as file:
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
    provenance = Provenance("d", "independent", (0,), (), 256, "t", "k", manifest.card)
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
