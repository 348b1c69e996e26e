"""`memspec tune`: the parameters that suit a robot's prompts and machine."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memspec_core.cli.arguments import Subparsers, add_profile, names, numbers, positive
from memspec_core.cli.progress import Progress
from memspec_core.settings import MIB, read_parameters

if TYPE_CHECKING:
    from memspec_core.evaluation.tuning import Tuned
    from memspec_core.measurement.trace import Trace
    from memspec_core.prediction.head import RankingHead


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "tune",
        help="find parameters for a robot",
        description="Find K, N, T, the draft length and the drafts that are worth their bytes: "
        "simulate them over a trace of the robot's prompts with a hardware profile, choosing on "
        "half of the prompts and judging on the others. From a record of decisions it finds K and "
        "the drafts alone. Lists are separated by commas.",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="TRACE|RECORD.jsonl",
        help="a folder that memspec trace wrote, or what decisions.path recorded",
    )
    add_profile(parser)
    parser.add_argument(
        "--config", type=Path, metavar="PARAMS.yaml", help="parameters as they are, as for the node"
    )
    parser.add_argument(
        "--predictor", type=Path, help="folder of a trained predictor, instead of the default one"
    )
    parser.add_argument("--drafts", type=names, default=(), help="to choose from (default: all)")
    parser.add_argument(
        "--budget-mib", type=positive, default=0, metavar="MIB", help="memory for drafts"
    )
    parser.add_argument("-K", "--capacities", type=numbers, default=(1, 2, 3, 4), metavar="K")
    parser.add_argument("-N", "--intervals", type=numbers, default=(2, 4, 8, 16), metavar="N")
    parser.add_argument("-T", "--recents", type=numbers, default=(), metavar="T")
    parser.add_argument("--lengths", type=numbers, default=(), metavar="GAMMA")
    parser.add_argument("--prompts", type=positive, default=40, help="of each domain, at the most")
    parser.add_argument("--seed", type=int, default=0, help="of how prompts are split")
    parser.add_argument("--jobs", type=positive, default=os.cpu_count(), help="processes")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="TUNED.yaml", help="write parameters for the node"
    )
    parser.add_argument("--force", action="store_true", help="replace the output")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Tune, print, and write the parameters."""
    from memspec_core.evaluation.tuning_report import write_parameters
    from memspec_core.files import check_output

    if arguments.output is not None:
        check_output(arguments.output, may_replace=arguments.force)
    configured = read_parameters(arguments.config) if arguments.config else {}
    of_trace = arguments.source.is_dir() or not arguments.source.exists()
    chosen = _from_trace(arguments, configured) if of_trace else _from_record(arguments)
    if arguments.output is not None:
        write_parameters({**configured, **chosen}, arguments.output)
    return 0


def _from_record(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print what a record says; return the parameters to change."""
    from memspec_core.evaluation.demand import read_demand
    from memspec_core.evaluation.tuning_report import demand_table

    demand = read_demand(arguments.source)
    chosen = {"resident_capacity": demand.capacity, "drafts.names": list(demand.worthwhile)}
    found = {"demand": asdict(demand), "parameters": chosen}
    print(json.dumps(found) if arguments.json else demand_table(demand))
    return chosen


def _from_trace(arguments: argparse.Namespace, configured: dict[str, Any]) -> dict[str, Any]:
    """Print what simulations say; return the parameters to change, none for the worse."""
    from memspec_core.evaluation.profiles import load_profile
    from memspec_core.evaluation.reduction import read_trace_and_head
    from memspec_core.evaluation.tuning_report import as_json, table

    profile = load_profile(arguments.profile)
    trace, head = read_trace_and_head(arguments.source, arguments.predictor)
    head = head or _brought_along(trace)
    tuned = _tuned(arguments, configured, trace.first(arguments.prompts), head)
    print(json.dumps(as_json(tuned)) if arguments.json else table(tuned, profile))
    return {} if tuned.is_slower else dict(tuned.parameters)


def _tuned(
    arguments: argparse.Namespace,
    configured: dict[str, Any],
    trace: "Trace",
    head: "RankingHead | None",
) -> "Tuned":
    from memspec_core.evaluation.foretold import NearMisses
    from memspec_core.evaluation.profiles import load_profile
    from memspec_core.evaluation.simulator import SimulationPlan
    from memspec_core.evaluation.tuning import Space, Tuning, tune
    from memspec_core.request import LOOKUP
    from memspec_core.settings import Settings

    parameters = {name: value for name, value in configured.items() if "drafts." not in name}
    settings = Settings.from_parameters(parameters)
    plan = SimulationPlan(
        profile=load_profile(arguments.profile),
        parameters={**parameters, "lookup": settings.lookup and LOOKUP in trace.drafts},
        head=head,
        recall=None if head else NearMisses(),
        budget_bytes=arguments.budget_mib * MIB,
        drafts=arguments.drafts,
    )
    space = Space(arguments.capacities, arguments.intervals, arguments.lengths, arguments.recents)
    with Progress() as progress:
        return tune(
            Tuning(
                trace,
                plan,
                settings.strategy,
                space,
                arguments.jobs,
                arguments.seed,
                progress.show,
            )
        )


def _brought_along(trace: "Trace") -> "RankingHead | None":
    """Return the predictor that comes along, None where the trace has no states to read."""
    from memspec_core.models.places import PREDICTOR, brought_along
    from memspec_core.prediction.head import load_head

    found = brought_along(PREDICTOR)
    if found is None or not trace.header.states:
        return None
    return load_head(found, trace.header.target_sha256)
