"""The native step as a backend: layers and decoders in C++."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memspec_core.models.configuration import DecoderConfig
from memspec_core.models.decoder import Decoder, DecoderParts, FeatureDecoder, Fuse, Layers
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.linear import Linear, Table
from memspec_core.models.native.packing import BLOCK, TILE, Packed, fits, pack
from memspec_core.models.quantised import Int4Weight, Int8Weight, Weight, rounded_where

MOST_HEAD_SIZE = 256


class SharedThreads:
    """How many threads compute the passes of all that share this; results do not depend on it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._own = threading.local()

    @property
    def count(self) -> int:
        """How many compute a pass that the calling thread begins."""
        return 1 if getattr(self._own, "is_alone", False) else self._count

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Compute on the calling thread alone within; others have one thread less, of several."""
        lent, was_alone = int(self._count > 1), getattr(self._own, "is_alone", False)
        self._count -= lent
        self._own.is_alone = True
        try:
            yield
        finally:
            self._own.is_alone = was_alone
            self._count += lent


class NativeLinear:
    """A linear layer [out, in] of 4 or 8 bits, bf16 or fp16.

    Rows go through it in bf16, or at 4 and 8 bits rounded to 8 bits in blocks of 32; sums are in
    fp32.
    """

    def __init__(
        self,
        library: ModuleType,
        weight: Weight | Packed,
        bias: torch.Tensor | None,
        threads: SharedThreads,
    ) -> None:
        self._threads = threads
        self.packed = packed = weight if isinstance(weight, Packed) else pack(weight, library)
        self.bias = None if bias is None else bias.float().contiguous()
        order = packed.input_order
        self.kernel = f"native {packed.format_name} (AVX-512)"
        self.weight_bytes = packed.values.nbytes + (0 if order is None else 4 * order.numel())
        self.inputs = packed.inputs
        self.handle = library.Linear(
            packed.values,
            packed.format_name,
            packed.outputs,
            packed.inputs,
            packed.group_size,
            self.bias,
            None if order is None else order.to(torch.int32).contiguous(),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to n rows; the result is in fp32."""
        result: torch.Tensor = self.handle.apply(x.float().contiguous(), self._threads.count)
        return result

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows [n, in] of the weight in fp32; not of one that reorders its inputs."""
        result: torch.Tensor = self.handle.rows(indices.tolist())
        return result

    def rounded_rows(self, indices: torch.Tensor) -> Packed:
        """Return rows of the weight rounded as by `round_to_int4`, for whole tiles of indices."""
        values = self.handle.rounded_rows(indices.contiguous())
        return Packed("int4", values, len(indices), self.inputs)


class _NativeLayers(Layers):
    """What all native decoders share: `_step` is theirs in C++."""

    _step: Any
    _threads: SharedThreads

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits; see `Layers.logits`."""
        result: torch.Tensor = self._step.logits(hidden.contiguous(), self._threads.count)
        return result

    def most_probable(self, hidden: torch.Tensor) -> tuple[list[int], list[float]]:
        """Return the largest outputs and their values; see `Layers.most_probable`."""
        found: tuple[list[int], list[float]]
        found = self._step.most_probable(hidden.contiguous(), self._threads.count)
        return found


class NativeDecoder(_NativeLayers, Decoder):
    """A decoder that is one call into C++ a pass.

    A row's result does not depend on how many rows a pass has, nor on the number of threads.
    """

    def __init__(self, library: ModuleType, threads: SharedThreads, parts: DecoderParts) -> None:
        super().__init__(parts)
        self._threads = threads
        self._step = library.Step(*_step_parts(library, self))

    def forward(
        self,
        token_ids: Sequence[int],
        cache: KeyValueCache,
        parents: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Feed n tokens, of a tree at most 64; see `Decoder.forward`."""
        hidden: torch.Tensor = self._step.forward(
            token_ids,
            cache.rows,
            cache.length,
            parents or [],
            self._threads.count,
            cache.features,
            cache.taps,
        )
        cache.token_ids.extend(token_ids)
        return hidden

    def mean_state(self, cache: KeyValueCache, first: int, end: int) -> torch.Tensor:
        """Return the mean of some states; see `Decoder.mean_state`."""
        mean: torch.Tensor = self._step.mean_state(cache.features, first, end)
        return mean

    @torch.inference_mode()
    def _move(self, cache: KeyValueCache, sources: list[int], places: list[int]) -> None:
        heads, size = self.config.kv_heads, self.config.head_size
        values = cache.rows[:, heads:]
        values[:, :, places] = values[:, :, sources]
        # Keys lie as [positions / 16, head size, 16], so that scores of 16 positions are vectors.
        keys = cache.rows[:, :heads].view(len(self.layers), heads, -1, size, TILE)
        keys = keys.transpose(-1, -2)
        from_blocks, from_lanes = _split(sources)
        to_blocks, to_lanes = _split(places)
        keys[:, :, to_blocks, to_lanes] = keys[:, :, from_blocks, from_lanes]


class NativeFeatureDecoder(_NativeLayers, FeatureDecoder):
    """The layers of a feature draft; all greedy proposals are one call into C++.

    A row's result depends neither on the rows beside it nor on the number of threads, and proposals
    are the same in one call as step by step.
    """

    def __init__(
        self, library: ModuleType, threads: SharedThreads, parts: DecoderParts, fuse: Fuse
    ) -> None:
        super().__init__(parts, fuse)
        self._threads = threads
        self._step = library.FeatureStep(
            *_step_parts(library, self),
            _handle(fuse.features),
            _handle(fuse.input),
            fuse.embedding_norm,
            self.head_token_ids,
        )

    def feed(
        self, token_ids: Sequence[int], features: torch.Tensor, cache: KeyValueCache
    ) -> torch.Tensor:
        """Feed n tokens that follow known features; see `FeatureDecoder.feed`."""
        hidden: torch.Tensor = self._step.feed(
            token_ids, features, cache.rows, cache.length, self._threads.count
        )
        cache.token_ids.extend(token_ids)
        return hidden

    def follow(
        self,
        token_ids: Sequence[int],
        states: torch.Tensor,
        cache: KeyValueCache,
        parents: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Feed n proposed tokens, at most 64; see `FeatureDecoder.follow`."""
        hidden: torch.Tensor = self._step.follow(
            token_ids,
            states.contiguous(),
            cache.rows,
            cache.length,
            parents or [],
            self._threads.count,
        )
        cache.token_ids.extend(token_ids)
        return hidden

    def roll(
        self,
        token_ids: Sequence[int],
        features: torch.Tensor,
        cache: KeyValueCache,
        count: int,
        least: float = 0.0,
        worth: float = 0.0,
    ) -> list[int]:
        """Feed n tokens and propose `count` or fewer; see `FeatureDecoder.roll`."""
        threads = self._threads.count
        proposed: list[int]
        proposed, fed = self._step.roll(
            token_ids, features, cache.rows, cache.length, count, least, worth, threads
        )
        cache.token_ids.extend([*token_ids, *proposed[:fed]])
        return proposed


class NativeBackend:
    """Makes native layers and decoders; `layout` names how their weights lie in memory."""

    name = "native"
    own_threads = True
    scratch_bytes = 7
    cuts_in_place = True
    DTYPES = frozenset((torch.bfloat16, torch.float16))
    """Of dense weights."""

    def __init__(self, library: ModuleType, threads: int) -> None:
        self._library = library
        self.layout = Path(library.__file__ or "").stem
        self.threads = threads
        self._shared = SharedThreads(threads)

    @staticmethod
    def has_sizes(config: DecoderConfig) -> bool:
        """Whether a decoder of these sizes can be computed."""
        tiled = (config.vocabulary_size, config.head_size)
        blocked = (config.hidden_size, config.intermediate_size, config.heads * config.head_size)
        return (
            all(size % TILE == 0 for size in tiled)
            and all(size % BLOCK == 0 for size in blocked)
            and config.head_size <= MOST_HEAD_SIZE
        )

    def takes(self, weight: Int4Weight | Int8Weight) -> bool:
        """Whether there is a kernel for a weight in groups: for multiples of 32 there is."""
        return fits(weight)

    def lending(self) -> AbstractContextManager[None]:
        """Let one thread less compute within, so that something else finds a core."""
        return self._shared.lending()

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> NativeLinear:
        """Make a layer over a weight that it takes, or over a dense one, fp32 rounded to bf16."""
        if isinstance(weight, torch.Tensor) and weight.dtype not in self.DTYPES:
            weight = weight.bfloat16()
        return NativeLinear(self._library, weight, bias, self._shared)

    def laid_out(self, packed: Packed, bias: torch.Tensor | None) -> NativeLinear:
        """Make a layer over a weight that is laid out already."""
        return NativeLinear(self._library, packed, bias, self._shared)

    def table(self, weight: Int8Weight | torch.Tensor) -> NativeLinear:
        """Make an embedding."""
        return self.linear(weight)

    def cut(self, table: Table, indices: torch.Tensor) -> NativeLinear:
        """Make a layer of some rows of a table, at 4 bits where they are whole tiles."""
        if isinstance(table, NativeLinear) and len(indices) % TILE == 0:
            return self.laid_out(table.rounded_rows(indices), None)
        return self.linear(rounded_where(self.takes, table.rows(indices)))

    def decoder(self, parts: DecoderParts) -> NativeDecoder:
        """Put a decoder together from native parts."""
        return NativeDecoder(self._library, self._shared, parts)

    def feature_decoder(self, parts: DecoderParts, fuse: Fuse) -> NativeFeatureDecoder:
        """Put the layers of a feature draft together from native parts."""
        return NativeFeatureDecoder(self._library, self._shared, parts, fuse)

    def cache_dtype(self, device: torch.device) -> torch.dtype:
        """Return fp16."""
        return torch.float16


def _split(positions: list[int]) -> tuple[list[int], list[int]]:
    """Return the blocks of positions, and their lanes within them."""
    return [place // TILE for place in positions], [place % TILE for place in positions]


def _step_parts(library: ModuleType, decoder: Layers) -> tuple[object, ...]:
    """Return what the library makes a step of."""
    config = decoder.config
    sizes = library.Sizes(
        config.hidden_size,
        config.intermediate_size,
        config.heads,
        config.kv_heads,
        config.head_size,
        config.norm_epsilon,
        config.rotary_scale,
    )
    layers = [
        library.Layer(
            layer.input_norm,
            _handle(layer.qkv),
            _handle(layer.output),
            layer.post_norm,
            _handle(layer.gate_up),
            _handle(layer.down),
        )
        for layer in decoder.layers
    ]
    return (
        sizes,
        layers,
        _handle(decoder.embedding),
        decoder.norm,
        _handle(decoder.head),
        list(config.inverse_frequencies),
    )


def _handle(linear: Linear) -> object:
    assert isinstance(linear, NativeLinear)
    return linear.handle
