"""JSON documents beside free text of the same prompts: how many are valid, and how fast they come.

    python benchmarks/structured.py PROMPTS.jsonl... [--prompts 200] [--schema FILE] [--tokens 192]

Each prompt is answered with and without the schema, in turn first and second, with the same
messages: a system message with the schema, then the prompt. A document is valid if it is whole and
jsonschema (`pip install jsonschema`) finds no fault. Speeds are tokens a second of decoding; the
ratio is taken within each prompt. Prints one JSON object.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jsonschema

from memspec_core import FinishReason, GenerationRequest, GenerationResult, Runtime, Settings
from memspec_core.request import ChatMessage
from memspec_core.training.prompts import read_prompts

TEXT = {"type": "string", "maxLength": 40}
TOOL_CALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tool": {
            "enum": ["go_to", "pick_up", "put_down", "open", "close", "switch_on", "ask", "say"]
        },
        "arguments": {
            "type": "object",
            "properties": {
                "object": TEXT,
                "place": TEXT,
                "count": {"type": "integer", "minimum": 1, "maximum": 20},
            },
            "required": ["object"],
            "additionalProperties": False,
        },
        "reason": {"type": "string", "maxLength": 160},
    },
    "required": ["tool", "arguments", "reason"],
    "additionalProperties": False,
}
LEAST_TOKENS = 8
"""Of an answer whose speed counts: of fewer it says little."""


def main() -> int:
    """Run the comparison; returns 1 if a document is not valid."""
    arguments = _arguments()
    schema = json.loads(arguments.schema.read_text()) if arguments.schema else TOOL_CALL
    columns = [read_prompts(path) for path in arguments.files]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*columns))
    prompts = [p.text for p in in_turn if p is not None][: arguments.prompts]
    runtime = Runtime(Settings.from_parameters({"target.path": arguments.target}))
    runtime.load()
    runtime.open()
    ratios: list[float] = []
    speeds: dict[str, list[float]] = {"free": [], "structured": []}
    faults: list[str] = []
    tokens = accepted = 0
    try:
        for index, prompt in enumerate(["Fetch the red mug.", *prompts]):
            requests = {
                name: _request(prompt, schema, arguments, structured=name == "structured")
                for name in (speeds if index % 2 else reversed(speeds))
            }
            results = {name: runtime.submit(request).result() for name, request in requests.items()}
            if not index:
                continue  # the first finds neither grammar nor table ready
            fault = _fault(results["structured"], schema)
            faults += [fault] if fault else []
            tokens += results["structured"].stats.generated_tokens
            accepted += results["structured"].stats.accepted_tokens
            if min(r.stats.generated_tokens for r in results.values()) >= LEAST_TOKENS:
                for name, result in results.items():
                    speeds[name].append(result.stats.tokens_per_second)
                ratios.append(speeds["structured"][-1] / speeds["free"][-1])
            print(f"{index} of {len(prompts)}, not valid: {faults}", file=sys.stderr)
    finally:
        runtime.close()
    report = {
        "prompts": len(prompts),
        "valid": len(prompts) - len(faults),
        "faults": faults,
        "tokens": tokens,
        "accepted_tokens": accepted,
        "compared": len(ratios),
        "free_tokens_per_second": statistics.median(speeds["free"]),
        "structured_tokens_per_second": statistics.median(speeds["structured"]),
        "ratio_median": statistics.median(ratios),
        "ratio_first_decile": statistics.quantiles(ratios, n=10)[0],
    }
    print(json.dumps(report))
    return int(bool(faults))


def _request(
    prompt: str, schema: dict[str, Any], arguments: argparse.Namespace, *, structured: bool
) -> GenerationRequest:
    text = json.dumps(schema)
    told = f"You control a robot. Answer with a JSON object that is valid for this schema: {text}"
    return GenerationRequest(
        messages=(ChatMessage("system", told), ChatMessage("user", prompt)),
        max_new_tokens=arguments.tokens,
        draft=arguments.draft,
        json_schema=text if structured else "",
    )


def _fault(result: GenerationResult, schema: dict[str, Any]) -> str:
    """Return what is wrong with a document, nothing where it is valid."""
    if result.finish_reason is not FinishReason.END_OF_SEQUENCE:
        return f"{result.finish_reason.name} {result.error} {result.text!r}"
    try:
        jsonschema.validate(json.loads(result.text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error} {result.text!r}"
    return ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--schema", type=Path, help="default: a tool call")
    parser.add_argument("--tokens", type=int, default=192, help="most tokens of an answer")
    parser.add_argument("--draft", default="", help="a draft's name, lookup or none")
    parser.add_argument("--target", default="default")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
