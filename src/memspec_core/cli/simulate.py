"""`memspec simulate`: strategies on a simulated machine, over traced answers."""

import argparse
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

from memspec_core.cli.arguments import Subparsers, add_profile, names, numbers, positive
from memspec_core.cli.progress import Progress
from memspec_core.settings import DEFAULT, read_parameters

PAPER_LIKE = "paper-like"


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "simulate",
        help="simulate strategies on a robot's board",
        description="Answer traced prompts with each strategy on a simulated machine: the "
        "runtime's own loop, with times from a hardware profile and tokens from the trace. Lists "
        "are separated by commas; all combinations of K, N and draft lengths are simulated.",
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help=f"a folder that memspec trace wrote, or '{PAPER_LIKE}' for a generated trace with "
        "the paper's contrasts, in the paper's form (no correction by what is seen, no costs)",
    )
    add_profile(parser)
    parser.add_argument(
        "--strategies",
        type=names,
        help="of the node's, oracle_static and oracle_dynamic; static:NAME for one draft alone; "
        "all by default",
    )
    parser.add_argument("-K", "--capacities", type=numbers, default=(2,), metavar="K")
    parser.add_argument("-N", "--intervals", type=numbers, default=(4,), metavar="N")
    parser.add_argument("--lengths", type=numbers, default=(4,), metavar="GAMMA")
    parser.add_argument(
        "--config", type=Path, metavar="PARAMS.yaml", help="other parameters, as for the node"
    )
    parser.add_argument("--predictor", type=Path, help="folder of a trained predictor")
    parser.add_argument(
        "--recall",
        type=_recall,
        metavar="TOP1,TOP2",
        help="instead of a predictor: how often the best draft is ranked first, and among the "
        f"first two; '{PAPER_LIKE}' has by default a predictor about as good as the paper's",
    )
    parser.add_argument("--prompts", type=positive, default=100, help="of each domain, at the most")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help=f"of '{PAPER_LIKE}'")
    parser.add_argument("--jobs", type=positive, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="append each answer, for memspec timeline"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate and print."""
    from memspec_core.evaluation.comparison import PAPER_FORM
    from memspec_core.evaluation.comparison_report import as_json, table
    from memspec_core.evaluation.foretold import Recall
    from memspec_core.evaluation.paperlike import PaperLike, paper_like_trace
    from memspec_core.evaluation.paperlike_head import paper_like_head
    from memspec_core.evaluation.profiles import load_profile
    from memspec_core.evaluation.reduction import read_trace_and_head
    from memspec_core.evaluation.simulation_record import SimulationRecord
    from memspec_core.evaluation.simulator import (
        SIMULATED_STRATEGIES,
        SimulationPlan,
        simulate,
    )

    profile = load_profile(arguments.profile)
    recall = Recall(*arguments.recall) if arguments.recall else None
    head = None
    if arguments.trace == PAPER_LIKE:
        tokens = arguments.max_new_tokens or PaperLike().tokens
        like = PaperLike(prompts=arguments.prompts, tokens=tokens, seed=arguments.seed)
        trace = paper_like_trace(like)
        head = None if recall else paper_like_head(like)
    else:
        trace, head = read_trace_and_head(Path(arguments.trace), arguments.predictor)
        trace = trace.first(arguments.prompts)
    given = read_parameters(arguments.config) if arguments.config else {}
    parameters = {name: value for name, value in given.items() if "drafts." not in name}
    if arguments.trace == PAPER_LIKE:
        parameters = {**PAPER_FORM, **parameters, "lookup": False}
    record = None
    if arguments.record is not None:
        target = str(parameters.get("target.path", DEFAULT))
        decode = _decoder(trace.header.target_sha256, target)
        record = SimulationRecord(arguments.record, decode)
    found = []
    for capacity, interval, length in product(
        arguments.capacities, arguments.intervals, arguments.lengths
    ):
        point = {
            "resident_capacity": capacity,
            "scheduling_interval": interval,
            "draft_length": length,
        }
        plan = SimulationPlan(
            profile=profile,
            strategies=arguments.strategies or SIMULATED_STRATEGIES,
            parameters={**parameters, **point},
            head=head,
            recall=recall,
            max_new_tokens=arguments.max_new_tokens or 0,
        )
        with Progress() as progress:
            runs = simulate(trace, plan, progress.show, arguments.jobs, record)
        found.append({**point, "figures": as_json(runs)})
    if arguments.json:
        print(json.dumps({"profile": vars(profile), "trace": arguments.trace, "points": found}))
        return 0
    for one in found:
        figures = one.pop("figures")
        print(", ".join(f"{name} {value}" for name, value in one.items()), end="\n\n")
        print(table(figures))
    return 0


def _decoder(target_sha256: str, path: str) -> Callable[[list[int]], str] | None:
    """Return what makes text of a trace's tokens, if the target at hand is the trace's."""
    from memspec_core.models.checkpoint import open_checkpoint
    from memspec_core.models.tokenizer import Tokenizer

    if not target_sha256:
        return None
    checkpoint = open_checkpoint(path)
    return Tokenizer.of(checkpoint).decode if checkpoint.sha256() == target_sha256 else None


def _recall(text: str) -> tuple[float, float]:
    top_one, top_two = map(float, text.split(","))
    return top_one, top_two
