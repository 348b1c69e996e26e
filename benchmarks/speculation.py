"""What a draft gains over plain decoding, prompt by prompt, beside an n-gram lookup.

    python benchmarks/speculation.py PROMPTS.jsonl [--draft general] [--draft-lengths 1,2,3,4]

Plain and speculative decoding of each prompt follow each other in one run. The lookup is not run:
the greedy text does not depend on the draft, so what a lookup would have had accepted can be read
off the plain answer. Prints one JSON object: sums over the prompts, and the speed-up's median and
quartiles.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from memspec_core import GenerationRequest, GenerationResult, Runtime, Settings
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.training.prompts import read_prompts


@dataclass
class Tally:
    """Sums over the prompts for one draft length."""

    speedups: list[float] = field(default_factory=list)
    tokens: int = 0
    iterations: int = 0
    drafted: int = 0
    accepted: int = 0
    identical: int = 0
    lookup_iterations: int = 0

    def add(self, plain: GenerationResult, drafted: GenerationResult, lookups: int) -> None:
        """Add one prompt's pair of answers."""
        self.speedups.append(drafted.stats.tokens_per_second / plain.stats.tokens_per_second)
        self.tokens += drafted.stats.generated_tokens
        self.iterations += drafted.stats.iterations
        self.drafted += drafted.stats.drafted_tokens
        self.accepted += drafted.stats.accepted_tokens
        self.identical += drafted.token_ids == plain.token_ids
        self.lookup_iterations += lookups

    def report(self) -> dict[str, object]:
        """Return the figures of this draft length."""
        lower, median, upper = statistics.quantiles(self.speedups, n=4)
        return {
            "tokens_an_iteration": round(self.tokens / self.iterations, 3),
            "accepted_of_drafted": round(self.accepted / self.drafted, 3),
            "speedup_over_plain": round(median, 3),
            "speedup_quartiles": [round(lower, 3), round(upper, 3)],
            "identical_answers": self.identical,
            "lookup_tokens_an_iteration": round(self.tokens / self.lookup_iterations, 3),
        }


def main() -> int:
    """Measure and print."""
    arguments = _arguments()
    prompts = [p.text for p in read_prompts(arguments.file)][:: arguments.every]
    prompts = prompts[: arguments.prompts]
    tokenizer = Tokenizer.of(open_checkpoint("default"))
    tallies = {int(part): Tally() for part in arguments.draft_lengths.split(",")}
    plain_rates = []
    runtime = Runtime(Settings.from_parameters({"dtype": arguments.dtype}))
    runtime.load()
    runtime.open()
    for index, prompt in enumerate(prompts):
        request = GenerationRequest(prompt=prompt, max_new_tokens=arguments.tokens, draft="none")
        plain = runtime.submit(request).result()
        plain_rates.append(plain.stats.tokens_per_second)
        prompt_ids = tokenizer.prompt_ids(request.validated(()))
        for length, tally in tallies.items():
            runtime.change({"draft_length": length})
            drafted = runtime.submit(replace(request, draft=arguments.draft)).result()
            tally.add(plain, drafted, lookup_iterations(prompt_ids, plain.token_ids, length))
        print(f"{index + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    runtime.close()
    report = {
        "prompts": len(prompts),
        "tokens": arguments.tokens,
        "dtype": arguments.dtype,
        "draft": arguments.draft,
        "plain_tokens_per_second": round(statistics.median(plain_rates), 1),
        "by_draft_length": {length: tally.report() for length, tally in tallies.items()},
    }
    print(json.dumps(report, indent=1))
    return 0


def lookup_iterations(
    prompt_ids: Sequence[int], answer_ids: Sequence[int], length: int, ngram: int = 3
) -> int:
    """Return how many iterations a lookup of the last `ngram` tokens would have taken.

    It proposes what followed the latest earlier occurrence of the last tokens of the context.
    """
    text = [*prompt_ids, *answer_ids]
    position, iterations = len(prompt_ids), 0
    followed: dict[tuple[int, ...], int] = {}
    known = ngram
    while position < len(text):
        while known < position:
            followed[tuple(text[known - ngram : known])] = known
            known += 1
        start = followed.get(tuple(text[position - ngram : position]))
        proposal = [] if start is None else text[start : min(start + length, position)]
        accepted = 0
        while accepted < len(proposal) and position + accepted < len(text):
            if proposal[accepted] != text[position + accepted]:
                break
            accepted += 1
        position += accepted + 1
        iterations += 1
    return iterations


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--draft", default="general")
    parser.add_argument("--draft-lengths", default="1,2,3,4")
    parser.add_argument("--dtype", default="stored")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--tokens", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
