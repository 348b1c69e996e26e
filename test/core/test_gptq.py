"""GPTQ checkpoints, packed here by hand, and weights rounded to 4 bits when loaded."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from core.conftest import Checkpoints
from core.tiny import CPU, load_target, logits_of, make_model
from memspec_core.errors import CheckpointError, SettingsError
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.quantised import round_to_int4
from memspec_core.models.target import plan_target
from memspec_core.training.reference import transformers_model

WEIGHTS = "model.safetensors"
SIZES = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
UP = "model.layers.1.mlp.up_proj"
TOKENS = torch.randint(3, 320, (24,), generator=torch.Generator().manual_seed(0)).tolist()
NEAR = 0.03  # kernels round rows to 8 bits or to bf16


@dataclass(frozen=True)
class Packing:
    """How a test packs a model; `group_size` -1 stands for whole rows."""

    group_size: int = 32
    act_order: bool = False
    symmetric: bool = True
    checkpoint_format: str = "gptq"
    with_g_idx: bool = True
    orders: str = "by input"
    stem: str = "model"

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": self.group_size,
            "desc_act": self.act_order,
            "sym": self.symmetric,
            "checkpoint_format": self.checkpoint_format,
        }


def groups_of_inputs(name: str, columns: int, packing: Packing) -> torch.Tensor:
    """Return the group of each input; layers that share their input share the order."""
    size = columns if packing.group_size == -1 else packing.group_size
    place = torch.arange(columns)
    if packing.act_order:
        seed = sum(map(ord, name)) if packing.orders == "by layer" else columns
        place = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    return place // size


def nibbles(words: np.ndarray, shift: int) -> np.ndarray:
    return words.astype(np.uint32) << np.uint32(4 * shift)


def packed(
    weight: torch.Tensor, group: torch.Tensor, packing: Packing
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Round a weight [out, in] and pack it word by word; return what it means as well, [out, in].

    Some asymmetric zero points are 0, which the older format takes 1 off.
    """
    rows, columns = weight.shape
    count = int(group.max()) + 1
    low, high = torch.zeros(count, rows), torch.zeros(count, rows)
    for index in range(count):
        members = weight[:, group == index]
        low[index], high[index] = members.amin(1), members.amax(1)
    if packing.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    zeros = torch.full_like(zeros, 8) if packing.symmetric else zeros
    if not packing.symmetric:
        zeros[0, ::5] = 0
    scale, zero = scales.float()[group].T, zeros[group].T
    codes = (weight / scale + zero).round().clamp(0, 15)
    by_input = codes.T.numpy()
    qweight = np.zeros((columns // 8, rows), dtype=np.uint32)
    for place in range(8):
        qweight |= nibbles(by_input[place::8], place)
    qzeros = np.zeros((count, rows // 8), dtype=np.uint32)
    for place in range(8):
        qzeros |= nibbles(zeros.numpy()[:, place::8], place)
    if packing.checkpoint_format == "gptq":
        qzeros -= np.uint32(0x11111111)
    tensors = {
        "qweight": torch.from_numpy(qweight.view(np.int32)),
        "qzeros": torch.from_numpy(qzeros.view(np.int32)),
        "scales": scales,
    }
    if packing.with_g_idx:
        tensors["g_idx"] = group.int()
    return tensors, (codes - zero) * scale


def write(folder: Path, model: PreTrainedModel, packing: Packing) -> PreTrainedModel:
    """Replace a saved model's linears by packed ones; return the model that they mean."""
    meant = type(model)(model.config).eval()
    weights = {name: value.float() for name, value in load_file(folder / WEIGHTS).items()}
    stored = {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight.half()
            weights[name] = stored[name].float()
            continue
        stem = name.removesuffix("weight")
        group = groups_of_inputs(stem, weight.shape[1], packing)
        tensors, weights[name] = packed(weight, group, packing)
        stored |= {stem + part: tensor.contiguous() for part, tensor in tensors.items()}
    (folder / WEIGHTS).unlink()
    save_file(stored, folder / f"{packing.stem}.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=packing.fields)
    meant.load_state_dict(weights, strict=False)
    return meant


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / WEIGHTS)


def reference(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def dense_folder(checkpoints: Checkpoints) -> Path:
    return checkpoints.save("for_gptq", make_model(seed=11, initializer_range=0.1, **SIZES))


@pytest.fixture
def folder(dense_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dense_folder, tmp_path / "checkpoint"))


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model(seed=11, **SIZES)


CASES = [
    Packing(group_size=size, act_order=act, symmetric=symmetric)
    for size in (32, 64, 128, -1)
    for act in (False, True)
    for symmetric in (False, True)
]
CASES += [
    Packing(checkpoint_format="gptq_v2", symmetric=False),
    Packing(checkpoint_format="gptq_v2", group_size=64, act_order=True, symmetric=False),
    Packing(with_g_idx=False, symmetric=False),
    Packing(group_size=-1, with_g_idx=False),
    Packing(group_size=96, symmetric=False),  # no kernel's size; the last group is short
]


@pytest.mark.parametrize("packing", CASES, ids=str)
def test_logits_are_those_of_the_dequantised_model(
    packing: Packing, folder: Path, model: PreTrainedModel
) -> None:
    meant = write(folder, model, packing)
    weights = open_checkpoint(folder).weights
    for name, value in meant.model.state_dict().items():
        assert torch.equal(weights.dense(name).float(), value), name
        assert weights.shape(name) == tuple(value.shape)
    expected = reference(meant)
    torch.testing.assert_close(
        logits_of(load_target(folder, dtype="fp32"), TOKENS), expected, atol=2e-4, rtol=1e-4
    )
    stored = load_target(folder, dtype="stored")
    assert all("int4" in layer.down.kernel for layer in stored.decoder.layers)
    assert all("int4" in layer.qkv.kernel for layer in stored.decoder.layers)
    assert off(logits_of(stored, TOKENS), expected) < NEAR


def test_groups_are_kept_where_a_kernel_has_them(folder: Path, model: PreTrainedModel) -> None:
    write(folder, model, Packing(group_size=64, act_order=True))
    weight = open_checkpoint(folder).weights.int4("layers.0.mlp.down_proj.weight")
    assert weight is not None
    assert weight.group_size == 64
    assert weight.codes.dtype is torch.uint8
    assert weight.input_order is not None


def test_whole_rows_take_the_largest_groups_of_the_kernel(
    folder: Path, model: PreTrainedModel
) -> None:
    write(folder, model, Packing(group_size=-1))
    weight = open_checkpoint(folder).weights.int4("layers.0.mlp.down_proj.weight")
    assert weight is not None
    assert weight.group_size == 256


def test_layers_of_different_orders_are_stacked_dense(folder: Path, model: PreTrainedModel) -> None:
    meant = write(folder, model, Packing(act_order=True, orders="by layer"))
    target = load_target(folder, dtype="stored")
    layer = target.decoder.layers[0]
    assert "int4" not in layer.qkv.kernel
    assert "bf" in layer.qkv.kernel
    assert "int4" in layer.down.kernel
    assert off(logits_of(target, TOKENS), reference(meant)) < NEAR
    asked = load_target(folder, dtype="int4")
    assert torch.equal(
        logits_of(asked, TOKENS), logits_of(load_target(folder, dtype="stored"), TOKENS)
    )


@pytest.mark.parametrize("size", [16, 48])
def test_groups_that_no_kernel_has_are_computed_dense(
    size: int, folder: Path, model: PreTrainedModel
) -> None:
    meant = write(folder, model, Packing(group_size=size, symmetric=False))
    plan = plan_target(str(folder), dtype="stored", device=CPU, context_tokens=64)
    target = plan.load()
    assert "int4" not in target.decoder.layers[0].down.kernel
    assert off(logits_of(target, TOKENS), reference(meant)) < NEAR
    assert target.decoder.weight_bytes == pytest.approx(plan.weight_bytes, rel=0.02)


@pytest.mark.parametrize("dtype", ["stored", "int4", "bf16", "fp32"])
@pytest.mark.parametrize("packing", [Packing(), Packing(-1, act_order=True), Packing(64, True)])
def test_planned_bytes(dtype: str, packing: Packing, folder: Path, model: PreTrainedModel) -> None:
    write(folder, model, packing)
    plan = plan_target(str(folder), dtype=dtype, device=CPU, context_tokens=64)
    assert plan.load().decoder.weight_bytes == pytest.approx(plan.weight_bytes, rel=0.05)


def test_on_other_devices_4_bits_are_planned_as_bf16(folder: Path, model: PreTrainedModel) -> None:
    write(folder, model, Packing())
    cuda = plan_target(str(folder), dtype="stored", device=torch.device("cuda"), context_tokens=64)
    bf16 = plan_target(str(folder), dtype="bf16", device=CPU, context_tokens=64)
    assert cuda.weight_bytes == bf16.weight_bytes


def test_biases_of_packed_layers(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model = make_model("qwen2", seed=12, initializer_range=0.1, **SIZES)
    folder = Path(shutil.copytree(checkpoints.save("gptq_qwen2", model), tmp_path / "checkpoint"))
    meant = write(folder, model, Packing(64, act_order=True, symmetric=False))
    assert off(logits_of(load_target(folder, dtype="stored"), TOKENS), reference(meant)) < NEAR


def test_layers_that_were_left_out_are_dense(folder: Path, model: PreTrainedModel) -> None:
    write(folder, model, Packing())
    weight = torch.randn(256, 128).half()

    def leave_out(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = weight

    change_tensors(folder, leave_out)
    change_config(
        folder, quantization_config=Packing().fields | {"dynamic": {r"-:.*1\.mlp\.up_proj": {}}}
    )
    target = load_target(folder, dtype="stored")
    gate_up = target.decoder.layers[1].gate_up
    assert "int4" not in gate_up.kernel
    assert "bf" in gate_up.kernel
    assert "int4" in target.decoder.layers[0].gate_up.kernel
    name = UP.removeprefix("model.") + ".weight"
    assert torch.equal(target.checkpoint.weights.dense(name), weight)
    assert target.checkpoint.quantisation == "gptq int4 group 32 x13"


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        (Packing(128, act_order=True), "gptq int4 group 128 act-order x14"),
        (Packing(-1), "gptq int4 whole rows x14"),
    ],
)
def test_quantisation_in_words(
    packing: Packing, said: str, folder: Path, model: PreTrainedModel
) -> None:
    write(folder, model, packing)
    assert open_checkpoint(folder).quantisation == said


def test_names_and_config_of_older_writers(
    folder: Path, dense_folder: Path, model: PreTrainedModel
) -> None:
    meant = write(folder, model, Packing(stem="gptq_model-4bit-32g"))
    change_config(folder, quantization_config=None)
    fields = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (folder / "quantize_config.json").write_text(json.dumps(fields))
    target = load_target(folder, dtype="stored")
    assert off(logits_of(target, TOKENS), reference(meant)) < NEAR
    assert target.checkpoint.sha256() != open_checkpoint(dense_folder).sha256()


def test_shards_of_older_writers(folder: Path, model: PreTrainedModel) -> None:
    meant = write(folder, model, Packing())
    tensors = load_file(folder / WEIGHTS)
    names, weight_map = sorted(tensors), {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"gptq_model-4bit-32g-0000{index + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / WEIGHTS).unlink()
    index_file = folder / "gptq_model-4bit-32g.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))
    target = load_target(folder, dtype="stored")
    assert off(logits_of(target, TOKENS), reference(meant)) < NEAR
    index_file.unlink()
    refused(folder, "2 files gptq_model-*.safetensors")


def test_transformers_gets_the_dequantised_weights(folder: Path, model: PreTrainedModel) -> None:
    meant = write(folder, model, Packing(64, act_order=True, symmetric=False))
    dense = transformers_model(open_checkpoint(folder), torch.float32, "cpu")
    assert set(dense.state_dict()) == set(meant.state_dict())
    for name, value in meant.state_dict().items():
        assert torch.equal(dense.state_dict()[name].cpu(), value), name
    assert dense.generation_config.eos_token_id == [2]


# What is refused


def refused(folder: Path, *said: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_target(folder, dtype="stored")
    for text in (str(folder), *said):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 8}, "8 bits"),
        ({"bits": None}, "None bits"),
        ({"group_size": 0}, "group size 0"),
        ({"group_size": "many"}, "group size 'many'"),
        ({"group_size": None}, "group size None"),
        ({"group_size": 64}, "layers.0.mlp.down_proj.qzeros"),
        ({"checkpoint_format": "marlin"}, "'marlin'"),
        ({"is_marlin_format": True}, "'marlin'"),
        ({"checkpoint_format": "gemm"}, "'gemm'"),
        ({"checkpoint_format": ["gptq"]}, "['gptq']"),
        ({"quant_method": "awq"}, "quantised by awq"),
        ({"quant_method": None}, "quantised by None"),
        ({"pack_dtype": "int16"}, "int16"),
        ({"dynamic": {r"+:.*\.down_proj": {"bits": 8}}}, "down_proj"),
        ({"dynamic": {r".*\.down_proj": {"group_size": 64}}}, "down_proj"),
    ],
)
def test_configs(
    changes: dict[str, object], said: str, folder: Path, model: PreTrainedModel
) -> None:
    write(folder, model, Packing())
    change_config(folder, quantization_config=Packing().fields | changes)
    refused(folder, said)


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_a_broken_separate_config(content: str, folder: Path, model: PreTrainedModel) -> None:
    write(folder, model, Packing())
    change_config(folder, quantization_config=None)
    (folder / "quantize_config.json").write_bytes(content.encode(errors="surrogateescape"))
    refused(folder, "quantize_config.json")


@pytest.mark.parametrize("content", ["int4", 4, []])
def test_a_quantisation_that_is_no_object(
    content: object, folder: Path, model: PreTrainedModel
) -> None:
    write(folder, model, Packing())
    change_config(folder, quantization_config=content)
    refused(folder, "config.json")


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_missing_tensors(part: str, folder: Path, model: PreTrainedModel) -> None:
    write(folder, model, Packing())
    change_tensors(folder, lambda tensors: tensors.pop(f"{UP}.{part}"))
    refused(folder, f"layers.1.mlp.up_proj.{part}")


def test_act_order_without_the_groups_of_the_inputs(folder: Path, model: PreTrainedModel) -> None:
    write(folder, model, Packing(act_order=True))
    change_tensors(folder, lambda tensors: tensors.pop(f"{UP}.g_idx"))
    refused(folder, "layers.1.mlp.up_proj.g_idx", "desc_act")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("qweight", lambda t: t[:-1]),
        ("qweight", lambda t: t[:, :-8]),
        ("qweight", lambda t: t.flatten()),
        ("qweight", lambda t: t.float()),
        ("qzeros", lambda t: t[:-1]),
        ("qzeros", lambda t: t[:, 1:]),
        ("qzeros", lambda t: t.short()),
        ("scales", lambda t: t.T),
        ("g_idx", lambda t: t[1:]),
        ("g_idx", lambda t: t + 1),
        ("g_idx", lambda t: t - 1),
    ],
)
def test_tensors_that_do_not_fit(
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    folder: Path,
    model: PreTrainedModel,
) -> None:
    write(folder, model, Packing())
    name = f"{UP}.{part}"
    change_tensors(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    refused(folder, "layers.1.mlp.up_proj.")


def test_packed_sizes_that_the_config_does_not_say(folder: Path, model: PreTrainedModel) -> None:
    write(folder, model, Packing())
    change_config(folder, intermediate_size=512)
    refused(folder, "layers.0.mlp.gate_proj.weight", "(256, 128)", "(512, 128)")


def test_a_config_of_gptq_over_dense_weights(folder: Path) -> None:
    change_config(folder, quantization_config=Packing().fields)
    refused(folder, "no tensor of GPTQ")


# Rounding when loaded


def test_int4_rounds_the_layers_of_a_dense_checkpoint(folder: Path) -> None:
    plan = plan_target(str(folder), dtype="int4", device=CPU, context_tokens=64)
    target = plan.load()
    assert target.decoder.weight_bytes == pytest.approx(plan.weight_bytes, rel=0.02)
    assert "int4" in target.decoder.kernel
    assert target.decoder.head.kernel == "torch float32"
    rounded = make_model(seed=11, initializer_range=0.1, **SIZES)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.copy_(round_to_int4(parameter).dequantised())
    assert off(logits_of(target, TOKENS), reference(rounded)) < NEAR


def test_int8_rounds_the_layers_of_a_dense_checkpoint(checkpoints: Checkpoints) -> None:
    model = make_model(seed=11, initializer_range=0.1, **SIZES).bfloat16()
    folder = checkpoints.save("int8", model)
    plan = plan_target(str(folder), dtype="int8", device=CPU, context_tokens=64)
    target = plan.load()
    assert "int8" in target.decoder.kernel
    assert target.decoder.weight_bytes == pytest.approx(plan.weight_bytes, rel=0.02)
    assert off(logits_of(target, TOKENS), reference(model.float())) < 0.04


def test_int4_leaves_an_untied_head_as_stored(checkpoints: Checkpoints) -> None:
    model = make_model(seed=13, tie_word_embeddings=False, **SIZES).bfloat16()
    head = load_target(checkpoints.save("untied", model), dtype="int4").decoder.head
    assert "int4" not in head.kernel
    assert "bf" in head.kernel


def test_int4_keeps_what_is_in_4_bits_already(folder: Path, model: PreTrainedModel) -> None:
    write(folder, model, Packing(64, act_order=True, symmetric=False))
    stored, asked = (load_target(folder, dtype=dtype) for dtype in ("stored", "int4"))
    assert torch.equal(logits_of(asked, TOKENS), logits_of(stored, TOKENS))


def test_int4_leaves_layers_of_odd_sizes_dense(checkpoints: Checkpoints) -> None:
    sizes = SIZES | {"intermediate_size": 200}
    folder = checkpoints.save("odd", make_model(seed=14, **sizes).bfloat16())
    plan = plan_target(str(folder), dtype="int4", device=CPU, context_tokens=64)
    target = plan.load()
    assert "int4" not in target.decoder.layers[0].gate_up.kernel
    assert "int4" in target.decoder.layers[0].qkv.kernel
    assert target.decoder.weight_bytes == pytest.approx(plan.weight_bytes, rel=0.02)


def test_int4_is_refused_on_other_devices(folder: Path) -> None:
    with pytest.raises(SettingsError, match="int4"):
        plan_target(str(folder), dtype="int4", device=torch.device("cuda"), context_tokens=64)
