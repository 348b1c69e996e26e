"""`memspec reproduce`: every figure of the paper, from traces and real runs."""

import argparse
import os
from pathlib import Path

from memspec_core.cli.arguments import Subparsers, add_profile, positive
from memspec_core.cli.progress import Progress
from memspec_core.settings import read_parameters


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "reproduce",
        help="make the paper's figures anew",
        description="Write a folder with every figure of the paper beside its claims: by real runs "
        "on this machine, by simulating a board on traced answers, and on generated answers with "
        "the paper's contrasts. A run that was cut goes on where it stopped.",
    )
    parser.add_argument("out", type=Path, metavar="FOLDER", help="folder to write to")
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="TRACE",
        help="of the installed drafts, from memspec reduce-trace or memspec trace --states",
    )
    parser.add_argument(
        "--predictor", type=Path, metavar="FOLDER", help="needed for a trace that is not reduced"
    )
    parser.add_argument(
        "--rankings",
        type=Path,
        metavar="JSON",
        help="what memspec train-predictor --json printed, for Table 2",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        default=[],
        metavar="JSON",
        help="real runs on this machine: what memspec compare --json printed; the first one is of "
        "most figures, further ones may have another N, K or length",
    )
    parser.add_argument(
        "--real",
        type=Path,
        nargs="+",
        default=[],
        metavar="PROMPTS.jsonl",
        help="make the real runs now, on prompts that were traced",
    )
    parser.add_argument(
        "--real-prompts", type=positive, default=12, metavar="N", help="of each file of --real"
    )
    parser.add_argument(
        "--config", type=Path, metavar="PARAMS.yaml", help="parameters, as for the node"
    )
    add_profile(parser)
    parser.add_argument("--prompts", type=positive, default=100, help="of each domain, at the most")
    parser.add_argument(
        "--length", type=positive, default=4, metavar="GAMMA", help="proposals in simulations"
    )
    parser.add_argument("--jobs", type=positive, default=os.cpu_count(), help="processes")
    parser.add_argument(
        "--force", action="store_true", help="overwrite what is in the folder, whatever it is from"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reproduce, and say where the report is."""
    from memspec_core.evaluation.reproduction.run import reproduce
    from memspec_core.evaluation.reproduction.sources import ReproductionPlan

    plan = ReproductionPlan(
        folder=arguments.out,
        trace=arguments.trace,
        predictor=arguments.predictor,
        parameters=read_parameters(arguments.config) if arguments.config else {},
        profile=arguments.profile,
        prompts=arguments.prompts,
        length=arguments.length,
        reports=tuple(arguments.runs),
        real_prompts=tuple(arguments.real),
        real_count=arguments.real_prompts,
        rankings=arguments.rankings,
        jobs=arguments.jobs,
        force=arguments.force,
    )
    with Progress() as progress:
        report = reproduce(plan, progress.show)
    print(report)
    return 0
