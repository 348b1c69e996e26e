"""MemSpec: memory-aware scheduling of draft models in speculative decoding.

Read `controller.py` first; it is the paper's Algorithm 3.
"""

from memspec_core.errors import MemSpecError
from memspec_core.generation import Generation
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.request import (
    ChatMessage,
    DraftUsage,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
    SamplingSettings,
)
from memspec_core.runtime import Runtime
from memspec_core.settings import PARAMETERS, Parameter, Settings, read_parameters
from memspec_core.snapshot import DraftSnapshot, DraftState, RuntimeSnapshot

__all__ = [
    "PARAMETERS",
    "ChatMessage",
    "DraftSnapshot",
    "DraftState",
    "DraftUsage",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "GenerationResult",
    "GenerationStats",
    "Iteration",
    "IterationSeconds",
    "MemSpecError",
    "Parameter",
    "Runtime",
    "RuntimeSnapshot",
    "SamplingSettings",
    "Settings",
    "read_parameters",
]
