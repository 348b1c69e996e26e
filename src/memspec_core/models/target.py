"""The target model: a checkpoint brought into memory."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memspec_core.errors import CheckpointError, SettingsError
from memspec_core.models.checkpoint import Checkpoint, open_checkpoint
from memspec_core.models.decoder import Decoder
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.linear import DenseLinear, Linear
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.models.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROUNDED,
    WeightReader,
    planned_bytes,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A target that is ready to decode one sequence at a time."""

    checkpoint: Checkpoint
    decoder: Decoder
    tokenizer: Tokenizer
    cache: KeyValueCache
    end_of_sequence_ids: frozenset[int]
    dtype: str

    @property
    def context_tokens(self) -> int:
        """The longest context, prompt and answer together."""
        return self.cache.capacity


@dataclass(frozen=True)
class TargetPlan:
    """A target that has been looked at but not read, with the fast memory that it will take."""

    checkpoint: Checkpoint
    dtype: str
    device: torch.device
    context_tokens: int
    weight_bytes: int
    kv_bytes: int

    def load(self, between_parts: Callable[[], None] = lambda: None) -> Target:
        """Bring the target into memory; raises `CheckpointError`.

        `between_parts` is called between parts of the load; what it raises ends the load.
        """
        between_parts()
        tokenizer = Tokenizer.of(self.checkpoint)
        decoder = _build(self.checkpoint, self.dtype, self.device, between_parts)
        ends = self.checkpoint.end_of_sequence_ids | tokenizer.end_of_sequence_ids()
        if not ends:
            _LOG.warning(
                "%s names no end-of-sequence token; answers end by length", self.checkpoint.path
            )
        cache = KeyValueCache(
            decoder.config, self.context_tokens, cache_dtype(self.device), self.device
        )
        return Target(self.checkpoint, decoder, tokenizer, cache, ends, self.dtype)


def plan_target(path: str, *, dtype: str, device: torch.device, context_tokens: int) -> TargetPlan:
    """Look at a target without reading its weights; raises `CheckpointError`.

    `dtype` is "stored", "fp32", "bf16" or "int4"; the context is cut to the checkpoint's own
    limit. Raises `SettingsError` for "int4" on another device than the CPU.
    """
    if dtype == ROUNDED and device.type != "cpu":
        raise SettingsError(
            f"dtype is '{dtype}', which runs on the CPU only, but device is '{device}'; "
            "use dtype bf16."
        )
    checkpoint = open_checkpoint(path)
    capacity = min(context_tokens, checkpoint.config.context_tokens)
    return TargetPlan(
        checkpoint=checkpoint,
        dtype=dtype,
        device=device,
        context_tokens=capacity,
        weight_bytes=planned_bytes(checkpoint.weights, checkpoint.config, dtype, device),
        kv_bytes=KeyValueCache.bytes_for(checkpoint.config, capacity, cache_dtype(device)),
    )


def cache_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of KV caches: fp32 on CPUs, where attention is fastest in it."""
    return torch.float32 if device.type == "cpu" else torch.float16


def parse_device(name: str) -> torch.device:
    """Turn the parameter `device` into a device that exists; raises `SettingsError`."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"device is '{name}'; use cpu, cuda or cuda:<index>.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"device is '{name}', but torch finds no CUDA device; use cpu.")
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"device is '{name}'; use cpu, cuda or cuda:<index>.")
    return device


def _build(
    checkpoint: Checkpoint, dtype: str, device: torch.device, between_parts: Callable[[], None]
) -> Decoder:
    reader = WeightReader(checkpoint.weights, dtype, device)
    config = checkpoint.config
    embedding = reader.tensor(EMBEDDING)
    if embedding.shape != (config.vocabulary_size, config.hidden_size):
        raise CheckpointError(
            f"{checkpoint.path}: the embedding is {tuple(embedding.shape)}, but the sizes say "
            f"{(config.vocabulary_size, config.hidden_size)}."
        )
    head: Linear = DenseLinear(embedding) if config.tied_head else reader.linear(HEAD)
    layers = []
    for index in range(config.layers):
        between_parts()
        layers.append(reader.layer(config, index))
    return Decoder(config, embedding, layers, reader.norm(FINAL_NORM), head)
