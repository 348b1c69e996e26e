"""Tiny random checkpoints and the few helpers that many tests share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.models.decoder import Decoder
from memspec_core.models.draft import (
    FEATURE,
    FUSE_FEATURES,
    FUSE_INPUT,
    HEAD_TOKENS,
    MANIFEST,
    WEIGHTS,
    Manifest,
    plan_draft,
)
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.quantised import round_to_int4
from memspec_core.models.sources import FINAL_NORM, layer_shapes
from memspec_core.models.target import Target, plan_target
from memspec_core.request import FinishReason, GenerationRequest, SamplingSettings
from memspec_core.settings import Settings
from memspec_core.speculation.calibration import MOST_ROWS, Costs
from memspec_core.speculation.chain import IndependentDraft
from memspec_core.speculation.decoding import Decoding
from memspec_core.speculation.feature import FeatureDraft, FeatureTreeDraft
from memspec_core.speculation.planner import Planner
from memspec_core.speculation.proposal import Draft

CPU = torch.device("cpu")
LATER_LAYERS = 0.15
VOCABULARY = 49152
EVEN_COSTS = Costs((1.0,) * MOST_ROWS)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}


class ManualClock:
    """A clock that only a test moves; `step` seconds pass at each look where it is set."""

    def __init__(self, step: float = 0.0) -> None:
        self.seconds = 1000.0
        self.step = step

    def now(self) -> float:
        self.seconds += self.step
        return self.seconds


def make_model(family: str = "llama", seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """Make a random model whose biases and norms are random as well."""
    config_type, model_type = _FAMILIES[family]
    torch.manual_seed(seed)
    model = model_type(config_type(**(SIZES | sizes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)
            elif name.endswith(("o_proj.weight", "down_proj.weight")) and ".0." not in name:
                parameter.mul_(LATER_LAYERS)  # so that the first layer alone is often right
    return model


def truncated(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a model of the first layers, which often agrees with the whole one."""
    sizes = model.config.to_dict() | {"num_hidden_layers": layers}
    smaller = type(model)(type(model.config)(**sizes)).eval()
    smaller.load_state_dict(model.state_dict(), strict=False)
    return smaller


def load_target(
    folder: Path,
    *,
    dtype: str = "fp32",
    context_tokens: int = 256,
    taps: tuple[int, ...] = (),
    threads: int = 0,
) -> Target:
    plan = plan_target(
        str(folder), dtype=dtype, device=CPU, context_tokens=context_tokens, threads=threads
    )
    return plan.with_taps(taps).load()


def write_feature_draft(
    folder: Path,
    target: Target,
    taps: tuple[int, ...],
    *,
    layers: int = 1,
    head_tokens: Sequence[int] = range(0, 192, 3),
    four_bits: bool = False,
    without: str = "",
    **manifest: Any,
) -> Path:
    """Write a random feature draft, made for this target; `without` leaves a tensor out."""
    config = target.decoder.config
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        FINAL_NORM: (hidden,),
        FUSE_FEATURES: (hidden, len(taps) * hidden),
        FUSE_INPUT: (hidden, 2 * hidden),
    }
    for layer, (name, shape) in product(range(layers), layer_shapes(config).items()):
        shapes[f"layers.{layer}.{name}"] = shape
    shapes.pop(without, None)
    generator = torch.Generator().manual_seed(7)
    tensors = {HEAD_TOKENS: torch.tensor(list(head_tokens), dtype=torch.int32)}
    for name, shape in shapes.items():
        weight = 0.2 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        if len(shape) == 1 or not four_bits:
            tensors[name] = weight
            continue
        rounded = round_to_int4(weight)
        tensors[f"{name}.codes"] = rounded.pairs
        tensors[f"{name}.scale"] = rounded.scale.bfloat16()
        tensors[f"{name}.minimum"] = rounded.minimum.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    fields: dict[str, Any] = {
        "name": folder.name,
        "kind": FEATURE,
        "layers": tuple(range(layers)),
        "hidden_size": hidden,
        "head_tokens": len(head_tokens),
        "context_tokens": config.context_tokens,
        "weights_sha256": sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
        "target_sha256": target.checkpoint.sha256(),
        "tokenizer_sha256": target.tokenizer.sha256(),
        "card": {},
        "taps": taps,
    }
    (folder / MANIFEST).write_text(Manifest(**(fields | manifest)).to_json())
    return folder


def load_feature_draft(name: str, folder: Path, target: Target, tree: bool = False) -> FeatureDraft:
    decoder, cache = plan_draft(name, str(folder), target).load_feature(target)
    kind = FeatureTreeDraft if tree else FeatureDraft
    return kind(name, decoder, cache, target.decoder.config.vocabulary_size, target.cache)


def load_draft(name: str, folder: Path, target: Target) -> IndependentDraft:
    decoder, cache = plan_draft(name, str(folder), target).load(target)
    return IndependentDraft(name, decoder, cache, target.decoder.config.vocabulary_size)


def logits_of(target: Target, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [n, vocabulary] for tokens that are fed after what the cache holds."""
    hidden = target.decoder.forward(list(token_ids), target.cache)
    return target.decoder.logits(hidden)


def never() -> FinishReason | None:
    return None


def decode(
    target: Target,
    prompt_ids: Sequence[int],
    drafts: Callable[[int], Draft | None] | Draft | None = None,
    *,
    gamma: int = 3,
    max_new_tokens: int = 24,
    interruption: Callable[[], FinishReason | None] = never,
    **request: Any,
) -> list[Iteration]:
    """Run a generation; `drafts` is a draft, or gives the draft of each iteration."""
    choose = drafts if callable(drafts) else lambda _: drafts
    decoding = Decoding(
        target,
        prompt_ids,
        GenerationRequest(prompt="-", **request),
        max_new_tokens=max_new_tokens,
        planner=Planner(EVEN_COSTS),
        interruption=interruption,
        clock=ManualClock(),
    )
    events: list[Iteration] = []
    try:
        decoding.read_prompt()
        while not decoding.ended:
            draft = choose(len(events))
            wanted = "none" if draft is None else draft.name
            events.append(decoding.iterate(draft, wanted, gamma, IterationSeconds()))
    finally:
        decoding.close()
    return events


def ids_of(events: Sequence[Iteration]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def text_of(events: Sequence[Iteration]) -> str:
    return "".join(event.text for event in events)


def greedy_by_transformers(
    model: PreTrainedModel, prompt_ids: Sequence[int], count: int, ends: Sequence[int] = ()
) -> list[int]:
    """Return transformers' own greedy tokens, up to and without an end of sequence."""
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor([list(prompt_ids)]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
        )
    tokens = output[0, len(prompt_ids) :].tolist()
    stops = [index for index, token in enumerate(tokens) if token in ends]
    return tokens[: stops[0]] if stops else tokens


def without_ends(target: Target) -> Target:
    """Return the target with no end-of-sequence token."""
    return replace(target, end_of_sequence_ids=frozenset())


def make_settings(target: Path, drafts: dict[str, Path] | None = None, **more: Any) -> Settings:
    drafts = drafts or {}
    values: dict[str, object] = {
        "target.path": str(target),
        "drafts.names": list(drafts),
        "dtype": "fp32",
        "strategy": "general_static",
        "scheduling_interval": 4,
        "context_tokens": 256,
        "max_prompt_tokens": 200,
        "default_max_new_tokens": 16,
        "draft_length": 2,
        "lookup": False,
        "memory.floor_mib": 0,
        "memory.budget_mib": 2000,
    }
    values |= {f"drafts.{name}.path": str(path) for name, path in drafts.items()}
    fixed: dict[str, object] = {"draft_length": 2, "lookup": False}
    return Settings.from_parameters(
        fixed | values | {k.replace("__", "."): v for k, v in more.items()}
    )


def sampling(temperature: float = 1.0, **more: Any) -> SamplingSettings:
    return SamplingSettings(temperature=temperature, **more)


def assert_law(counts: Sequence[int], law: Sequence[float]) -> None:
    """Chi-square test at about one in 10^5, outcomes that are expected rarely put together.

    The limit is Wilson and Hilferty's approximation of the quantile.
    """
    total = sum(counts)
    assert all(n == 0 for n, p in zip(counts, law, strict=True) if p == 0.0)
    cells = sorted((p * total, n) for n, p in zip(counts, law, strict=True) if p > 0.0)
    pooled: list[tuple[float, int]] = []
    expected, seen = 0.0, 0
    for cell_expected, cell_seen in cells:
        expected, seen = expected + cell_expected, seen + cell_seen
        if expected >= 5.0:
            pooled.append((expected, seen))
            expected, seen = 0.0, 0
    if expected and pooled:
        last_expected, last_seen = pooled.pop()
        pooled.append((last_expected + expected, last_seen + seen))
    freedom = len(pooled) - 1
    if freedom < 1:
        return
    statistic = sum((n - e) ** 2 / e for e, n in pooled)
    spread = 2.0 / (9.0 * freedom)
    limit = freedom * (1.0 - spread + 4.265 * math.sqrt(spread)) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


def assert_rows_are_of(context: list[int], decoder: Decoder, cache: KeyValueCache) -> None:
    """Check that a cache holds what feeding the beginning of the context gives, and no more."""
    assert cache.length <= max(0, len(context) - 1)
    if cache.length:
        fresh = KeyValueCache(decoder.config, cache.length, torch.float32, CPU)
        decoder.forward(context[: cache.length], fresh)
        held = cache.rows[:, :, : cache.length]
        torch.testing.assert_close(held, fresh.rows[:, :, : cache.length], atol=1e-4, rtol=1e-4)


def write_gguf(path: Path, model: PreTrainedModel, family: str = "llama") -> None:
    """Write a model as llama.cpp does: query and key rows of Llama in interleaved order."""
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    for name, value in model.state_dict().items():
        array = value.numpy()
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        part = name.rsplit(".", 2)[-2].removesuffix("_proj")
        if family == "llama" and part in heads:
            split = array.reshape(heads[part], 2, -1, *array.shape[1:])
            array = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)
        stem, kind = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
