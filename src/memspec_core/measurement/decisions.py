"""The record of scheduling decisions: why the runtime ran, loaded and let go which drafts.

One JSON object a line, with the fields of `Decision`; enough to replay a robot's day.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from memspec_core.measurement.lines import line_writer

Digest = Any
"""A hash under way, of hashlib."""


@dataclass(frozen=True)
class Decision:
    """One scheduling point.

    `at_seconds` on the runtime's clock; `context_hash`: the first 16 digits of the SHA-256 of the
    prompt's and the recent tokens; `place`: tokens of the answer so far; `scores` of the strategy
    by draft; `resident` and `loading` as the decision leaves them; `wanted` the draft to run,
    `active` the one that does, "none" for plain decoding; `prediction_seconds` and
    `load_wait_seconds`: what the point took.
    """

    at_seconds: float
    context_hash: str
    place: int
    strategy: str
    scores: dict[str, float]
    resident: tuple[str, ...]
    loading: tuple[str, ...]
    wanted: str
    active: str
    prediction_seconds: float
    load_wait_seconds: float

    def to_json(self) -> str:
        """Return the decision as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Decision":
        """Read a line; raises `ValueError` for one that is none, or was cut off."""
        fields: Any = json.loads(line)
        if not isinstance(fields, dict) or set(fields) != set(cls.__dataclass_fields__):
            raise ValueError("not the record of a decision")
        return cls(**fields | {name: tuple(fields[name]) for name in ("resident", "loading")})


def digest_of_prompt(prompt_ids: Sequence[int]) -> Digest:
    """Begin the hash of a generation's contexts: its prompt does not change."""
    return sha256(np.asarray(prompt_ids, np.int32).tobytes())


def hash_of_context(prompt: Digest, recent_ids: Sequence[int]) -> str:
    """Return the hash that a decision records of its context."""
    digest = prompt.copy()
    digest.update(np.asarray(recent_ids, np.int32).tobytes())
    hexadecimal: str = digest.hexdigest()
    return hexadecimal[:16]


def decision_writer(path: Path) -> Callable[[Decision], None]:
    """Return what appends decisions to a file, each line whole; raises `SettingsError`.

    A write that fails later, as on a full disc, ends the record and no answer.
    """
    write = line_writer(path, "Decisions")
    return lambda decision: write(decision.to_json())
