"""`memspec bench`: how fast configurations decode, beside plain decoding and other runtimes."""

import argparse
import json
import sys
from pathlib import Path

from memspec_core.cli.arguments import Subparsers, names, numbers, positive
from memspec_core.settings import DTYPES, STRATEGY_NAMES, read_parameters


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="measure drafts beside plain decoding",
        description="Measure speed, acceptance and exactness of each configuration beside plain "
        "decoding, on the same prompts in one run. Lists are separated by commas.",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="PROMPTS.jsonl", help="a `prompt` a line"
    )
    parser.add_argument(
        "--config", type=Path, metavar="PARAMS.yaml", help="parameters, as for the node"
    )
    parser.add_argument(
        "--prompts", type=positive, metavar="N", help="prompts of each file, evenly spread"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N")
    parser.add_argument("--repeats", type=positive, default=3, metavar="R")
    parser.add_argument(
        "--drafts", type=names, default=(), help="names, or none; default: all configured"
    )
    parser.add_argument(
        "--strategies", type=names, default=(), help=f"of {', '.join(STRATEGY_NAMES)}"
    )
    parser.add_argument("--dtypes", type=names, default=(), help=f"of {', '.join(DTYPES)}")
    parser.add_argument(
        "--draft-lengths", type=numbers, default=(), help="default: the configured one"
    )
    parser.add_argument(
        "--peers", type=names, default=(), help="of transformers, assisted, llama_cpp"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    from memspec_core.evaluation.bench import plan_bench, run_bench
    from memspec_core.evaluation.figures import as_json
    from memspec_core.evaluation.report import table
    from memspec_core.training.prompts import read_prompt_sets

    plan = plan_bench(
        read_parameters(arguments.config) if arguments.config else {},
        read_prompt_sets(arguments.files, arguments.prompts),
        drafts=arguments.drafts,
        dtypes=arguments.dtypes,
        strategies=arguments.strategies,
        draft_lengths=arguments.draft_lengths,
        peers=arguments.peers,
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
    )
    report = as_json(plan, run_bench(plan, _show_progress))
    print(json.dumps(report, ensure_ascii=False) if arguments.json else table(report))
    return 0


def _show_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
