"""Weights in 4-bit groups: read, rounded, packed and multiplied."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from memspec_core.models.gguf_file import GgufFile
from memspec_core.models.linear import DenseLinear, Int4Linear
from memspec_core.models.quantised import (
    GROUP_SIZE,
    Int4Weight,
    pack_codes,
    round_to_int4,
    unpack_codes,
)
from memspec_core.models.safetensors_files import SafetensorsFiles

NAME, GGUF_NAME = "layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "F32"])
def test_gguf_blocks_are_read_as_gguf_reads_them(kind: str, tmp_path: Path) -> None:
    storage = gguf.GGMLQuantizationType[kind]
    stored = quantize(random(48, 96).numpy(), storage)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor(GGUF_NAME, stored, raw_dtype=storage)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufFile(tmp_path / "m.gguf")
    expected = torch.from_numpy(np.asarray(dequantize(stored, storage), dtype=np.float32))
    assert torch.equal(source.dense(NAME), expected)
    packed = source.int4(NAME)
    if kind.startswith("Q4"):
        assert packed is not None
        assert torch.equal(packed.dequantised(), expected)
        assert source.stored_dtype(NAME) is torch.bfloat16
    else:
        assert packed is None


def test_int4_linear_against_its_dequantised_weight() -> None:
    weight = round_to_int4(random(64, 96))
    bias = random(1, 64, seed=1)[0]
    rows = random(5, 96, seed=2)
    assert Int4Linear.takes(weight)
    expected = rows.bfloat16().float() @ weight.dequantised().T + bias
    found = Int4Linear(weight, bias)(rows).float()
    assert float((found - expected).norm() / expected.norm()) < 0.01
    dense = DenseLinear(weight.dequantised(), bias)(rows.bfloat16().float())
    torch.testing.assert_close(dense, expected, atol=1e-4, rtol=1e-4)


def test_int4_linear_gives_a_row_the_same_whatever_its_company() -> None:
    linear = Int4Linear(round_to_int4(random(64, 96)))
    rows = random(6, 96, seed=3)
    assert torch.equal(linear(rows)[:1], linear(rows[:1]))


def test_int4_linear_refuses_shapes_that_its_kernel_has_not() -> None:
    assert not Int4Linear.takes(round_to_int4(random(60, 96)))


def test_stacking_and_ordering_rows() -> None:
    weights = [round_to_int4(random(16, 64, seed)) for seed in (0, 1)]
    order = torch.randperm(32, generator=torch.Generator().manual_seed(2))
    stacked = Int4Weight.stacked(weights).rows(order)
    expected = torch.cat([weight.dequantised() for weight in weights])[order]
    assert torch.equal(stacked.dequantised(), expected)


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), size=st.floats(1e-4, 100.0), shift=st.floats(-5.0, 5.0))
def test_rounding_stays_within_half_a_level(seed: int, size: float, shift: float) -> None:
    weight = random(4, 2 * GROUP_SIZE, seed) * size + shift * size
    rounded = round_to_int4(weight)
    assert rounded.codes.dtype is torch.uint8
    assert int(rounded.codes.max()) <= 15
    assert torch.equal(rounded.scale.bfloat16().float(), rounded.scale)
    assert torch.equal(rounded.minimum.bfloat16().float(), rounded.minimum)
    off = (rounded.dequantised() - weight).abs().view(4, 2, GROUP_SIZE).amax(-1)
    # Scale and minimum are kept in bf16, which moves the ends of the range a little.
    slack = 15 * rounded.scale * 2**-8 + weight.abs().amax() * 2**-8
    assert bool((off <= rounded.scale / 2 + slack).all())


def test_a_constant_weight_is_kept() -> None:
    assert torch.equal(
        round_to_int4(torch.full((2, 32), 0.5)).dequantised(), torch.full((2, 32), 0.5)
    )


def test_codes_lie_two_to_a_byte_the_even_column_low() -> None:
    codes = torch.randint(0, 16, (4, 32), dtype=torch.uint8)
    pairs = pack_codes(codes)
    assert torch.equal(pairs & 15, codes[:, 0::2])
    assert torch.equal(pairs >> 4, codes[:, 1::2])
    assert torch.equal(unpack_codes(pairs), codes)


def test_packed_codes_come_back_from_a_file(tmp_path: Path) -> None:
    weight = round_to_int4(random(16, 64))
    assert weight.pairs.shape == (16, 32)
    save_file(
        {
            f"{NAME}.codes": weight.pairs,
            f"{NAME}.scale": weight.scale.bfloat16(),
            f"{NAME}.minimum": weight.minimum.bfloat16(),
        },
        tmp_path / "draft.safetensors",
    )
    source = SafetensorsFiles([tmp_path / "draft.safetensors"])
    found = source.int4(NAME)
    assert found is not None
    assert torch.equal(found.codes, weight.codes)
    assert source.has(NAME)
    assert torch.equal(source.dense(NAME), weight.dequantised())
