"""`memspec trace`: what every draft would have got right, at each place of the target's answers."""

import argparse
import json
from pathlib import Path

from memspec_core.cli.arguments import Subparsers, numbers, positive
from memspec_core.cli.progress import Progress
from memspec_core.settings import read_parameters


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "trace",
        help="trace what each draft gets right",
        description="Decode each prompt greedily, and note at each place of the answer how many "
        "proposals of every configured draft, and of a lookup, the target would accept. A run "
        "that was cut goes on where it stopped. Lists are separated by commas.",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="PROMPTS.jsonl", help="a `prompt` a line"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the trace to")
    parser.add_argument(
        "--config", type=Path, metavar="PARAMS.yaml", help="parameters, as for the node"
    )
    parser.add_argument(
        "--prompts", type=positive, metavar="N", help="prompts of each file, evenly spread"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N")
    parser.add_argument("--length", type=positive, default=8, help="proposals at each place")
    parser.add_argument(
        "--states", action="store_true", help="keep the target's states, to train a predictor"
    )
    parser.add_argument(
        "--lengths", type=numbers, default=(3, 4), help="of the figures that are printed"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trace and print the figures."""
    from memspec_core.evaluation.acceptance import as_json
    from memspec_core.evaluation.acceptance_report import table
    from memspec_core.measurement.trace import read_trace
    from memspec_core.training.prompts import read_prompt_sets
    from memspec_core.training.traces import TracePlan, collect_trace

    plan = TracePlan(
        parameters=read_parameters(arguments.config) if arguments.config else {},
        prompt_sets=read_prompt_sets(arguments.files, arguments.prompts),
        folder=arguments.out,
        length=arguments.length,
        max_new_tokens=arguments.max_new_tokens,
        states=arguments.states,
    )
    with Progress() as progress:
        collect_trace(plan, progress.show)
    figures = as_json(read_trace(arguments.out), arguments.lengths)
    print(json.dumps(figures) if arguments.json else table(figures))
    return 0
