"""What runs on GPUs only: its shapes and its guards anywhere, its values where a GPU is."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from core.conftest import Checkpoints
from core.tiny import CPU, logits_of, make_model
from memspec_core.errors import SettingsError
from memspec_core.models.backend import TorchBackend
from memspec_core.models.cuda_int4 import (
    SHAPES,
    CudaInt4Linear,
    high_first,
    int4_fault,
    int4_kernel,
    require_right,
)
from memspec_core.models.decoder import DecoderParts
from memspec_core.models.draft import plan_draft
from memspec_core.models.gptq_kernels import (
    SWITCH,
    gptq_linear,
    made_by_gptqmodel,
    whole_zero_points,
)
from memspec_core.models.graphed_decoder import GraphedDecoder, Run
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.linear import Int4Linear
from memspec_core.models.quantised import Int4Weight, pack_codes, round_to_int4
from memspec_core.models.target import plan_target
from memspec_core.models.torch_decoder import TorchDecoder

SIZES = {"vocab_size": 192, "num_hidden_layers": 2, "max_position_embeddings": 1024}
CAPACITY = 600
TAPS = (0, 1)
CUDA = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def weight_of(rows: int, columns: int, group_size: int, seed: int = 0) -> Int4Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scale = 0.01 + 0.01 * torch.rand(rows, columns // group_size, generator=generator)
    order = torch.randperm(columns, generator=generator)
    return Int4Weight(pack_codes(codes), scale, -7.5 * scale, order)


def test_the_gpu_kernel_takes_the_even_column_high() -> None:
    codes = torch.randint(0, 16, (4, 32), dtype=torch.uint8)
    turned = high_first(pack_codes(codes))
    assert torch.equal(turned >> 4, codes[:, 0::2])
    assert torch.equal(turned & 15, codes[:, 1::2])


@pytest.mark.parametrize(("columns", "group_size"), SHAPES)
def test_the_gpu_kernel_gets_the_shapes_that_it_declares(columns: int, group_size: int) -> None:
    with FakeTensorMode():  # runs torch's own checks of arguments, without a GPU
        weight = Int4Weight(
            torch.empty(32, columns // 2, dtype=torch.uint8),
            torch.empty(32, columns // group_size),
            torch.empty(32, columns // group_size),
            torch.empty(columns, dtype=torch.int64),
        )
        linear = CudaInt4Linear(weight, torch.empty(32))
        found = linear(torch.empty(3, columns))
        assert found.shape == (3, 32)
        assert linear.weight_bytes == 32 * columns // 2 + 4 * 32 * columns // group_size + (
            8 * columns
        )


@pytest.fixture
def kernel_of_the_source() -> Iterator[None]:
    """Give CPUs what the GPU kernel's source says that it computes, its tiles left out."""
    library = torch.library.Library("aten", "IMPL")

    def pack(pairs: torch.Tensor, inner_tiles: int) -> torch.Tensor:
        rows, columns = pairs.shape[0], 2 * pairs.shape[1]
        assert (pairs.dtype, columns % (16 * inner_tiles)) == (torch.uint8, 0)
        return pairs.view(torch.int32).view(rows // 8, columns // (16 * inner_tiles), 32, -1)

    def product(
        x: torch.Tensor, packed: torch.Tensor, group_size: int, scale_and_zero: torch.Tensor
    ) -> torch.Tensor:
        rows = 8 * packed.shape[0]
        pairs = packed.reshape(rows, -1).view(torch.uint8)
        codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).reshape(rows, -1)
        assert scale_and_zero.shape == (codes.shape[1] // group_size, rows, 2)
        assert (x.dtype, scale_and_zero.dtype) == (torch.bfloat16, torch.bfloat16)
        groups = scale_and_zero.float().repeat_interleave(group_size, dim=0)
        scale, zero = groups.unbind(-1)
        return (x.float() @ ((codes.T.float() - 8) * scale + zero)).bfloat16()

    library.impl("_convert_weight_to_int4pack", pack, "CPU")
    library.impl("_weight_int4pack_mm", product, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("kernel_of_the_source")
@pytest.mark.parametrize(("columns", "group_size"), SHAPES)
def test_the_gpu_kernel_computes_by_its_source_what_is_meant(columns: int, group_size: int) -> None:
    weight = weight_of(32, columns, group_size)
    require_right(CudaInt4Linear(weight), weight)
    rows, bias = torch.randn(3, columns), torch.randn(32)
    expected, found = Int4Linear(weight, bias)(rows), CudaInt4Linear(weight, bias)(rows)
    assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize(("columns", "group_size"), SHAPES)
def test_the_check_of_a_kernel_tells_right_from_wrong(columns: int, group_size: int) -> None:
    weight = weight_of(32, columns, group_size)
    require_right(Int4Linear(weight), weight)
    turned = Int4Weight(high_first(weight.pairs), weight.scale, weight.minimum, weight.input_order)
    shifted = Int4Weight(
        weight.pairs, weight.scale, weight.minimum + weight.scale, weight.input_order
    )
    for wrong in (turned, shifted):
        with pytest.raises(RuntimeError, match=r"off by .* where values are up to"):
            require_right(Int4Linear(wrong), weight)


@needs_none
def test_without_a_working_kernel_weights_are_dequantised(
    caplog: pytest.LogCaptureFixture, checkpoints: Checkpoints
) -> None:
    int4_fault.cache_clear()
    with caplog.at_level(logging.INFO):
        assert int4_kernel(CUDA) is None
        assert int4_kernel(CUDA) is None
    assert caplog.text.count("4-bit weights are computed in bf16 on cuda") == 1
    assert int4_kernel(torch.device("meta")) is None
    assert not TorchBackend(1).takes(round_to_int4(torch.empty(32, 64, device="meta")))
    folder = checkpoints.save("tiny", make_model())
    with pytest.raises(SettingsError, match="no kernel for it on the device 'cuda'; use"):
        plan_target(str(folder), dtype="int4", device=CUDA, context_tokens=64)


def gptq_weight(
    columns: int, group_size: int, symmetric: bool, act_order: bool
) -> tuple[Int4Weight, torch.Tensor]:
    """Return a weight as GPTQ packs it, and its zero points."""
    weight = weight_of(64, columns, group_size)
    shape = weight.scale.shape
    zeros = torch.full(shape, 8) if symmetric else torch.arange(shape.numel()).view(shape) % 16
    scale = weight.scale.half().float()
    order = weight.input_order if act_order else None
    return Int4Weight(weight.pairs, scale, -zeros * scale, order), zeros


@pytest.mark.parametrize("symmetric", [False, True])
def test_zero_points_of_gptq_are_found_again(symmetric: bool) -> None:
    weight, zeros = gptq_weight(256, 64, symmetric, act_order=True)
    assert torch.equal(whole_zero_points(weight), zeros.to(torch.uint8))


def test_weights_without_whole_zero_points_are_left_to_torch() -> None:
    with pytest.raises(ValueError, match="zero points"):
        whole_zero_points(round_to_int4(torch.randn(16, 64)))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", Int4Linear.GROUP_SIZES)
@pytest.mark.parametrize(
    ("backend", "kind"), [("gptq_torch", "TorchLinear"), ("gptq_torch_aten", "TorchAtenLinear")]
)
def test_layers_of_gptqmodel(
    backend: str, kind: str, group_size: int, symmetric: bool, act_order: bool
) -> None:
    pytest.importorskip("gptqmodel")  # its kernels for CPUs take the same tensors
    weight, _ = gptq_weight(512, group_size, symmetric, act_order)
    bias, rows = torch.randn(64), torch.randn(5, 512)
    linear = made_by_gptqmodel(weight, bias, backend, (kind,))
    assert linear.kernel == f"GPTQModel {kind}"
    assert linear.weight_bytes > weight.pairs.nbytes
    expected = rows.bfloat16().float() @ weight.dequantised().T + bias
    assert float((linear(rows).float() - expected).norm() / expected.norm()) < 0.01


def test_gptqmodel_is_asked_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = gptq_weight(256, 64, symmetric=True, act_order=False)
    monkeypatch.setenv(SWITCH, "1")
    assert gptq_linear(weight, None) is None
    assert TorchBackend(1).linear(weight).kernel == Int4Linear.kernel


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptqmodel_on_the_gpu(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gptqmodel")
    monkeypatch.setenv(SWITCH, "1")
    weight, _ = gptq_weight(512, 128, symmetric, act_order=True)
    rows = torch.randn(5, 512)
    linear = TorchBackend(1).linear(weight.to(CUDA))  # torch's kernel where GPTQModel has none
    expected = rows.bfloat16().float() @ weight.dequantised().T
    found = linear(rows.to(CUDA)).float().cpu()
    assert float((found - expected).norm() / expected.norm()) < 0.01


@needs_none
def test_without_a_working_kernel_a_drafts_4_bits_are_planned_as_bf16() -> None:
    cpu, cuda = (
        plan_draft(
            "general",
            "default",
            plan_target("default", dtype="stored", device=device, context_tokens=64),
        )
        for device in (CPU, CUDA)
    )
    assert cuda.weight_bytes > 2.5 * cpu.weight_bytes


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("group_size", Int4Linear.GROUP_SIZES)
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_int4_on_the_gpu(group_size: int, rows: int) -> None:
    weight = weight_of(64, 1536, group_size)
    bias = torch.randn(64)
    x = torch.randn(rows, 1536)
    expected = x.bfloat16().float() @ weight.dequantised().T + bias
    kernel = int4_kernel(CUDA)
    assert kernel is CudaInt4Linear, int4_fault(CUDA)
    found = kernel(weight.to(CUDA), bias.to(CUDA))(x.to(CUDA)).float().cpu()
    assert float((found - expected).norm() / expected.norm()) < 0.01


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int4", "bf16"])
def test_a_target_on_the_gpu(dtype: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints.save("tiny", make_model())
    tokens = list(range(3, 40))
    plan = plan_target(str(folder), dtype=dtype, device=CUDA, context_tokens=64)
    target = plan.load()
    assert target.decoder.weight_bytes == pytest.approx(plan.weight_bytes, rel=0.05)
    reference = plan_target(str(folder), dtype=dtype, device=CPU, context_tokens=64).load()
    expected, found = logits_of(reference, tokens), logits_of(target, tokens).cpu()
    assert float((found - expected).norm() / expected.norm()) < 0.1


@dataclass
class Pair:
    """The ordinary decoder and the one that is to be captured, over the same weights."""

    plain: TorchDecoder
    graphed: GraphedDecoder
    caches: tuple[KeyValueCache, KeyValueCache]

    def feed(self, token_ids: list[int], parents: list[int] | None = None) -> None:
        expected = self.plain.forward(token_ids, self.caches[0], parents)
        self.same(self.graphed.forward(token_ids, self.caches[1], parents), expected)
        self.same(self.graphed.logits(expected), self.plain.logits(expected))
        self.same_caches()

    def same_caches(self) -> None:
        one, other = self.caches
        assert one.token_ids == other.token_ids
        length = one.length
        self.same(other.rows[:, :, :length], one.rows[:, :, :length])
        assert one.features is not None
        assert other.features is not None
        self.same(other.features[:length], one.features[:length])

    @staticmethod
    def same(found: torch.Tensor, expected: torch.Tensor) -> None:
        atol = 2e-3 if found.dtype == torch.float16 else 1e-4  # features
        torch.testing.assert_close(found, expected, atol=atol, rtol=1e-3)


def uncaptured(run: Run) -> Run:
    """Run a pass each time, with its rows where they were the last time, as a graph has them."""
    hidden = run()
    return lambda: hidden.copy_(run())


def parts_of(checkpoints: Checkpoints, device: torch.device = CPU) -> DecoderParts:
    folder = checkpoints.save("graphed", make_model(seed=5, **SIZES))
    plan = plan_target(str(folder), dtype="fp32", device=device, context_tokens=CAPACITY)
    decoder = plan.load().decoder
    return DecoderParts(
        decoder.config, decoder.embedding, decoder.layers, decoder.norm, decoder.head
    )


def pair_of(parts: DecoderParts, capture: Callable[[Run], Run] | None = uncaptured) -> Pair:
    device = parts.norm.device
    one, other = (
        KeyValueCache(parts.config, CAPACITY, torch.float32, device, TAPS) for _ in range(2)
    )
    return Pair(TorchDecoder(parts), GraphedDecoder(parts, capture), (one, other))


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 192, (count,), generator=generator).tolist()


def go_through_contexts(pair: Pair) -> None:
    """Feed prompts, chains and trees, each size twice, across the first span's end and back."""
    pair.feed(tokens(30))
    for seed in range(2):
        for rows in (1, 2, 7, 16):
            pair.feed(tokens(rows, seed))
    for seed in range(2):
        start = pair.caches[0].length
        pair.feed(tokens(5, seed), [-1, 0, 0, 1, 2])
        pair.feed(tokens(3, seed), [-1, 0, 0, 1, 2, 4, -1, 6])
        for decoder, cache in zip((pair.plain, pair.graphed), pair.caches, strict=True):
            decoder.keep(cache, start, [0, 2, 4, 5])
        pair.same_caches()
    pair.feed(tokens(256 - pair.caches[0].length - 3))
    for _ in range(3):
        pair.feed(tokens(2))
    pair.feed(tokens(CAPACITY - pair.caches[0].length - 1))
    pair.feed(tokens(1))
    for cache in pair.caches:
        cache.truncate(40)
    pair.feed(tokens(7, 3))
    assert not pair.graphed._given_up


def test_fixed_passes_are_the_ordinary_ones(checkpoints: Checkpoints) -> None:
    pair = pair_of(parts_of(checkpoints))
    go_through_contexts(pair)
    assert pair.graphed.kernel == "torch float32, in CUDA graphs"
    sizes = set(pair.graphed._passes)
    assert {(1, 256), (16, 256), (2, 512), (1, 608)} <= sizes  # a cache is a little longer


def test_rows_that_were_returned_stay(checkpoints: Checkpoints) -> None:
    pair = pair_of(parts_of(checkpoints))
    _, one, _ = (pair.graphed.forward(tokens(1, seed), pair.caches[1]) for seed in range(3))
    for seed in range(2):
        expected = pair.plain.forward(tokens(1, seed), pair.caches[0])
    pair.same(one, expected)


def test_rows_of_an_earlier_context_do_not_come_through_the_mask(
    checkpoints: Checkpoints,
) -> None:
    pair = pair_of(parts_of(checkpoints))
    pair.feed(tokens(3))
    for cache in pair.caches:
        cache.rows.fill_(math.nan)
        cache.truncate(0)
    pair.feed(tokens(3, 1))
    pair.feed(tokens(3, 2))


def test_other_caches_are_fed_without_graphs(checkpoints: Checkpoints) -> None:
    parts = parts_of(checkpoints)
    pair = pair_of(parts)
    pair.feed(tokens(4))
    pair.caches = pair_of(parts).caches
    pair.feed(tokens(5))
    assert set(pair.graphed._passes) == {(4, 256)}


def failing(run: Run) -> Run:
    raise RuntimeError("operation not permitted when stream is capturing")


def wrong(run: Run) -> Run:
    return lambda: run() + 1.0


def frozen(run: Run) -> Run:
    hidden = run()
    return lambda: hidden * math.nan


@pytest.mark.parametrize(
    ("capture", "said"),
    [(failing, "not permitted"), (wrong, "differs"), (frozen, "differs"), (None, "captured")],
)
def test_what_cannot_be_captured_goes_on_without_graphs(
    capture: Callable[[Run], Run] | None,
    said: str,
    checkpoints: Checkpoints,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if capture is None and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    pair = pair_of(parts_of(checkpoints), capture)
    pair.feed(tokens(20))
    for rows in (3, 3, 5):
        pair.feed(tokens(rows))
    assert caplog.text.count("without CUDA graphs") == 1
    assert said in caplog.text
    assert "graphs" not in pair.graphed.kernel


def test_on_cpus_there_are_no_graphs(checkpoints: Checkpoints) -> None:
    assert type(TorchBackend(1).decoder(parts_of(checkpoints))) is TorchDecoder


@needs_gpu
@pytest.mark.gpu
def test_captured_passes_on_the_gpu(checkpoints: Checkpoints) -> None:
    pair = pair_of(parts_of(checkpoints, CUDA), capture=None)
    go_through_contexts(pair)
    assert "in CUDA graphs" in pair.graphed.kernel
