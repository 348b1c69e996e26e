"""The decoder forward in torch for GPUs: passes of few rows are captured once and replayed.

A small model's pass is some hundred kernels of a few microseconds, and to start them one by one
takes longer than to run them. A CUDA graph starts them all at once, where no shape and no address
changes: such a pass reads its tokens, places and mask from tensors of its own, and attends under
the mask to a fixed number of the cache's places.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from memspec_core.models.decoder import DecoderParts
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.torch_decoder import TorchDecoder, placed

SWITCH = "MEMSPEC_CUDA_GRAPHS"
"""The variable of the environment that leaves graphs out, with the value 0."""

MOST_ROWS = 16
"""Rows of the largest pass that is replayed; prompts are read in larger ones."""

LEAST_SPAN = 256
"""Places that the shortest pass attends to; it is doubled as often as the context needs it."""

MOST_GRAPHS = 64
"""Graphs that are kept: of 1 to 16 rows, over four spans."""

_ROUNDING = 0.05
"""What two kernels of attention may differ by, as a share of a row's length."""

_LOG = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]
"""A pass over inputs that were set before; it returns hidden rows [n, hidden]."""


class GraphedDecoder(TorchDecoder):
    """A decoder that replays its passes of up to 16 rows over one cache: the first that it meets.

    `capture` turns a pass into one that is replayed. Each is compared with the ordinary pass when
    it is captured; where that fails or differs, all goes on without graphs.

    The graphs share a pool of memory as large as what a pass of 16 rows has beside cache and
    weights, and the driver keeps some hundred bytes for each kernel. Neither is in the plan.
    """

    def __init__(self, parts: DecoderParts, capture: Callable[[Run], Run] | None = None) -> None:
        super().__init__(parts)
        self._capture = capture or CudaCapture(self.device)
        self._cache: weakref.ref[KeyValueCache] | None = None
        self._passes: dict[tuple[int, int], tuple[_Inputs, Run]] = {}
        self._given_up = False

    @property
    def kernel(self) -> str:
        """What computes most of the weights."""
        return f"{super().kernel}, in CUDA graphs" if self._passes else super().kernel

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        cache: KeyValueCache,
        parents: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Feed n tokens; see `Decoder.forward`."""
        if self._given_up or not self._is_own(cache):
            return super().forward(token_ids, cache, parents)
        if cache.length == 0:
            # What is no number in a row of an earlier context would come through every mask.
            cache.rows.zero_()
        if len(token_ids) > MOST_ROWS:
            return super().forward(token_ids, cache, parents)
        size = (len(token_ids), _span(cache, len(token_ids)))
        if size not in self._passes:
            return self._first(size, token_ids, cache, parents)
        inputs, replay = self._passes[size]
        inputs.set(token_ids, cache.length, parents)
        hidden = replay().clone()  # which the next replay writes to
        cache.token_ids.extend(token_ids)
        return hidden

    def _is_own(self, cache: KeyValueCache) -> bool:
        """Whether the graphs are of this cache; all are of the first one, as long as it lives."""
        known = None if self._cache is None else self._cache()
        if known is None:
            self._cache = weakref.ref(cache)
            self._passes.clear()
        return known is None or known is cache

    def _first(
        self,
        size: tuple[int, int],
        token_ids: Sequence[int],
        cache: KeyValueCache,
        parents: Sequence[int] | None,
    ) -> torch.Tensor:
        """Capture a pass, and run the ordinary one after it, whose rows stay and are returned."""
        inputs, replay, found = _Inputs(*size, self.device), None, None
        try:
            inputs.set(token_ids, cache.length, parents)
            replay = self._capture(partial(self._fixed, inputs, cache))
            found = replay().clone()
        except Exception as error:  # whatever CUDA says
            self._give_up(f"a pass of {size[0]} rows could not be captured ({error})")
        expected = super().forward(token_ids, cache, parents)
        if replay is None or found is None:
            return expected
        if not bool(((found - expected).norm(dim=1) <= _ROUNDING * expected.norm(dim=1)).all()):
            self._give_up(f"a captured pass of {size[0]} rows differs from the ordinary one")
            return expected
        if len(self._passes) >= MOST_GRAPHS:
            self._passes.pop(next(iter(self._passes)))
        self._passes[size] = (inputs, replay)
        return expected

    def _fixed(self, inputs: "_Inputs", cache: KeyValueCache) -> torch.Tensor:
        """Run the pass that is captured."""
        token_ids, positions, places = inputs.numbers
        return self._pass(
            self.embedding.rows(token_ids).float(),
            cache,
            _Places(places, inputs.visible.shape[1]),
            self._rotation(positions),
            self._folded(inputs.visible),
        )

    def _give_up(self, why: str) -> None:
        _LOG.warning("The model is computed without CUDA graphs: %s", why)
        self._given_up = True
        self._passes.clear()


class _Inputs:
    """What a captured pass of `count` rows reads.

    `numbers` [3, count]: token ids, rotary positions, and places in the cache; `visible`
    [count, span]: which of the cache's first places each row sees.
    """

    def __init__(self, count: int, span: int, device: torch.device) -> None:
        self.numbers = torch.zeros(3, count, dtype=torch.int64, device=device)
        self.visible = torch.zeros(count, span, dtype=torch.bool, device=device)

    def set(self, token_ids: Sequence[int], start: int, parents: Sequence[int] | None) -> None:
        """Set them for rows that follow the first `start` of the cache."""
        end = start + len(token_ids)
        positions, visible = placed(start, len(token_ids), parents)
        numbers = (torch.tensor(token_ids), positions, torch.arange(start, end))
        self.numbers.copy_(torch.stack(numbers))
        self.visible.zero_()
        self.visible[:, :end].copy_(visible)


class _Places:
    """A window that a tensor names, so that it may change between replays."""

    def __init__(self, places: torch.Tensor, end: int) -> None:
        self._places = places
        self.end = end

    def write(self, rows: torch.Tensor, new: torch.Tensor, dim: int) -> None:
        rows.index_copy_(dim, self._places, new.to(rows.dtype))


class CudaCapture:
    """Turns passes into CUDA graphs, which share one pool of memory.

    They may, since each pass's rows are copied out before the next one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Run) -> Run:
        """Run a pass until libraries have what they need, and capture it."""
        with torch.cuda.device(self._device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(aside)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads, which load drafts, may do as they please meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                hidden = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return hidden

        return replay


def _span(cache: KeyValueCache, count: int) -> int:
    """Return to how many of a cache's places a pass attends that adds so many rows."""
    span = LEAST_SPAN
    while span < cache.length + count:
        span *= 2
    return min(span, cache.rows.shape[2])
