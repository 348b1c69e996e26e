"""The command `generate`: sends a prompt to the node and streams the answer to the terminal."""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from memspec_core.cli.arguments import read_schema
from memspec_core.errors import RequestError
from memspec_core.request import ChatMessage, GenerationRequest, SamplingSettings
from memspec_ros.arguments import EXIT_USAGE, parsed, start_ros

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

EPILOG = """\
The answer goes to standard output, a summary of what the drafts did to standard error.
Ctrl-C cancels the goal. Exit code: 0 the answer is whole; 1 the goal was aborted or rejected, or
there is no node; 2 wrong input; 130 cancelled. After --ros-args, arguments of ROS.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    options, given = parsed(_parser(), arguments)
    try:
        request = request_from_options(options)
    except RequestError as error:
        print(f"generate: {error}", file=sys.stderr)
        return EXIT_USAGE
    return _run(options, given, request, interrupted)


def request_from_options(options: argparse.Namespace) -> GenerationRequest:
    """Return what the options ask for, checked; raise `RequestError`."""
    request = GenerationRequest(
        prompt=options.prompt,
        raw=options.raw,
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingSettings(options.temperature, options.top_p, options.top_k, options.seed),
        stop=tuple(options.stop),
        draft=options.draft,
        time_limit_seconds=options.time_limit,
        priority=options.priority,
        json_schema=read_schema(options.json_schema),
    )
    checked = request.validated((options.draft,) if options.draft else ())
    if not options.system:
        return request
    if options.raw:
        raise RequestError("--system needs the chat template; leave --raw out.")
    return GenerationRequest(
        messages=(ChatMessage("system", options.system), *checked.messages),
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        stop=request.stop,
        draft=request.draft,
        time_limit_seconds=request.time_limit_seconds,
        priority=request.priority,
        json_schema=request.json_schema,
    )


def _run(
    options: argparse.Namespace,
    given: list[str],
    request: GenerationRequest,
    interrupted: threading.Event,
) -> int:
    # ROS is slow to import; wrong input is told without it.
    import rclpy

    from memspec_ros.client import ClientError, NodeClient
    from memspec_ros.conversions import goal_from_request
    from memspec_ros.summary import one_line

    start_ros("generate", given)
    try:
        client = NodeClient(f"/{options.node.strip('/')}", interrupted)
        try:
            client.wait_for_action(options.wait)
            outcome = client.generate(goal_from_request(request), _write)
        finally:
            client.close()
    except ClientError as error:
        print(f"generate: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED if interrupted.is_set() else EXIT_FAILED
    finally:
        rclpy.try_shutdown()
    print()
    print(one_line(outcome.result.stats, outcome.result.finish_reason), file=sys.stderr)
    if outcome.aborted:
        print(f"generate: the goal was aborted: {outcome.result.error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_INTERRUPTED if outcome.cancelled else EXIT_OK


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="generate",
        description="Send a prompt to the node memspec and stream its answer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prompt", help="what to answer")
    add("--node", default="/memspec", help="name of the node, with its namespace (%(default)s)")
    add("--system", default="", help="system message before the prompt")
    add("--raw", action="store_true", help="continue the prompt as it is, without chat template")
    add("--max-new-tokens", type=int, default=0, metavar="N", help="0: the node's default")
    add("--temperature", type=float, default=0.0, metavar="X", help="0: greedy (default)")
    add("--top-p", type=float, default=0.0, metavar="X", help="0: off (default)")
    add("--top-k", type=int, default=0, metavar="N", help="0: off (default)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeat")
    add("--draft", default="", metavar="NAME", help="a draft's name, or none; default: adaptive")
    add("--time-limit", type=float, default=0.0, metavar="S", help="seconds; 0: none (default)")
    add("--priority", type=int, default=0, metavar="N", help="the highest runs first (default 0)")
    add("--wait", type=float, default=10.0, metavar="S", help="wait so long for the node (10)")
    add("--json-schema", type=Path, metavar="FILE", help="answer with JSON that is valid for it")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
