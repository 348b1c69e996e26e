"""The most memory that drafts take in a run, beside what the ledger says and K drafts and a load.

    python benchmarks/peak_memory.py [--answers 12] [-K 2]

Answers name the six drafts in turn, so that each loads one that is not resident, with K resident
already. What the process holds with the target and the predictor alone, after every draft has run
once, is subtracted. Prints one JSON object, in MiB.
"""

import argparse
import json
import threading
from pathlib import Path

from memspec_core.engine import return_memory
from memspec_core.request import GenerationRequest
from memspec_core.runtime import Runtime
from memspec_core.settings import MIB, Settings

PROMPT = "Write a long story about a robot that learns to cook in a busy kitchen."
LOOK_SECONDS = 0.001


def status_bytes(key: str) -> int:
    """Return a size of this process from the system's account of it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class Peak:
    """The most that this process holds, and that the ledger has, while a thread looks."""

    def __init__(self, runtime: Runtime) -> None:
        self.held_bytes = 0
        self.booked_bytes = 0
        self._runtime = runtime
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.booked_bytes = max(self.booked_bytes, self._runtime.snapshot().memory.used_bytes)
            self.held_bytes = max(self.held_bytes, status_bytes("RssAnon"))


def measure(answers: int, capacity: int) -> dict[str, float]:
    """Run the answers; return what was held beyond target and predictor, and what was planned."""
    settings = Settings.from_parameters({"resident_capacity": capacity})
    runtime = Runtime(settings)
    runtime.load()
    try:
        runtime.open()
        for name in settings.draft_names:  # what is made once, and the target's KV
            ask(runtime, name)
        runtime.unload_drafts()
        return_memory()
        held = status_bytes("RssAnon")
        booked = runtime.snapshot().memory.used_bytes
        with Peak(runtime) as peak:
            for number in range(answers):
                ask(runtime, settings.draft_names[number % len(settings.draft_names)])
        drafts = sorted(draft.bytes for draft in runtime.snapshot().drafts)
    finally:
        runtime.close()
    return {
        "held_peak_mib": (peak.held_bytes - held) / MIB,
        "ledger_peak_mib": (peak.booked_bytes - booked) / MIB,
        "k_drafts_and_one_load_mib": sum(drafts[-capacity - 1 :]) / MIB,
    }


def ask(runtime: Runtime, draft: str) -> None:
    """Answer with a draft."""
    request = GenerationRequest(prompt=PROMPT, draft=draft, max_new_tokens=64)
    runtime.submit(request).result()


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("-K", type=int, default=2, dest="capacity")
    given = parser.parse_args()
    figures = measure(given.answers, given.capacity)
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
