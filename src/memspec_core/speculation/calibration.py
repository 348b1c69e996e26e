"""What passes and draft steps cost on this machine, measured when the models are loaded."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from memspec_core.clock import Clock
from memspec_core.measurement.bandwidth import read_bandwidth
from memspec_core.models.target import Target
from memspec_core.request import LOOKUP, SamplingSettings
from memspec_core.settings import MIB
from memspec_core.speculation.proposal import Draft
from memspec_core.speculation.sampling import Sampler

MOST_ROWS = 16
"""Rows of the largest pass that is measured: proposals and the token before them."""

CONTEXT_TOKENS = 64
STEPS = 4
REPEATS = 5
PATIENCE_SECONDS = 2.0
"""When so much has gone by, everything that is left is measured once."""

READ_BYTES = 64 * MIB
"""More than most last-level caches hold, and little enough for a small robot."""

UNKNOWN_STEP_SHARE = 0.1
"""A draft's step where none was measured, in one-row passes of the target."""


@dataclass(frozen=True)
class Costs:
    """Seconds: `verify_seconds[n - 1]` of a pass of n rows, `draft_seconds` of a draft's step.

    `read_bytes_per_second`: how fast memory is read, 0 where that was not measured; `device`: "cpu"
    or "cuda".
    """

    verify_seconds: tuple[float, ...]
    draft_seconds: Mapping[str, float] = field(default_factory=dict)
    read_bytes_per_second: float = 0.0
    device: str = "cpu"

    @property
    def most_rows(self) -> int:
        """Rows of the largest pass that is known."""
        return len(self.verify_seconds)

    def step_seconds(self, name: str) -> float:
        """Return a draft's step cost; nothing for a lookup of whatever certainty.

        A draft that was not measured is taken to cost as much as those that were.
        """
        if name.startswith(LOOKUP):
            return 0.0
        known = self.draft_seconds.values()
        usual = statistics.median(known) if known else UNKNOWN_STEP_SHARE * self.verify_seconds[0]
        return self.draft_seconds.get(name, usual)


NOMINAL = Costs(tuple(1.0 + 0.1 * rows for rows in range(MOST_ROWS)))
"""In passes of one row: about what was measured on two cores."""


def calibrate(target: Target, drafts: Mapping[str, Draft], clock: Clock) -> Costs:
    """Measure passes of 1 to 16 rows and the drafts' steps; the caches are empty afterwards."""
    most = min(MOST_ROWS, target.context_tokens)
    if target.decoder.device.type == "cuda":  # where the first pass of a size is captured as well
        for rows in range(1, most + 1):
            _verify(target, rows)
    deadline = clock.now() + PATIENCE_SECONDS
    verify = [
        _median_seconds(partial(_verify, target, rows), clock, deadline)
        for rows in range(1, most + 1)
    ]
    steps = {
        # Each after a pass, which leaves little of a draft in the CPU's caches.
        name: _median_seconds(
            partial(_draw, draft, target), clock, deadline, partial(_verify, target, 1)
        )
        / STEPS
        for name, draft in drafts.items()
    }
    target.cache.truncate(0)
    device = target.decoder.device.type
    bandwidth = read_bandwidth(
        target.backend.threads, device, size_bytes=READ_BYTES, repeats=REPEATS
    )
    return Costs(_rising(verify), steps, bandwidth, device)


def _median_seconds(
    run: Callable[[], object],
    clock: Clock,
    deadline: float,
    before: Callable[[], object] = lambda: None,
) -> float:
    run()
    seconds: list[float] = []
    while not seconds or (len(seconds) < REPEATS and clock.now() < deadline):
        before()
        started = clock.now()
        run()
        seconds.append(clock.now() - started)
    return statistics.median(seconds)


def _verify(target: Target, rows: int) -> None:
    start = min(CONTEXT_TOKENS, target.context_tokens - rows)
    target.cache.truncate(start)
    if target.cache.length < start:
        target.decoder.forward([0] * (start - target.cache.length), target.cache)
    target.decoder.most_probable(target.decoder.forward([0] * rows, target.cache))


def _draw(draft: Draft, target: Target) -> None:
    # No longer than what the target was fed just before: a draft may need its features.
    context = [0] * min(CONTEXT_TOKENS, target.context_tokens)
    draft.propose(context, STEPS, Sampler(SamplingSettings(), torch.device("cpu")))


def _rising(seconds: list[float]) -> tuple[float, ...]:
    """Let no pass be cheaper than one of fewer rows, nor free: only noise can make it so."""
    result: list[float] = []
    for value in seconds:
        result.append(max([value, *result[-1:], 1e-9]))
    return tuple(result)
