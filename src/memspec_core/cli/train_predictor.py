"""`memspec train-predictor`: train the head that ranks drafts, on a decoding trace."""

import argparse
import json
from pathlib import Path

from memspec_core.cli.arguments import Subparsers, positive
from memspec_core.cli.progress import Progress


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "train-predictor",
        help="train the predictor that ranks drafts",
        description="Train on a trace that memspec trace --states made, and print how often the "
        "best draft is ranked first or among two, and the throughput of following the ranking, "
        "on prompts that were held out. Prompt files, or the folders that tell them apart, must "
        "bear the names of drafts. Lists are separated by commas.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="folder of the trace")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="folder for the predictor"
    )
    parser.add_argument(
        "--target", default="default", metavar="CHECKPOINT", help="the target as it is deployed"
    )
    parser.add_argument(
        "--eval",
        type=Path,
        action="append",
        default=[],
        metavar="TRACE",
        help="judge on this trace as well; may be given several times",
    )
    parser.add_argument(
        "--inputs",
        choices=("prompt", "recent", "both"),
        default="both",
        help="what the context holds of the predictor that is written",
    )
    parser.add_argument(
        "--encoder",
        choices=("hidden_states", "minilm"),
        default="hidden_states",
        help="hidden_states: the target's own, at no cost; minilm: a sentence encoder, to compare",
    )
    parser.add_argument(
        "--labels",
        choices=("domain", "utility"),
        default="domain",
        help="domain: the draft of the prompt's domain; utility: the one that gains most next",
    )
    parser.add_argument(
        "--drafts", type=_names, default=(), metavar="NAMES", help="those to rank (default: all)"
    )
    parser.add_argument(
        "--interval", type=positive, default=4, help="iterations between scheduling points"
    )
    parser.add_argument("--length", type=positive, default=3, help="proposals an iteration")
    parser.add_argument("--penalty", type=_above_zero, default=1.0, help="on squared weights")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts that are held out")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train and print the figures."""
    from memspec_core.evaluation.ranking_report import table
    from memspec_core.training.predictor import PredictorTraining, train_predictor

    plan = PredictorTraining(
        trace=arguments.trace,
        folder=arguments.out,
        target=arguments.target,
        inputs=arguments.inputs,
        encoder=arguments.encoder,
        labels=arguments.labels,
        drafts=arguments.drafts,
        interval=arguments.interval,
        length=arguments.length,
        penalty=arguments.penalty,
        seed=arguments.seed,
        evaluations=tuple(arguments.eval),
    )
    with Progress() as progress:
        figures = train_predictor(plan, progress.show)
    print(json.dumps(figures) if arguments.json else table(figures))
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value
