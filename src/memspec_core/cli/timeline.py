"""`memspec timeline`: a picture or a page of one recorded generation."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memspec_core.cli.arguments import Subparsers, positive
from memspec_core.errors import OutputError, RecordError
from memspec_core.files import check_output, whole_file

if TYPE_CHECKING:
    from memspec_core.measurement.record import RecordedGeneration

_PAGE = ".html"
_PICTURES = (".png", ".svg")
_PROMPT_LETTERS = 60


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "timeline",
        help="draw which draft ran when",
        description="Draw one generation of a record: which draft ran and which was wanted, what "
        "was in memory and what was loading, the tokens of each iteration, and the text. memspec "
        "generate --record, memspec simulate --record and the parameter record.path write one.",
    )
    parser.add_argument("record", type=Path, metavar="RECORD", help="a record of generations")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help=f"what to write: a picture ({', '.join(_PICTURES)}) or a page ({_PAGE})",
    )
    parser.add_argument(
        "--generation", type=positive, metavar="N", help="which of them, from 1; the last if none"
    )
    parser.add_argument(
        "--axis", choices=("tokens", "seconds"), default="tokens", help="what it is drawn along"
    )
    parser.add_argument("--list", action="store_true", help="list the generations instead")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw, or list."""
    from memspec_core.measurement.record import read_record

    if not arguments.list:
        _check(arguments.out, arguments.force)
    generations = read_record(arguments.record)
    if arguments.list:
        print(_listed(generations))
    else:
        _draw(_chosen(arguments, generations), arguments.axis, arguments.out)
    return 0


def _check(out: Path | None, force: bool) -> None:
    if out is None:
        raise OutputError("Say what to write, as in -o out.png, or list the generations: --list.")
    if out.suffix not in (_PAGE, *_PICTURES):
        known = ", ".join((*_PICTURES, _PAGE))
        raise OutputError(f"{out} has none of the endings {known}, which say what to write.")
    check_output(out, may_replace=force)


def _chosen(
    arguments: argparse.Namespace, generations: Sequence["RecordedGeneration"]
) -> "RecordedGeneration":
    number = arguments.generation or len(generations)
    if number > len(generations):
        raise RecordError(
            f"There is no generation {number} in {arguments.record}: it has {len(generations)}; "
            "see --list."
        )
    return generations[number - 1]


def _draw(generation: "RecordedGeneration", axis: str, out: Path) -> None:
    from memspec_core.evaluation.timeline import timeline
    from memspec_core.evaluation.timeline_figure import draw
    from memspec_core.evaluation.timeline_page import page

    laid_out = timeline(generation, axis)
    with whole_file(out) as file:
        if out.suffix == _PAGE:
            file.write(page(laid_out).encode())
        else:
            draw(laid_out, file, out.suffix.removeprefix("."))


def _listed(generations: Sequence["RecordedGeneration"]) -> str:
    from memspec_core.evaluation.tables import aligned

    rows = [("", "strategy", "tokens", "iterations", "ended by", "prompt")]
    for number, generation in enumerate(generations, 1):
        ran = [recorded.iteration for recorded in generation.iterations if recorded.iteration.ran]
        reason, beginning = generation.finish_reason, generation.beginning
        rows.append(
            (
                str(number),
                beginning.strategy,
                str(ran[-1].generated_tokens if ran else 0),
                str(len(ran)),
                reason.name.lower() if reason else "-",
                " ".join(beginning.prompt.split())[:_PROMPT_LETTERS],
            )
        )
    return "\n".join(aligned(rows))
