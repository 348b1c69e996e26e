"""The speed that memory allows, and the bytes that decoding has to read for it.

tokens/s <= B · E[A] / (W_t + γ · W_d + KV): an iteration of E[A] tokens reads the target's
weights once, however many rows it verifies, the draft's once for each proposal, and the target's
keys and values so far. The draft's own keys and values are left out, which can only raise the
limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from memspec_core.models.checkpoint import Checkpoint
from memspec_core.models.sources import DTYPES, EMBEDDING
from memspec_core.request import GenerationStats
from memspec_core.snapshot import DraftState, RuntimeSnapshot

_RESIDENT = (DraftState.RESIDENT, DraftState.ACTIVE)


@dataclass(frozen=True)
class ReadBytes:
    """What one pass reads, in bytes: `target` and `drafts` weights, `kv_per_token` of context."""

    target: int
    kv_per_token: float
    drafts: Mapping[str, int]

    def an_iteration(self, stats: GenerationStats) -> float:
        """Return the mean bytes that an iteration of one generation had to read."""
        iterations = max(1, stats.iterations)
        drafted = sum(u.drafted_tokens * self.drafts.get(u.draft, 0) for u in stats.drafts)
        context = stats.prompt_tokens + stats.generated_tokens / 2
        return self.target + drafted / iterations + context * self.kv_per_token

    def limit(self, stats: GenerationStats, bandwidth: float) -> float:
        """Return the tokens a second of a generation if reading at `bandwidth` were all."""
        tokens_an_iteration = stats.generated_tokens / max(1, stats.iterations)
        return bandwidth * tokens_an_iteration / self.an_iteration(stats)


def target_bytes(snapshot: RuntimeSnapshot, checkpoint: Checkpoint) -> int:
    """Return what a pass over the target reads: its weights.

    An embedding that is no head as well counts by its rows only, which is nothing.
    """
    total = snapshot.target.weight_bytes
    if checkpoint.config.tied_head:
        return total
    sizes = checkpoint.config
    dtype = DTYPES.get(snapshot.target.dtype) or checkpoint.weights.stored_dtype(EMBEDDING)
    return total - sizes.vocabulary_size * sizes.hidden_size * dtype.itemsize


def draft_weight_bytes(snapshot: RuntimeSnapshot, name: str) -> int:
    """Return the weights of a draft that is resident alone; 0 for one that takes no memory."""
    alone = any(draft.name == name and draft.state in _RESIDENT for draft in snapshot.drafts)
    return snapshot.memory.draft_bytes if alone else 0
