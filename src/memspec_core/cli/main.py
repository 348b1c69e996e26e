"""Entry point of `memspec`: parses, dispatches, and turns errors into one clear line."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from memspec_core.errors import MemSpecError

WRONG_INPUT = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 2 with one line on stderr for wrong input, 130 after Ctrl-C."""
    # Nothing here may reach for a model hub, and torch and transformers print at import.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    parser = _parser()
    chosen = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if chosen.verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        return int(chosen.run(chosen))
    except MemSpecError as error:
        print(f"memspec: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left; there is nobody to tell.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
        return 0


def _parser() -> argparse.ArgumentParser:
    from memspec_core.cli import (
        bench,
        compare,
        distill,
        doctor,
        generate,
        inspect,
        paraphrase,
        reduce_trace,
        reproduce,
        simulate,
        timeline,
        trace,
        train_predictor,
        tune,
    )

    parser = argparse.ArgumentParser(
        prog="memspec", description="Speculative decoding with drafts that memory has room for."
    )
    parser.add_argument("--verbose", action="store_true", help="log what happens to stderr")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (
        generate,
        inspect,
        doctor,
        distill,
        trace,
        train_predictor,
        reduce_trace,
        paraphrase,
        bench,
        compare,
        simulate,
        reproduce,
        timeline,
        tune,
    ):
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
