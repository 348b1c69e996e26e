"""What the ledger says against what the process takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from memspec_core.engine import return_memory
from memspec_core.models.draft import plan_draft, shared_taps
from memspec_core.models.target import plan_target

def anonymous_bytes():
    return_memory()
    return status_bytes("RssAnon")

def status_bytes(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

def load(draft):
    return (draft.load_feature if draft.taps else draft.load)(target)

def is_resident():
    begun = anonymous_bytes()
    kept.extend(load(draft) for draft in drafts)
    return anonymous_bytes() - begun

torch.set_num_threads(1)
plan = plan_target(
    "default", dtype="stored", device=torch.device("cpu"), context_tokens=1024, threads=1
)
drafts = [plan_draft(name, "default", plan) for name in ("mixed", "general_only")]
plan = plan.with_taps(shared_taps(drafts))
plan.load()  # what is made once at the first load, by libraries
begun = anonymous_bytes()
target = plan.load()
taken = anonymous_bytes() - begun
planned = target.decoder.weight_bytes + plan.tokenizer_bytes + plan.kv_bytes
print(planned, taken)
kept = []
is_resident()  # the same
print(sum(draft.weight_bytes + draft.kv_bytes for draft in drafts), is_resident())
for draft in drafts:
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")  # the peak is counted from here
    begun = status_bytes("VmHWM")
    kept.append(load(draft))
    print(draft.weight_bytes + draft.kv_bytes + draft.transient_bytes,
          status_bytes("VmHWM") - begun)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_the_ledger_agrees_with_the_process(native: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MEMSPEC_NATIVE": native}
    environment |= {"HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [tuple(map(int, line.split())) for line in ended.stdout.splitlines()]
    models, peaks = lines[:2], lines[2:]
    for planned, taken in (*models, tuple(map(sum, zip(*models, strict=True)))):
        assert abs(taken - planned) <= 0.1 * planned, (planned, taken)
    for planned, taken in peaks:  # loads are admitted for what they need at their height
        assert taken <= 1.1 * planned, (planned, taken)
