"""`memspec generate`: one answer from the core, without ROS."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from memspec_core.cli.arguments import Subparsers, read_schema
from memspec_core.errors import MemSpecError, RequestError
from memspec_core.generation import Generation
from memspec_core.request import (
    MAX_PROMPT_BYTES,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    SamplingSettings,
)
from memspec_core.settings import DTYPES, STRATEGY_NAMES, Settings, read_parameters
from memspec_core.speculation.schema import SchemaChecker

FAILED = 1


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate", help="answer a prompt", description="Stream the answer to a prompt."
    )
    parser.add_argument("prompt", help="the prompt, or - to read it from standard input")
    parser.add_argument(
        "--config", type=Path, metavar="PARAMS.yaml", help="parameters, as for the node"
    )
    parser.add_argument("--strategy", help=f"how drafts are chosen: {', '.join(STRATEGY_NAMES)}")
    parser.add_argument("--draft", default="", help="a draft's name, or none for plain decoding")
    parser.add_argument("--dtype", help=f"weights of the target: {', '.join(DTYPES)}")
    parser.add_argument("--max-new-tokens", type=int, default=0, help="0: the configured default")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=0.0, help="0: off")
    parser.add_argument("--top-k", type=int, default=0, help="0: off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="repeatable")
    parser.add_argument("--time-limit", type=float, default=0.0, help="seconds; 0: none")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="append what happened, for memspec timeline"
    )
    parser.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="answer with JSON that is valid for it"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate; returns 1 if the generation was aborted."""
    request = _request(arguments)
    settings = _settings(arguments)
    request.validated(settings.draft_names)
    if request.json_schema:
        SchemaChecker().check(request.json_schema)
    from memspec_core.runtime import Runtime

    runtime = Runtime(settings)
    runtime.load()
    try:
        runtime.open()
        generation = runtime.submit(request)
        result = _follow(generation, stream=not arguments.json)
    finally:
        runtime.close()
    if arguments.json:
        print(json.dumps(as_json(result), ensure_ascii=False))
    if result.finish_reason is FinishReason.ABORTED:
        raise MemSpecError(result.error)
    return 0


def as_json(result: GenerationResult) -> dict[str, object]:
    """Return a result as the object that `--json` prints."""
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason.name,
        "error": result.error,
        "stats": asdict(result.stats),
    }


def _request(arguments: argparse.Namespace) -> GenerationRequest:
    prompt = _read_standard_input() if arguments.prompt == "-" else arguments.prompt
    return GenerationRequest(
        prompt=prompt,
        raw=arguments.raw,
        max_new_tokens=arguments.max_new_tokens,
        sampling=SamplingSettings(
            arguments.temperature, arguments.top_p, arguments.top_k, arguments.seed
        ),
        stop=tuple(arguments.stop),
        draft=arguments.draft,
        time_limit_seconds=arguments.time_limit,
        json_schema=read_schema(arguments.json_schema),
    )


def _read_standard_input() -> str:
    """Read the prompt, not much more of it than a request may hold."""
    try:
        return sys.stdin.buffer.read(MAX_PROMPT_BYTES + 4).decode()
    except UnicodeDecodeError as error:
        raise RequestError("Standard input is longer than a prompt, or not UTF-8.") from error


def _settings(arguments: argparse.Namespace) -> Settings:
    parameters = read_parameters(arguments.config) if arguments.config else {}
    for name in ("strategy", "dtype"):
        value = getattr(arguments, name)
        if value is not None:
            parameters[name] = value
    if arguments.record is not None:
        parameters["record.path"] = str(arguments.record)
    return Settings.from_parameters(parameters)


def _follow(generation: Generation, *, stream: bool) -> GenerationResult:
    try:
        for iteration in generation.iterations():
            if stream:
                sys.stdout.write(iteration.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        generation.cancel()
    result = generation.result()
    if stream and (result.text or not result.error):
        print()
        print(_summary(result), file=sys.stderr)
    return result


def _summary(result: GenerationResult) -> str:
    stats = result.stats
    return (
        f"[{result.finish_reason.name.lower()}: {stats.generated_tokens} tokens, "
        f"{stats.tokens_per_second:.1f} tokens/s; drafts proposed {stats.drafted_tokens}, "
        f"{stats.accepted_tokens} accepted, {stats.mean_accepted:.2f} an iteration]"
    )
