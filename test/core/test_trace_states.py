"""The states that a trace keeps are those that lie at hand while decoding."""

from pathlib import Path

import numpy as np
import pytest

from core.tiny import load_target
from memspec_core.measurement.trace import read_trace
from memspec_core.models.target import Target
from memspec_core.prediction.context import prompt_mean
from memspec_core.training.prompts import PromptSet
from memspec_core.training.traces import TracePlan, collect_trace


@pytest.fixture
def plan(target_folder: Path, draft_folders: dict[str, Path], tmp_path: Path) -> TracePlan:
    parameters: dict[str, object] = {
        "target.path": str(target_folder),
        "drafts.names": ["code"],
        "drafts.code.path": str(draft_folders["first_layer"]),
        "dtype": "fp32",
        "context_tokens": 256,
        "memory.floor_mib": 0,
        "memory.budget_mib": 1000,
    }
    prompts = (PromptSet("code/train", ("Hello", "Write a function that sorts")),)
    return TracePlan(parameters, prompts, tmp_path / "trace", max_new_tokens=6, states=True)


def test_states_of_a_trace_are_the_targets_features(
    plan: TracePlan, target: Target, target_folder: Path
) -> None:
    collect_trace(plan, lambda *_: None)
    last = target.decoder.config.layers - 1
    deployed = load_target(target_folder, taps=(last,))
    trace = read_trace(plan.folder, target.checkpoint.sha256())
    assert len(trace.prompts) == 2
    for traced in trace.prompts:
        prompt, answer = traced.prompt_ids.tolist(), traced.token_ids.tolist()
        deployed.cache.truncate(0)
        deployed.decoder.forward([*prompt, *answer], deployed.cache)
        assert deployed.cache.features is not None
        features = deployed.cache.features.numpy()
        expected = features[len(prompt) - 1 : len(prompt) - 1 + len(answer)]
        assert np.allclose(np.asarray(traced.states), expected, atol=2e-3)
        kept = np.asarray(traced.prompt_state)
        assert np.allclose(kept, prompt_mean(features[: len(prompt) - 1]), atol=2e-3)
