"""`memspec paraphrase`: write prompts said otherwise, to see whether routing is misled."""

import argparse
import json
from pathlib import Path

from memspec_core.cli.arguments import Subparsers, positive


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "paraphrase",
        help="write prompts said otherwise",
        description="Write prompt files with the prompts of others said otherwise by fixed rules, "
        "a folder for each rule, and one for requests of two topics. To see how a predictor does "
        "on them, trace each folder and give the traces to memspec train-predictor --eval.",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="PROMPTS.jsonl", help="a `prompt` a line"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--prompts", type=positive, metavar="N", help="prompts of each file, evenly spread"
    )
    parser.add_argument("--json", action="store_true", help="print the files as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print where they are."""
    from memspec_core.training.paraphrases import write_paraphrases

    counts = write_paraphrases(arguments.files, arguments.prompts, arguments.out)
    if arguments.json:
        print(json.dumps({"files": counts}))
    else:
        print("\n".join(f"{path}: {count} prompts" for path, count in counts.items()))
    return 0
