"""`memspec doctor`: what this installation has, and what would stop it from working."""

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from memspec_core.cli.arguments import Subparsers
from memspec_core.errors import MemSpecError
from memspec_core.residency.available import available_bytes
from memspec_core.settings import Settings

if TYPE_CHECKING:
    import torch

    from memspec_core.models.linear import Linear

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "psutil")

Check = Callable[[], str]


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation",
        description="Check the installation; exit code 1 if something needed does not work.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run every check; returns 1 if a needed one fails."""
    findings = {name: _examined(check) for name, check in NEEDED.items()}
    extras = {name: _examined(check) for name, check in OPTIONAL.items()}
    healthy = all(ok for ok, _ in findings.values())
    if arguments.json:
        checks = {
            name: {"ok": ok, "needed": name in findings, "found": text}
            for name, (ok, text) in (findings | extras).items()
        }
        print(json.dumps({"healthy": healthy, "checks": checks}))
    else:
        for name, (ok, text) in (findings | extras).items():
            mark = "ok  " if ok else "FAIL" if name in findings else "--  "
            print(f"{mark}  {name:<16}  {text}")
    return 0 if healthy else 1


def _examined(check: Check) -> tuple[bool, str]:
    try:
        return True, check()
    except MemSpecError as error:
        return False, str(error)
    except Exception as error:  # a broken installation can raise anything
        return False, f"{type(error).__name__}: {error}"


def _python() -> str:
    return f"{platform.python_version()} on {platform.machine()}"


def _packages() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)


def _target() -> str:
    from memspec_core.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint("default")
    return f"{checkpoint.path}: {checkpoint.quantisation}"


def _drafts() -> str:
    from memspec_core.models.draft import draft_folder, read_manifest, weights_are_whole

    names = Settings.from_parameters().draft_names
    for name in names:
        folder = draft_folder(name, "default")
        if not weights_are_whole(folder, read_manifest(folder)):
            raise MemSpecError(f"{folder}: the weights' checksum differs; copy the draft again.")
    return f"{', '.join(names)} in {folder.parent}"


def _predictor() -> str:
    from memspec_core.models.checkpoint import open_checkpoint
    from memspec_core.prediction.head import load_head, predictor_folder

    folder = predictor_folder()
    plan = load_head(folder, open_checkpoint("default").sha256()).plan
    return f"{folder}: for {', '.join(plan.drafts)}"


def _torch_kernel() -> str:
    """Run torch's 4-bit kernel on a small weight."""
    import torch

    from memspec_core.models.linear import Int4Linear
    from memspec_core.models.quantised import round_to_int4

    weight = round_to_int4(_small_weight())
    _require_right("The 4-bit kernel", Int4Linear(weight), weight.dequantised())
    return f"{Int4Linear.kernel}; {torch.get_num_threads()} threads"


def _native_step() -> str:
    """Run the native kernels on a small weight; raises with what stops models from using them."""
    import torch

    from memspec_core.models.native.backend import NativeLinear, SharedThreads
    from memspec_core.models.native.library import SWITCH, is_switched_off, library_path, load
    from memspec_core.models.quantised import round_to_int4, round_to_int8

    if is_switched_off():
        raise MemSpecError(f"Switched off by {SWITCH}=0; torch computes instead.")
    library = load()
    dense = _small_weight()
    four, eight, half = round_to_int4(dense), round_to_int8(dense), dense.bfloat16()
    for weight, meant in (
        (four, four.dequantised()),
        (eight, eight.dequantised()),
        (half, half.float()),
    ):
        linear = NativeLinear(library, weight, None, SharedThreads(torch.get_num_threads()))
        _require_right(f"The kernel '{linear.kernel}'", linear, meant)
    return f"in use, int4, int8, bf16; {torch.get_num_threads()} threads; {library_path()}"


def _small_weight() -> "torch.Tensor":
    import torch

    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def _require_right(name: str, linear: "Linear", weight: "torch.Tensor") -> None:
    """Compare what a kernel computes with plain arithmetic."""
    import torch

    rows = torch.linspace(-1.0, 1.0, 128).view(2, 64)
    expected = rows @ weight.T
    error = float((linear(rows).float() - expected).abs().max())
    if not error <= 0.1 * float(expected.abs().max()):
        raise MemSpecError(f"{name} computes wrong values (off by {error:.3g}).")


def _memory() -> str:
    total = psutil.virtual_memory().total
    return f"{available_bytes() / 2**20:.0f} of {total / 2**20:.0f} MiB available"


def _cuda() -> str:
    """Run one kernel: wheels without this GPU's code fail there, not at import."""
    import torch

    if not torch.cuda.is_available():
        raise MemSpecError("no CUDA device; the models run on the CPU")
    total = float(torch.ones(8, device="cuda").sum())
    if total != 8.0:
        raise MemSpecError(f"a CUDA kernel computed {total} instead of 8")
    return f"{torch.cuda.get_device_name()}; 4-bit weights: {_cuda_int4()}"


def _cuda_int4() -> str:
    """Say what computes weights of 4 bits on the GPU, such as GPTQ's, having tried it."""
    import torch

    from memspec_core.models.backend import TorchBackend
    from memspec_core.models.cuda_int4 import int4_fault
    from memspec_core.models.quantised import Int4Weight, round_to_int4

    backend, device = TorchBackend(1), torch.device("cuda")
    rounded = round_to_int4(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))
    weight = Int4Weight(rounded.pairs, rounded.scale, -8 * rounded.scale).to(device)
    if not backend.takes(weight):
        return f"torch bfloat16, since {int4_fault(device)}"
    return backend.linear(weight).kernel


def _ros() -> str:
    import rclpy  # noqa: F401

    from memspec_msgs.action import Generate  # noqa: F401

    return f"rclpy and memspec_msgs, {os.environ.get('ROS_DISTRO', 'from wheels')}"


def _json_schema() -> str:
    from memspec_core.speculation.schema import library

    return f"llguidance {library().__version__}"


NEEDED: dict[str, Check] = {
    "python": _python,
    "packages": _packages,
    "default target": _target,
    "default drafts": _drafts,
    "predictor": _predictor,
    "4-bit kernel": _torch_kernel,
    "memory": _memory,
}
OPTIONAL: dict[str, Check] = {
    "native step": _native_step,
    "json_schema": _json_schema,
    "CUDA": _cuda,
    "ROS 2": _ros,
}
