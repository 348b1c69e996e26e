"""`memspec distill`: make a draft for a target from prompts."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from memspec_core.cli.arguments import Subparsers, positive


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "distill",
        help="make a draft for a target",
        description="Make a draft: have the target continue prompts, then train a small model "
        "on that text. A run that was cut goes on where it stopped.",
    )
    parser.add_argument("name", help="the draft's name")
    parser.add_argument("--target", default="default", help="checkpoint of the target")
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE.jsonl", help="a `prompt` a line"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the draft to")
    parser.add_argument("--work", type=Path, required=True, help="folder for text and checkpoints")
    parser.add_argument(
        "--layers", type=_numbers, default=(0, 1, 2, -1), help="of the target; -1: the last"
    )
    parser.add_argument("--head-tokens", type=positive, default=16384)
    parser.add_argument(
        "--temperatures", type=_temperatures, default=(0.0, 0.8), help="one pass of text for each"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=192)
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the draft."""
    from memspec_core.models.checkpoint import open_checkpoint
    from memspec_core.training.distil import DistilPlan, distil
    from memspec_core.training.fitting import FitPlan

    count = open_checkpoint(arguments.target).config.layers
    plan = DistilPlan(
        name=arguments.name,
        target=arguments.target,
        prompt_file=arguments.prompts,
        work_folder=arguments.work,
        output_folder=arguments.out,
        layers=tuple(index + count if index < 0 else index for index in arguments.layers),
        head_tokens=arguments.head_tokens,
        temperatures=arguments.temperatures,
        max_new_tokens=arguments.max_new_tokens,
        fit=FitPlan(
            arguments.epochs, arguments.batch_size, arguments.learning_rate, arguments.seed
        ),
    )
    manifest, fit = distil(plan, _show_progress)
    if arguments.json:
        print(json.dumps({"path": str(plan.output_folder), "manifest": asdict(manifest)}))
    else:
        print(
            f"{plan.output_folder}: {manifest.kind}, {len(manifest.layers)} layers, "
            f"agreement {fit.agreement:.3f} on held-out text after {fit.steps} steps"
        )
    return 0


def _show_progress(what: str, done: int, total: int) -> None:
    print(f"{what}: {done} of {total} parts", file=sys.stderr, flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
