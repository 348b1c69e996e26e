"""The shape of a Llama- or Qwen2-family decoder."""

from dataclasses import dataclass
from typing import Any

import torch

from memspec_core.errors import CheckpointError

FAMILIES = ("llama", "qwen2")
ROPE_KINDS = ("default", "linear", "llama3")
"""Rotary scalings whose frequencies are fixed when the model is loaded."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of a decoder.

    `inverse_frequencies` [head_size / 2] are those of the rotary embedding; `context_tokens` is
    the longest context that the checkpoint was made for.
    """

    family: str
    vocabulary_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    norm_epsilon: float
    tied_head: bool
    context_tokens: int
    inverse_frequencies: tuple[float, ...]
    rotary_scale: float = 1.0


def config_from_transformers(config: Any, where: str) -> DecoderConfig:
    """Translate a transformers config; raises `CheckpointError` for what we cannot compute."""
    family = config.model_type
    if family not in FAMILIES:
        raise CheckpointError(
            f"{where} holds a model of the family '{family}'; "
            f"{' and '.join(FAMILIES)} checkpoints are supported."
        )
    if getattr(config, "use_sliding_window", False):
        raise CheckpointError(f"{where} uses sliding-window attention, which is not supported.")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where} uses the activation {config.hidden_act}, not silu.")
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    if head_size < 2 or head_size % 2:
        raise CheckpointError(f"{where} has heads of {head_size}; their size must be even.")
    frequencies, scale = _rotary(config, head_size, where)
    return DecoderConfig(
        family=family,
        vocabulary_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_size=head_size,
        intermediate_size=config.intermediate_size,
        norm_epsilon=config.rms_norm_eps,
        tied_head=bool(config.tie_word_embeddings),
        context_tokens=config.max_position_embeddings,
        inverse_frequencies=frequencies,
        rotary_scale=scale,
    )


def default_inverse_frequencies(base: float, head_size: int) -> torch.Tensor:
    """Return base^(-2i/d) for i in 0 .. d/2 - 1 (Su et al., RoFormer), fp32."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    return 1.0 / base**exponents


def _rotary(config: Any, head_size: int, where: str) -> tuple[tuple[float, ...], float]:
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{where} scales its rotary embedding by '{kind}'; "
            f"{', '.join(ROPE_KINDS)} are supported."
        )
    if kind == "default":
        base = float(parameters["rope_theta"])
        return tuple(default_inverse_frequencies(base, head_size).tolist()), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)
