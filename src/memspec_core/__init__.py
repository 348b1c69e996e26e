"""MemSpec: memory-aware scheduling of draft models in speculative decoding.

Read `controller.py` first; it is the paper's Algorithm 3.
"""

from typing import TYPE_CHECKING, Any

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
from memspec_core.settings import PARAMETERS, Parameter, Settings, read_parameters
from memspec_core.snapshot import DraftSnapshot, DraftState, RuntimeSnapshot

if TYPE_CHECKING:
    from memspec_core.runtime import Runtime

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


def __getattr__(name: str) -> Any:
    """Import the runtime when it is first asked for: it brings torch, which takes seconds."""
    if name == "Runtime":
        from memspec_core.runtime import Runtime

        return Runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
