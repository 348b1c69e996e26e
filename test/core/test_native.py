"""The native step against torch: the same numbers, and rows that do not depend on their company."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from core.tiny import CPU, make_model, write_gguf
from memspec_core.cli.doctor import OPTIONAL
from memspec_core.cli.inspect import describe
from memspec_core.models.backend import TorchBackend, choose_backend
from memspec_core.models.checkpoint import Checkpoint, open_checkpoint
from memspec_core.models.decoder import Decoder
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.native import library as native
from memspec_core.models.native.backend import NativeBackend, NativeLinear, SharedThreads
from memspec_core.models.native.packing import pack
from memspec_core.models.quantised import (
    Int4Weight,
    Int8Weight,
    Weight,
    round_to_int4,
    round_to_int8,
)
from memspec_core.models.target import plan_target

if native.is_switched_off():
    pytest.skip(f"{native.SWITCH} is 0", allow_module_level=True)
try:
    native.load()
except native.NativeUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

ROWS = 21
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 192}


@pytest.fixture(scope="module")
def library() -> ModuleType:
    return native.load()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grouped(weight: Int4Weight, size: int) -> Int4Weight:
    """Give groups of `size` one scale."""
    step = size // weight.group_size
    return Int4Weight(weight.pairs, weight.scale[:, ::step], weight.minimum[:, ::step])


def scattered(weight: Int4Weight) -> Int4Weight:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))
    return Int4Weight(weight.pairs, weight.scale, weight.minimum, order)


def blocks_of_8_bits(weight: torch.Tensor) -> Int8Weight:
    rows = round_to_int8(weight.view(-1, 32))
    return Int8Weight(rows.codes.view(weight.shape), rows.scale.view(weight.shape[0], -1))


WEIGHTS: dict[str, Callable[[torch.Tensor], Weight]] = {
    "int4": round_to_int4,
    "int4, groups of 128": lambda weight: grouped(round_to_int4(weight), 128),
    "int4, inputs reordered": lambda weight: scattered(round_to_int4(weight)),
    "int8, a scale a row": round_to_int8,
    "int8, groups of 32": blocks_of_8_bits,
    "bf16": torch.Tensor.bfloat16,
    "fp16": torch.Tensor.half,
}


def dense(weight: Weight) -> torch.Tensor:
    return weight.float() if isinstance(weight, torch.Tensor) else weight.dequantised()


def rounded(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return rows as the kernel takes them: rounded to 8 bits in blocks of 32, or to bf16."""
    if isinstance(weight, torch.Tensor):
        return x.bfloat16().float()
    order = weight.input_order if isinstance(weight, Int4Weight) else None
    order = torch.arange(x.shape[1]) if order is None else order
    blocks = x[:, order].view(x.shape[0], -1, 32)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    return torch.empty_like(x).index_copy_(1, order, ((blocks / scale).round() * scale).view_as(x))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_layer_computes_what_its_weight_says(library: ModuleType, kind: str) -> None:
    weight = WEIGHTS[kind](random(48, 256))
    bias = random(48, seed=1)
    x = random(ROWS, 256, seed=2)
    found = NativeLinear(library, weight, bias, SharedThreads(2))(x)
    # Scales lie there in fp16.
    expected = rounded(x, weight) @ dense(weight).T + bias
    assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_row_does_not_depend_on_its_company(library: ModuleType, kind: str) -> None:
    linear = NativeLinear(library, WEIGHTS[kind](random(48, 256)), None, SharedThreads(2))
    x = random(ROWS, 256, seed=2)
    together = linear(x)
    for count in range(1, 14):
        assert torch.equal(linear(x[:count]), together[:count])


@pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if "reordered" not in kind])
def test_rows_of_a_weight(library: ModuleType, kind: str) -> None:
    weight = WEIGHTS[kind](random(48, 256))
    indices = torch.tensor([0, 17, 47])
    found = NativeLinear(library, weight, None, SharedThreads(1)).rows(indices)
    torch.testing.assert_close(found, dense(weight)[indices], rtol=2e-3, atol=2e-3)


def both(checkpoint: Checkpoint, dtype: str) -> tuple[Decoder, Decoder]:
    """Load a checkpoint natively, and by torch in fp32."""
    assert choose_backend(checkpoint.weights, checkpoint.config, dtype, CPU, 2).name == "native"
    plans = [
        plan_target(str(checkpoint.path), dtype=kind, device=CPU, context_tokens=256)
        for kind in (dtype, "fp32")
    ]
    decoders = [plan._decoder(lambda: None) for plan in plans]
    return decoders[0], decoders[1]


def new_cache(decoder: Decoder) -> KeyValueCache:
    dtype = torch.float16 if "native" in decoder.kernel else torch.float32
    return KeyValueCache(decoder.config, 256, dtype, CPU)


def test_the_mean_of_states_is_that_of_torch(checkpoint: Checkpoint) -> None:
    ours, reference = both(checkpoint, "bf16")
    cache = KeyValueCache(ours.config, 64, torch.float16, CPU, (0, ours.config.layers - 1))
    ours.forward(list(range(3, 43)), cache)
    for first, end in ((0, 1), (3, 20), (24, 40)):
        expected = reference.mean_state(cache, first, end)
        torch.testing.assert_close(ours.mean_state(cache, first, end), expected)
    with pytest.raises(RuntimeError, match="no such features"):
        ours.mean_state(cache, 5, 5)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    family: str = request.param
    model: PreTrainedModel = make_model(family, seed=3, **SIZES, num_key_value_heads=1)
    file = tmp_path_factory.mktemp(family) / "tiny.gguf"
    write_gguf(file, model, family)
    return open_checkpoint(file)


def tokens(count: int) -> list[int]:
    return [(7 * index * index + 3 * index) % 192 for index in range(count)]


def test_logits_are_near_those_of_torch(checkpoint: Checkpoint) -> None:
    ours, reference = both(checkpoint, "bf16")
    fed = tokens(150)
    found = ours.logits(ours.forward(fed, new_cache(ours)))
    expected = reference.logits(reference.forward(fed, new_cache(reference)))
    assert float((found - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("count", [1, 2, 7, 70])
def test_the_largest_logits_are_found_without_writing_them(
    checkpoint: Checkpoint, count: int
) -> None:
    ours, _ = both(checkpoint, "bf16")
    hidden = ours.forward(tokens(count), new_cache(ours))
    values, outputs = ours.logits(hidden).max(dim=-1)
    assert ours.most_probable(hidden) == (outputs.tolist(), values.tolist())
    assert ours.most_probable(0 * hidden) == ([0] * count, [0.0] * count)
    hidden[-1, 5] = float("nan")
    assert [math.isnan(value) for value in ours.most_probable(hidden)[1]] == [
        *[False] * (count - 1),
        True,
    ]


def test_many_positions_and_parts(checkpoint: Checkpoint) -> None:
    """More rows than a pass takes, and a context of several chunks."""
    ours, _ = both(checkpoint, "bf16")
    fed = tokens(200)
    whole, parts = new_cache(ours), new_cache(ours)
    together = ours.forward(fed, whole)
    apart = torch.cat([ours.forward(fed[i : i + 33], parts) for i in range(0, 200, 33)])
    assert torch.equal(together, apart)
    assert torch.equal(whole.rows, parts.rows)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rows_never_depend_on_the_pass(checkpoint: Checkpoint, data: st.DataObject) -> None:
    """Plain decoding and verification agree bit for bit, whatever was rolled back before."""
    ours, _ = both(checkpoint, "bf16") if not _LOADED else _LOADED[0]
    _LOADED[:] = [(ours, ours)]
    fed = tokens(80)
    plain = new_cache(ours)
    expected = [ours.forward([token], plain) for token in fed]
    cache = new_cache(ours)
    while cache.length < len(fed):
        start = cache.length
        right = data.draw(st.integers(1, min(9, len(fed) - start)))
        wrong = data.draw(st.lists(st.integers(0, 191), max_size=4))
        ours._threads = SharedThreads(data.draw(st.integers(1, 3)))
        hidden = ours.forward([*fed[start : start + right], *wrong], cache)
        for row in range(right):
            assert torch.equal(hidden[row : row + 1], expected[start + row])
        cache.truncate(start + right)


_LOADED: list[tuple[Decoder, Decoder]] = []


def test_a_context_that_is_full_is_an_error(checkpoint: Checkpoint) -> None:
    ours, _ = both(checkpoint, "bf16")
    cache = new_cache(ours)
    ours.forward(tokens(250), cache)
    with pytest.raises(RuntimeError, match="full"):
        ours.forward(tokens(7), cache)
    with pytest.raises(RuntimeError, match="no token"):
        ours.forward([192], cache)


def test_not_a_number_stays_in_its_row(checkpoint: Checkpoint) -> None:
    """What a broken pass left in the cache is gone with the rollback."""
    ours, _ = both(checkpoint, "bf16")
    clean, cache = new_cache(ours), new_cache(ours)
    cache.rows.fill_(math.nan)
    assert torch.equal(ours.forward(tokens(5), cache), ours.forward(tokens(5), clean))
    for token in tokens(3):
        assert torch.equal(ours.forward([token], cache), ours.forward([token], clean))


def test_torch_computes_what_the_step_cannot(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def chosen(dtype: str, **sizes: int) -> str:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        make_model(seed=1, **(SIZES | sizes)).save_pretrained(folder)
        source = open_checkpoint(folder)
        return choose_backend(source.weights, source.config, dtype, CPU, 2).name

    assert chosen("bf16") == "native"
    assert chosen("fp32") == "torch"
    assert chosen("stored") == "torch"  # the file is in fp32
    assert chosen("bf16", hidden_size=48, num_attention_heads=3, num_key_value_heads=1) == "torch"
    assert chosen("bf16", vocab_size=193) == "torch"
    monkeypatch.setenv(native.SWITCH, "0")
    assert chosen("bf16") == TorchBackend.name != NativeBackend.name


PROBE = """
from pathlib import Path
import torch
from memspec_core.models.native.backend import NativeLinear, SharedThreads
from memspec_core.models.native.library import load

def runtimes():
    paths = set(Path("/proc/self/maps").read_text().split())
    return {path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))}

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

def compute():
    weight = torch.ones(4096, 512).bfloat16()
    NativeLinear(load(), weight, None, SharedThreads(COUNT))(torch.ones(1, 512))
"""
NO_SECOND_RUNTIME = """
torch.ones(4096, 4096).sum()
of_torch, before, COUNT = runtimes(), threads(), 3
compute()
compute()
assert runtimes() == of_torch, runtimes() - of_torch
assert threads() == before + 2
"""
ONE_THREAD = """
torch.set_num_threads(1)  # which lays the weight out
before, COUNT = threads(), 1
compute()
assert threads() == before
"""


def in_a_new_process(script: str) -> None:
    command = [sys.executable, "-c", script]
    source = str(Path(native.__file__).parents[3])
    done = subprocess.run(
        command,
        env=dict(os.environ, PYTHONPATH=source),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_step_has_its_own_threads_and_no_openmp() -> None:
    in_a_new_process(PROBE + NO_SECOND_RUNTIME)


def test_one_thread_is_the_callers() -> None:
    in_a_new_process(PROBE + ONE_THREAD)


def test_what_computes_is_named(checkpoint: Checkpoint) -> None:
    ours, reference = both(checkpoint, "bf16")
    assert ours.kernel == "native bf16 (AVX-512)"
    assert reference.kernel == "torch float32"
    assert describe("default")["cpu_backend"] == "native"
    assert "in use" in OPTIONAL["native step"]()


@pytest.mark.parametrize("kind", ["int8, a scale a row", "int8, groups of 32", "bf16", "fp16"])
def test_rows_rounded_to_four_bits_are_those_of_torch(library: ModuleType, kind: str) -> None:
    values = random(96, 256)
    values[:, :32] = 0.25  # a constant group, whose scale is the smallest
    values[:, 32:64] *= 1e-4  # one near zero
    values[:, 64:96] += 100.0  # and one far from zero
    table = NativeLinear(library, WEIGHTS[kind](values), None, SharedThreads(1))
    indices = torch.arange(95, 0, -2)[:32]
    expected = pack(round_to_int4(table.rows(indices)), library)
    found = table.rounded_rows(indices)
    assert torch.equal(found.values, expected.values)
    assert (found.outputs, found.inputs) == (32, 256)


def test_a_row_that_is_not_there_is_an_error(library: ModuleType) -> None:
    table = NativeLinear(library, random(16, 32).half(), None, SharedThreads(1))
    with pytest.raises(RuntimeError, match="no row 16"):
        table.rounded_rows(torch.arange(1, 17))
