"""Which implementation computes a model: torch, or the native step where it can."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from memspec_core.models.configuration import DecoderConfig
from memspec_core.models.cuda_int4 import int4_kernel
from memspec_core.models.decoder import Decoder, DecoderParts, FeatureDecoder, Fuse
from memspec_core.models.gptq_kernels import gptq_linear
from memspec_core.models.graphed_decoder import SWITCH, GraphedDecoder
from memspec_core.models.linear import DenseLinear, Int4Linear, Int8Linear, Linear, Table
from memspec_core.models.native.backend import NativeBackend
from memspec_core.models.native.library import library
from memspec_core.models.quantised import Int4Weight, Int8Weight, Weight, rounded_where
from memspec_core.models.sources import DTYPES, EMBEDDING, HEAD, WeightSource, matrix_names
from memspec_core.models.torch_decoder import TorchDecoder, TorchFeatureDecoder


class Backend(Protocol):
    """Makes the parts of a decoder from weights; `name` is for people.

    `threads`: how many compute; `own_threads`: whether these are others than torch's.
    `scratch_bytes`: for each weight of a layer, while it is made, beside the layer itself;
    `cuts_in_place`: but none of them to cut a table that it made.
    """

    name: str
    threads: int
    own_threads: bool
    scratch_bytes: int
    cuts_in_place: bool

    def takes(self, weight: Int4Weight | Int8Weight) -> bool:
        """Whether there is a kernel for a weight in groups; it is dequantised otherwise."""
        ...

    def lending(self) -> AbstractContextManager[None]:
        """Compute on the calling thread alone within, and have others leave it a core."""
        ...

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Make a layer over a weight that it takes, or over a dense one."""
        ...

    def table(self, weight: Int8Weight | torch.Tensor) -> Table:
        """Make an embedding."""
        ...

    def cut(self, table: Table, indices: torch.Tensor) -> Linear:
        """Make a layer of some rows of a table, at 4 bits where there is a kernel, else in bf16."""
        ...

    def decoder(self, parts: DecoderParts) -> Decoder:
        """Put a decoder together from parts that this backend made."""
        ...

    def feature_decoder(self, parts: DecoderParts, fuse: Fuse) -> FeatureDecoder:
        """Put the layers of a feature draft together from parts that this backend made."""
        ...

    def cache_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of KV caches."""
        ...


class TorchBackend:
    """Torch's own operations: every dtype, every device."""

    name = "torch"
    own_threads = False
    # The 4-bit kernel for CPUs takes codes as int32, made from rows in fp32, as measured; so much
    # takes dequantising as well, and the kernel for GPUs less.
    scratch_bytes = 12
    cuts_in_place = False
    feature_decoder = TorchFeatureDecoder

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def lending(self) -> AbstractContextManager[None]:
        """Change nothing: the number of torch's threads is another thread's affair."""
        return nullcontext()

    def takes(self, weight: Int4Weight | Int8Weight) -> bool:
        """Whether there is a kernel for a weight in groups where it lies: 8 bits on CPUs only."""
        device = weight.scale.device
        if isinstance(weight, Int4Weight):
            return Int4Linear.takes(weight) and int4_kernel(device) is not None
        return Int8Linear.takes(weight) and device.type == "cpu"

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Make a layer over a weight."""
        if isinstance(weight, Int4Weight):
            kernel = int4_kernel(weight.scale.device)
            assert kernel is not None, "the backend takes no such weight"
            return gptq_linear(weight, bias) or kernel(weight, bias)
        if isinstance(weight, Int8Weight):
            return Int8Linear(weight, bias)
        return DenseLinear(weight, bias)

    def table(self, weight: Int8Weight | torch.Tensor) -> Table:
        """Make an embedding."""
        return DenseLinear(_dense(weight))

    def cut(self, table: Table, indices: torch.Tensor) -> Linear:
        """Make a layer of some rows of a table, at 4 bits where there is a kernel, else in bf16."""
        return self.linear(rounded_where(self.takes, table.rows(indices)))

    def decoder(self, parts: DecoderParts) -> Decoder:
        """Put a decoder together; on a GPU one that replays its passes of few rows."""
        graphed = parts.norm.device.type == "cuda" and os.environ.get(SWITCH) != "0"
        return GraphedDecoder(parts) if graphed else TorchDecoder(parts)

    def cache_dtype(self, device: torch.device) -> torch.dtype:
        """Return fp32 on CPUs, where attention is fastest in it, else fp16."""
        return torch.float32 if device.type == "cpu" else torch.float16


def _dense(weight: Int8Weight | torch.Tensor) -> torch.Tensor:
    return weight.dequantised().bfloat16() if isinstance(weight, Int8Weight) else weight


def choose_backend(
    source: WeightSource,
    config: DecoderConfig,
    dtype: str,
    device: torch.device,
    threads: int,
) -> Backend:
    """Return the native backend where it computes all of a model in its dtype, else torch's."""
    loaded = library() if device.type == "cpu" else None
    if loaded is None or not NativeBackend.has_sizes(config):
        return TorchBackend(threads)
    dense = [name for name in (EMBEDDING, HEAD) if source.has(name)]
    if dtype == "stored":
        dense += [name for name in matrix_names(config) if not source.is_int4(name)]
    dtypes = {DTYPES[dtype]} if dtype in DTYPES else set(map(source.stored_dtype, dense))
    native = dtypes <= NativeBackend.DTYPES
    return NativeBackend(loaded, threads) if native else TorchBackend(threads)
