"""`memspec reduce-trace`: a trace small enough to hand on, without the text of prompts."""

import argparse
from pathlib import Path

from memspec_core.cli.arguments import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "reduce-trace",
        help="make a trace small enough to hand on",
        description="Write a trace of which the prompts are left out, but for their lengths and "
        "hashes, and in which the target's states are replaced by what a predictor makes of them. "
        "Strategies are simulated on it as on the whole trace.",
    )
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="folder that memspec trace --states wrote"
    )
    parser.add_argument(
        "--predictor", type=Path, required=True, metavar="FOLDER", help="a trained predictor"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="to write to")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reduce and say how large it is."""
    from memspec_core.evaluation.reduction import reduce_trace, write_reduced
    from memspec_core.measurement.trace import read_trace
    from memspec_core.prediction.head import load_head

    trace = read_trace(arguments.trace)
    head = load_head(arguments.predictor, trace.header.target_sha256)
    write_reduced(*reduce_trace(trace, head), arguments.out)
    size = sum(file.stat().st_size for file in arguments.out.rglob("*") if file.is_file())
    print(f"{len(trace.prompts)} prompts in {arguments.out}: {size / 1e6:.2f} MB.")
    return 0
