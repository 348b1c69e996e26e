"""What the commands share in parsing their arguments."""

import argparse
from pathlib import Path
from typing import Any, TypeAlias

from memspec_core.errors import SchemaError
from memspec_core.request import MAX_SCHEMA_BYTES

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


def read_schema(path: Path | None) -> str:
    """Return the JSON schema in a file, nothing where there is no file; raises `SchemaError`."""
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            return file.read(MAX_SCHEMA_BYTES + 4).decode()
    except OSError as error:
        raise SchemaError(f"The schema {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SchemaError(f"The schema {path} is not UTF-8.") from error
