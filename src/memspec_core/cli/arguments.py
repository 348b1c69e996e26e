"""What the commands share in parsing their arguments."""

import argparse
from typing import Any, TypeAlias

Subparsers: TypeAlias = Any
"""argparse has no public name for what `add_subparsers` returns."""


def numbers(text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas."""
    return tuple(int(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas, with or without spaces."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the hardware profile of a simulated board."""
    parser.add_argument(
        "--profile",
        default="orin_nano",
        metavar="P",
        help="orin_nano (default), orin_nano_super, agx_orin, two_cores, or a JSON file",
    )


def positive(text: str) -> int:
    """Parse a whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a whole number above 0")
    return value
