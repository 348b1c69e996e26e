"""`memspec distill`: make a draft for a target from prompts."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from memspec_core.cli.arguments import Subparsers, numbers, positive
from memspec_core.cli.progress import Progress

_LAYERS = {"feature": (-1,), "independent": (0, 1, 2, -1)}


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
        "--prompts",
        type=Path,
        required=True,
        action="append",
        metavar="FILE.jsonl",
        help="a `prompt` a line; may be given several times",
    )
    parser.add_argument(
        "--skip-broken-lines", action="store_true", help="leave out lines that hold no prompt"
    )
    parser.add_argument(
        "--most-prompts", type=int, default=0, help="of each file; 0: all", metavar="N"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the draft to")
    parser.add_argument("--work", type=Path, required=True, help="folder for text and checkpoints")
    parser.add_argument(
        "--kind",
        choices=tuple(_LAYERS),
        default="feature",
        help="feature: reads the target's hidden states; independent: a small model of its own",
    )
    parser.add_argument(
        "--layers",
        type=numbers,
        help="of the target, to start from; -1: the last (feature: -1, independent: 0,1,2,-1)",
    )
    parser.add_argument(
        "--base", default="", metavar="NAME", help="start from this draft of the same work folder"
    )
    parser.add_argument("--steps", type=positive, default=3, help="proposals in training")
    parser.add_argument("--head-tokens", type=positive, default=12288)
    parser.add_argument(
        "--temperatures", type=_temperatures, default=(0.0,), help="one pass of text for each"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=192)
    parser.add_argument(
        "--loss",
        choices=("distribution", "tokens"),
        default="distribution",
        help="towards the target's distribution over its top tokens, or its best token alone",
    )
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the draft."""
    from accelerate import PartialState

    from memspec_core.models.checkpoint import open_checkpoint
    from memspec_core.training.distil import DistilPlan, distil
    from memspec_core.training.fitting import FitPlan

    count = open_checkpoint(arguments.target).config.layers
    layers = arguments.layers or _LAYERS[arguments.kind]
    plan = DistilPlan(
        name=arguments.name,
        target=arguments.target,
        prompt_files=tuple(arguments.prompts),
        work_folder=arguments.work,
        output_folder=arguments.out,
        layers=tuple(index + count if index < 0 else index for index in layers),
        kind=arguments.kind,
        steps=arguments.steps,
        base=arguments.base,
        head_tokens=arguments.head_tokens,
        temperatures=arguments.temperatures,
        max_new_tokens=arguments.max_new_tokens,
        most_prompts=arguments.most_prompts,
        skip_broken_lines=arguments.skip_broken_lines,
        fit=FitPlan(
            arguments.epochs,
            arguments.batch_size,
            arguments.learning_rate,
            arguments.seed,
            arguments.loss,
        ),
    )
    with Progress() as progress:
        manifest, fit = distil(plan, progress.show)
    if not PartialState().is_main_process:
        return 0
    if arguments.json:
        print(json.dumps({"path": str(plan.output_folder), "manifest": asdict(manifest)}))
    else:
        print(
            f"{plan.output_folder}: {manifest.kind}, {len(manifest.layers)} layers, "
            f"{fit.accepted:.3f} accepted on held-out text after {fit.steps} steps"
        )
    return 0


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
