"""`memspec compare`: strategies on the same prompts and drafts, in real runs."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memspec_core.cli.arguments import Subparsers, names, positive
from memspec_core.cli.progress import Progress
from memspec_core.settings import STRATEGY_NAMES, read_parameters

if TYPE_CHECKING:
    from memspec_core.evaluation.comparison import ComparisonPlan


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "compare",
        help="compare strategies by real runs",
        description="Answer the same prompts with each strategy, from the same beginning each time "
        "(no draft resident, files not in the page cache), and say where the time went.",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="PROMPTS.jsonl", help="a `prompt` a line"
    )
    parser.add_argument(
        "--config", type=Path, metavar="PARAMS.yaml", help="parameters, as for the node"
    )
    parser.add_argument(
        "--strategies",
        type=names,
        default=STRATEGY_NAMES,
        help=f"of {', '.join(STRATEGY_NAMES)}; oracle_static and oracle_dynamic, which need a "
        "trace; static:NAME for one draft alone",
    )
    parser.add_argument(
        "--form",
        choices=("configured", "paper"),
        default="configured",
        help="paper: three proposals, no lookup, no correction by what is seen, no costs",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FOLDER", help="of the same prompts and drafts, for oracles"
    )
    parser.add_argument(
        "--prompts", type=positive, metavar="N", help="prompts of each file, evenly spread"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N")
    parser.add_argument("--repeats", type=positive, default=1, metavar="R")
    parser.add_argument(
        "--warm", action="store_true", help="leave the files in the page cache between answers"
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help="simulate every other answer as well, on the machine as the rest of them measures it, "
        "and show both side by side; needs --trace and a fixed draft length",
    )
    parser.add_argument(
        "--write-profile",
        type=Path,
        metavar="PROFILE.json",
        help="write the machine as it was measured, for memspec simulate",
    )
    parser.add_argument("--force", action="store_true", help="replace the profile's file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare and print."""
    from memspec_core.evaluation.comparison import PAPER_FORM, ComparisonPlan, compare
    from memspec_core.evaluation.comparison_report import as_json, full_report, table
    from memspec_core.evaluation.measured import MachineObserver
    from memspec_core.evaluation.profiles import write_profile
    from memspec_core.files import check_output
    from memspec_core.training.prompts import read_prompt_sets

    written = arguments.write_profile
    if written is not None:
        check_output(written, may_replace=arguments.force)
    parameters = read_parameters(arguments.config) if arguments.config else {}
    form = PAPER_FORM if arguments.form == "paper" else {}
    plan = ComparisonPlan(
        parameters={**parameters, **form},
        prompt_sets=read_prompt_sets(arguments.files, arguments.prompts),
        strategies=arguments.strategies,
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        cold=not arguments.warm,
        trace=arguments.trace,
    )
    if arguments.validate:
        return _validate(plan, arguments)
    observer = None if written is None else MachineObserver(plan.settings())
    with Progress() as progress:
        runs = compare(plan, progress.show, observer)
    if observer is not None:
        write_profile(observer.profile(written.stem), observer.sources(), written)
    print(json.dumps(full_report(plan, runs)) if arguments.json else table(as_json(runs)))
    return 0


def _validate(plan: "ComparisonPlan", arguments: argparse.Namespace) -> int:
    """Compare, simulate the same, and print both."""
    from memspec_core.evaluation.machine import describe_machine
    from memspec_core.evaluation.profiles import write_profile
    from memspec_core.evaluation.validation import table, validate

    with Progress() as progress:
        validation = validate(plan, progress.show)
    if arguments.write_profile is not None:
        profile = replace(validation.profile, name=arguments.write_profile.stem)
        write_profile(profile, validation.sources, arguments.write_profile)
    if arguments.json:
        settings = asdict(plan.settings())
        report = {"machine": describe_machine(), "settings": settings}
        print(json.dumps(report | validation.to_json(), indent=1))
    else:
        print(table(validation))
    return 0
