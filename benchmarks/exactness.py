"""Compare greedy output, token for token: transformers, plain decoding, speculative decoding.

    python benchmarks/exactness.py PROMPTS.jsonl... [--prompts 20] [--tokens 64] [--draft general]

Prompts are taken in turn from the files. fp32 by default, where all three must agree; other
dtypes show how many answers differ by near-ties. Prints one JSON object.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel

from memspec_core import GenerationRequest, Runtime, Settings
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.training.prompts import read_prompts
from memspec_core.training.reference import transformers_model


def main() -> int:
    """Run the comparison; returns 1 if outputs differ."""
    arguments = _arguments()
    columns = [read_prompts(path) for path in arguments.files]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*columns))
    prompts = [p.text for p in in_turn if p is not None][: arguments.prompts]
    settings = Settings.from_parameters({"dtype": arguments.dtype, "target.path": arguments.target})
    runtime = Runtime(settings)
    runtime.load()
    runtime.open()
    checkpoint = open_checkpoint(arguments.target)
    tokenizer = Tokenizer.of(checkpoint)
    reference = transformers_model(checkpoint, torch.float32, "cpu")
    report = {"prompts": 0, "tokens": 0, "plain_differs": 0, "speculative_differs": 0}
    report |= {"drafted": 0, "accepted": 0}
    for index, prompt in enumerate(prompts):
        request = GenerationRequest(prompt=prompt, max_new_tokens=arguments.tokens, draft="none")
        ids = tokenizer.prompt_ids(request.validated(()))
        plain = runtime.submit(request).result()
        drafted = GenerationRequest(
            prompt=prompt, max_new_tokens=arguments.tokens, draft=arguments.draft
        )
        speculative = runtime.submit(drafted).result()
        theirs = _transformers_greedy(reference, ids, arguments.tokens)
        report["prompts"] += 1
        report["tokens"] += len(theirs)
        report["plain_differs"] += list(plain.token_ids) != theirs
        report["speculative_differs"] += speculative.token_ids != plain.token_ids
        report["drafted"] += speculative.stats.drafted_tokens
        report["accepted"] += speculative.stats.accepted_tokens
        print(f"{index + 1} of {len(prompts)}: {report}", file=sys.stderr, flush=True)
    runtime.close()
    print(json.dumps(report | {"dtype": arguments.dtype, "draft": arguments.draft}))
    return int(report["plain_differs"] + report["speculative_differs"] > 0)


def _transformers_greedy(model: PreTrainedModel, prompt_ids: list[int], count: int) -> list[int]:
    fed = torch.tensor([prompt_ids])
    output = model.generate(
        input_ids=fed,
        attention_mask=torch.ones_like(fed),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return list(
        itertools.takewhile(lambda token: token not in ends, output[0, len(prompt_ids) :].tolist())
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--target", default="default")
    parser.add_argument("--draft", default="general")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
