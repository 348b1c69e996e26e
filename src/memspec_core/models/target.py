"""The target model: a checkpoint brought into memory."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from memspec_core.errors import CheckpointError, SettingsError
from memspec_core.models.backend import Backend, choose_backend
from memspec_core.models.checkpoint import Checkpoint, open_checkpoint
from memspec_core.models.cuda_int4 import int4_kernel
from memspec_core.models.decoder import Decoder, DecoderParts
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.sources import EMBEDDING, FINAL_NORM, HEAD
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.models.weights import ROUNDED_BITS, WeightReader, planned_bytes

READ_ROWS = 256
"""Tokens of a context in one pass."""

TOKENIZER_BYTES = 280
"""That a tokenizer takes for each token, as measured with one of 49,152 tokens."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A target that is ready to decode one sequence at a time."""

    checkpoint: Checkpoint
    backend: Backend
    decoder: Decoder
    tokenizer: Tokenizer
    cache: KeyValueCache
    end_of_sequence_ids: frozenset[int]
    dtype: str

    @property
    def context_tokens(self) -> int:
        """The longest context, prompt and answer together."""
        return self.cache.capacity

    def read(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Feed a whole context to an empty cache; return its hidden rows [tokens, hidden]."""
        self.cache.truncate(0)
        parts = range(0, len(token_ids), READ_ROWS)
        rows = [self.decoder.forward(token_ids[i : i + READ_ROWS], self.cache) for i in parts]
        return torch.cat(rows)


@dataclass(frozen=True)
class TargetPlan:
    """A target that has been looked at but not read, with the fast memory that it will take."""

    checkpoint: Checkpoint
    dtype: str
    device: torch.device
    backend: Backend
    context_tokens: int
    weight_bytes: int
    kv_bytes: int
    taps: tuple[int, ...] = ()

    @property
    def tokenizer_bytes(self) -> int:
        """Fast memory of the tokenizer's tables, about."""
        return TOKENIZER_BYTES * self.checkpoint.config.vocabulary_size

    def with_taps(self, taps: tuple[int, ...]) -> "TargetPlan":
        """Return the plan of a target that keeps its features after the layers `taps`."""
        kv_bytes = KeyValueCache.bytes_for(
            self.checkpoint.config,
            self.context_tokens,
            self.backend.cache_dtype(self.device),
            taps,
        )
        return replace(self, taps=taps, kv_bytes=kv_bytes)

    def load(self, between_parts: Callable[[], None] = lambda: None) -> Target:
        """Bring the target into memory; raises `CheckpointError`.

        `between_parts` is called between parts of the load; what it raises ends the load.
        """
        between_parts()
        tokenizer = Tokenizer.of(self.checkpoint)
        decoder = self._decoder(between_parts)
        ends = self.checkpoint.end_of_sequence_ids | tokenizer.end_of_sequence_ids()
        if not ends:
            _LOG.warning(
                "%s names no end-of-sequence token; answers end by length", self.checkpoint.path
            )
        cache = KeyValueCache(
            decoder.config,
            self.context_tokens,
            self.backend.cache_dtype(self.device),
            self.device,
            self.taps,
        )
        return Target(self.checkpoint, self.backend, decoder, tokenizer, cache, ends, self.dtype)

    def _decoder(self, between_parts: Callable[[], None]) -> Decoder:
        config = self.checkpoint.config
        reader = WeightReader(self.checkpoint.weights, self.dtype, self.device, self.backend)
        self._require_embedding()
        embedding = reader.table(EMBEDDING)
        head = embedding if config.tied_head else reader.linear(HEAD)
        layers = []
        for index in range(config.layers):
            between_parts()
            layers.append(reader.layer(config, index))
        return self.backend.decoder(
            DecoderParts(config, embedding, layers, reader.norm(FINAL_NORM), head)
        )

    def _require_embedding(self) -> None:
        config = self.checkpoint.config
        found = self.checkpoint.weights.shape(EMBEDDING)
        if found != (config.vocabulary_size, config.hidden_size):
            raise CheckpointError(
                f"{self.checkpoint.path}: the embedding is {found}, but the sizes say "
                f"{(config.vocabulary_size, config.hidden_size)}."
            )


def plan_target(
    path: str, *, dtype: str, device: torch.device, context_tokens: int, threads: int = 0
) -> TargetPlan:
    """Look at a target without reading its weights; raises `CheckpointError`.

    `dtype` is "stored", "fp32", "bf16", "int4" or "int8"; the context is cut to the checkpoint's
    own limit. Raises `SettingsError` for the last two on a device that has no kernel for them.
    """
    if dtype in ROUNDED_BITS and not _rounds_to(dtype, device):
        raise SettingsError(
            f"dtype is '{dtype}', but torch has no kernel for it on the device '{device}'; "
            "use dtype bf16."
        )
    checkpoint = open_checkpoint(path)
    config, weights = checkpoint.config, checkpoint.weights
    backend = choose_backend(weights, config, dtype, device, threads or torch.get_num_threads())
    capacity = min(context_tokens, config.context_tokens)
    return TargetPlan(
        checkpoint=checkpoint,
        dtype=dtype,
        device=device,
        backend=backend,
        context_tokens=capacity,
        weight_bytes=planned_bytes(weights, config, dtype, device),
        kv_bytes=KeyValueCache.bytes_for(config, capacity, backend.cache_dtype(device)),
    )


def _rounds_to(dtype: str, device: torch.device) -> bool:
    return device.type == "cpu" or (dtype == "int4" and int4_kernel(device) is not None)


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
