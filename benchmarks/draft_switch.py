"""How long a draft switch takes, from the decision to the first iteration with the other draft.

    python benchmarks/draft_switch.py [--contexts 100,500,1000] [--repeats 9] [--drafts law,code]

One draft runs; after some tokens a strategy wants another one, which is `absent` (its file is not
in the page cache either, and decoding goes on meanwhile) or `resident`, but has read none of the
context. The runtime is the node's own, in the paper's form (N = 4, three proposals, K = 2).

Times run from the scheduling point that first wants the other draft to the end of the first
iteration with it, in which it reads the context; `iterations_before` ran with the old one in
between. `first_iteration` is that iteration alone, `usual_iteration` the median of those after it.
Prints one JSON object: medians with the range, in milliseconds.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from memspec_core import GenerationRequest, Iteration, Runtime, Settings
from memspec_core.cli.arguments import names, numbers, positive
from memspec_core.clock import SystemClock
from memspec_core.evaluation.comparison import PAPER_FORM
from memspec_core.measurement.decisions import Decision
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.draft import draft_folder
from memspec_core.models.pieces import forget
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.strategies import Context, Ranking

TEXT = "The robot goes through the building and looks into each room for the red mug. "
RESIDENT, ABSENT = "resident", "absent"
SWITCH_AT, NEW_TOKENS = 8, 96
"""Tokens of the answer after which the other draft is wanted, and in all."""


class Switch:
    """Wants one draft, and after some tokens another, which it `announces` or not."""

    name = "switch"
    insists = waits = False
    prepares: int | None = None
    reads_states = 0

    def __init__(self, first: str, then: str, announces: bool) -> None:
        self._before = {first: 1.0} | ({then: 0.5} if announces else {})
        self._after = {then: 1.0, first: 0.5}

    def rank(self, context: Context) -> Ranking:
        """Rank by the place alone."""
        return Ranking(self._before if context.place < SWITCH_AT else self._after)

    def observe(self, iteration: Iteration) -> None:
        """Learn nothing."""


@dataclass(frozen=True)
class Measured:
    """One switch, in seconds."""

    switch: float
    iterations_before: int
    first_iteration: float
    usual_iteration: float


class Switches:
    """Measures switches between the two drafts of a runtime."""

    def __init__(self, first: str, then: str) -> None:
        self._first, self._then = first, then
        self._clock = SystemClock()
        self._decisions: list[Decision] = []
        self._settings = Settings.from_parameters(
            {**PAPER_FORM, "drafts.names": [first, then], "resident_capacity": 2}
        )
        self._tokenizer = Tokenizer.of(open_checkpoint(self._settings.target_path))
        self.runtime = Runtime(
            self._settings, clock=self._clock, on_decision=self._decisions.append
        )

    def request(self, tokens: int) -> GenerationRequest:
        """Return a request with which so many tokens are there when the draft is to change."""
        long = GenerationRequest(prompt=TEXT * (tokens // 10 + 1), raw=True)
        ids = self._tokenizer.prompt_ids(long)[: tokens - SWITCH_AT]
        prompt = self._tokenizer.decode(ids)
        return GenerationRequest(prompt=prompt, raw=True, max_new_tokens=NEW_TOKENS)

    def measure(self, request: GenerationRequest, case: str) -> Measured:
        """Answer once, from nothing in memory, and measure the switch."""
        self._forget()
        self._decisions.clear()
        ended: list[tuple[float, Iteration]] = []

        def listen(iteration: Iteration) -> None:
            ended.append((self._clock.now(), iteration))

        strategy = Switch(self._first, self._then, announces=case == RESIDENT)
        if error := self.runtime.submit(request, listen, strategy).result().error:
            raise SystemExit(error)
        return _measured(self._decisions, ended, self._then)

    def _forget(self) -> None:
        """Leave no draft in memory, and no file of one in the page cache."""
        self.runtime.unload_drafts()
        for draft in self._settings.drafts:
            for file in draft_folder(draft.name, draft.path).iterdir():
                forget(file)


def main() -> int:
    """Measure and print."""
    arguments = _arguments()
    switches = Switches(*arguments.drafts)
    report: dict[str, Any] = {"drafts": arguments.drafts, "repeats": arguments.repeats}
    switches.runtime.load()
    try:
        switches.runtime.open()
        for tokens, case in product(arguments.contexts, (RESIDENT, ABSENT)):
            request = switches.request(tokens)
            switches.measure(request, case)  # warms up
            measured = [switches.measure(request, case) for _ in range(arguments.repeats)]
            report[f"{tokens} tokens, {case}"] = _figures(measured)
        report["load"] = round(1e3 * switches.runtime.snapshot().loads.load_seconds_p50, 2)
    finally:
        switches.runtime.close()
    print(json.dumps(report, indent=1))
    return 0


def _measured(
    decisions: Sequence[Decision], ended: Sequence[tuple[float, Iteration]], then: str
) -> Measured:
    decided = next(decision for decision in decisions if decision.wanted == then).at_seconds
    after = [(at, iteration) for at, iteration in ended if at > decided]
    with_it = [place for place, (_, iteration) in enumerate(after) if iteration.draft == then]
    if len(with_it) < 3:
        raise SystemExit(f"The answer ended before {then} ran; choose other contexts or drafts.")
    at, iteration = after[with_it[0]]
    usual = [after[place][1].seconds.decode for place in with_it[1:]]
    return Measured(at - decided, with_it[0], iteration.seconds.decode, statistics.median(usual))


def _figures(measured: Sequence[Measured]) -> dict[str, Any]:
    return {
        "switch": _milliseconds([one.switch for one in measured]),
        "iterations_before": statistics.median(one.iterations_before for one in measured),
        "first_iteration": _milliseconds([one.first_iteration for one in measured]),
        "usual_iteration": _milliseconds([one.usual_iteration for one in measured]),
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    shown = {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
    return {name: round(1e3 * value, 2) for name, value in shown.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contexts", type=numbers, default=(100, 500, 1000), metavar="TOKENS")
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument("--drafts", type=names, default=("law", "code"), help="two of them")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
