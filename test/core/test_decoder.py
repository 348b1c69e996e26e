"""The decoder forward, checked against transformers' own logits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from core.conftest import Checkpoints
from core.tiny import (
    CPU,
    decode,
    greedy_by_transformers,
    ids_of,
    load_target,
    logits_of,
    make_model,
    truncated,
    write_gguf,
)
from memspec_core.errors import CheckpointError
from memspec_core.models.backend import Backend, TorchBackend, choose_backend
from memspec_core.models.checkpoint import Checkpoint, open_checkpoint
from memspec_core.models.decoder import Decoder, DecoderParts
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.sources import EMBEDDING, FINAL_NORM, HEAD
from memspec_core.models.target import Target, plan_target
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.models.weights import WeightReader
from memspec_core.request import GenerationRequest

SMALL = {"vocab_size": 320}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-tied": ("llama", {}),
    "llama-mha-untied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-one-key-head": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2-gqa-tied": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
}


def reference(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids])).logits[0]
    return logits


def tokens(count: int, seed: int = 0, vocabulary: int = 320) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count,), generator=generator).tolist()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, checkpoints: Checkpoints
) -> tuple[PreTrainedModel, Target]:
    family, sizes = MODELS[request.param]
    model = make_model(family, seed=3, **(SMALL | sizes))
    return model, load_target(checkpoints.save(f"decoder-{request.param}", model))


def test_logits_are_those_of_transformers(pair: tuple[PreTrainedModel, Target]) -> None:
    model, target = pair
    target.cache.truncate(0)
    fed = tokens(40)
    close(logits_of(target, fed), reference(model, fed))


def test_feeding_in_parts_and_after_a_rollback_changes_nothing(
    pair: tuple[PreTrainedModel, Target],
) -> None:
    model, target = pair
    fed = tokens(30, seed=1)
    expected = reference(model, fed)
    target.cache.truncate(0)
    logits_of(target, tokens(17, seed=2))
    target.cache.truncate(0)
    parts = [logits_of(target, fed[first:last]) for first, last in ((0, 1), (1, 4), (4, 20))]
    logits_of(target, tokens(9, seed=3))  # a draft that is refused
    assert target.cache.length == 29
    target.cache.truncate(20)
    parts += [logits_of(target, fed[20:21]), logits_of(target, fed[21:])]
    close(torch.cat(parts), expected)
    assert target.cache.length == 30


def test_sharded_weights_with_an_index(checkpoints: Checkpoints) -> None:
    model = make_model(seed=4, **SMALL)
    folder = checkpoints.save("sharded", model, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    close(logits_of(load_target(folder), tokens(12)), reference(model, tokens(12)))


def test_bf16_is_near_fp32_and_has_fp32_logits(checkpoints: Checkpoints) -> None:
    model = make_model(seed=5, **SMALL)
    folder = checkpoints.save("bf16", model)
    target = load_target(folder, dtype="bf16")
    ours, theirs = logits_of(target, tokens(20)), reference(model, tokens(20))
    assert "bf" in target.decoder.kernel
    assert ours.dtype is torch.float32
    assert float((ours - theirs).norm() / theirs.norm()) < 0.03


def test_stored_takes_the_dtype_of_the_file(checkpoints: Checkpoints) -> None:
    folder = checkpoints.save("half", make_model(seed=6, **SMALL).to(torch.bfloat16))
    target = load_target(folder, dtype="stored")
    assert target.decoder.kernel in ("torch bfloat16", "native bf16 (AVX-512)")


def test_weight_bytes_are_what_the_plan_says(checkpoints: Checkpoints) -> None:
    folder = checkpoints.save("sizes", make_model(seed=7, **SMALL))
    for dtype in ("fp32", "bf16"):
        plan = plan_target(str(folder), dtype=dtype, device=CPU, context_tokens=64)
        target = plan.load()
        assert target.decoder.weight_bytes == pytest.approx(plan.weight_bytes, rel=0.02)
        assert target.cache.rows.nbytes == plan.kv_bytes


def test_the_context_is_cut_to_the_checkpoints_own(target_folder: Path) -> None:
    plan = plan_target(str(target_folder), dtype="fp32", device=CPU, context_tokens=10_000)
    assert plan.context_tokens == 256


def test_greedy_tokens_of_the_embedded_target(embedded: Checkpoint, tokenizer: Tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        embedded.folder, gguf_file=embedded.gguf_file, dtype=torch.float32
    ).eval()
    prompt = tokenizer.prompt_ids(GenerationRequest(prompt="Why is the sky blue?").validated(()))
    theirs = greedy_by_transformers(model, prompt, 20, ends=[2])
    del model
    target = embedded_as("fp32", embedded, tokenizer)
    assert ids_of(decode(target, prompt, max_new_tokens=20)) == theirs
    # The same weights at 4 bits, as they are stored, agree for the most part.
    stored = embedded_as("stored", embedded, tokenizer)
    assert "int4" in stored.decoder.kernel
    fed = [*prompt, *theirs]
    target.cache.truncate(0)
    same = logits_of(stored, fed).argmax(-1) == logits_of(target, fed).argmax(-1)
    assert float(same.float().mean()) > 0.85


def embedded_as(dtype: str, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Target:
    """Load the embedded target without reading its long token list once more."""
    backend = choose_backend(checkpoint.weights, checkpoint.config, dtype, CPU, 1)
    decoder = build(checkpoint, backend, dtype)
    cache = KeyValueCache(decoder.config, 128, backend.cache_dtype(CPU), CPU)
    ends = tokenizer.end_of_sequence_ids()
    return Target(checkpoint, backend, decoder, tokenizer, cache, ends, dtype)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_of_either_family(family: str, tmp_path: Path) -> None:
    model = make_model(family, seed=8, **SMALL, tie_word_embeddings=False)
    write_gguf(tmp_path / "tiny.gguf", model, family)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.family == family
    assert checkpoint.end_of_sequence_ids == {2}
    decoder = build(checkpoint, TorchBackend(1))
    cache = KeyValueCache(decoder.config, 32, torch.float32, CPU)
    hidden = decoder.forward(tokens(16), cache)
    close(decoder.logits(hidden), reference(model, tokens(16)))


def build(checkpoint: Checkpoint, backend: Backend, dtype: str = "fp32") -> Decoder:
    reader, config = WeightReader(checkpoint.weights, dtype, CPU, backend), checkpoint.config
    embedding = reader.table(EMBEDDING)
    layers = [reader.layer(config, index) for index in range(config.layers)]
    head = embedding if config.tied_head else reader.linear(HEAD)
    return backend.decoder(DecoderParts(config, embedding, layers, reader.norm(FINAL_NORM), head))


def test_a_truncated_model_agrees_now_and_then() -> None:
    """What the tests of decoding rely on: drafts that are right in part."""
    model = make_model(seed=1)
    fed = tokens(60)
    agree = reference(model, fed).argmax(-1) == reference(truncated(model, 1), fed).argmax(-1)
    assert 0.05 < float(agree.float().mean()) < 0.95


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt_neox"}, "family 'gpt_neox'"),
        ({"model_type": "mistral"}, "family 'mistral'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding-window"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "by 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "by 'dynamic'",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised by awq"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    changes: dict[str, Any], said: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints.save("refused", make_model(seed=9, **SMALL)), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=said) as refused:
        open_checkpoint(folder)
    assert str(folder) in str(refused.value)
