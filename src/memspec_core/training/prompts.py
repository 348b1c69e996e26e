"""Prompt files: one JSON object a line with a `prompt`, and optionally `source` and `license`."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from memspec_core.errors import PromptFileError

_LOG = logging.getLogger(__name__)

Item = TypeVar("Item")


@dataclass(frozen=True)
class Prompt:
    """One prompt and where it comes from."""

    text: str
    source: str = "unknown"
    license: str = "unknown"


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file, usually of one domain."""

    name: str
    texts: tuple[str, ...]


def read_prompts(path: Path, *, skip_broken: bool = False) -> list[Prompt]:
    """Read the prompts of a JSONL file in their order, each text once.

    Raises `PromptFileError`, which names the file and the line, for a file that cannot be read
    and, unless these are to be skipped, which is logged, for a line that is not a JSON object
    with a non-empty string `prompt`.
    """
    try:
        # Not `str.splitlines()`: prompts may hold U+2028, which is no end of line in JSONL.
        with path.open(encoding="utf-8") as lines:
            found = [
                _parse(line, f"{path}, line {number}", skip_broken=skip_broken)
                for number, line in enumerate(lines, start=1)
                if line.strip()
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"Cannot read the prompt file {path}: {error}.") from error
    prompts = [prompt for prompt in found if prompt is not None]
    if not prompts:
        raise PromptFileError(f"The prompt file {path} holds no prompts.")
    unique: dict[str, Prompt] = {}
    for prompt in prompts:
        unique.setdefault(prompt.text, prompt)
    return list(unique.values())


def read_prompt_sets(files: Sequence[Path], count: int | None) -> tuple[PromptSet, ...]:
    """Read prompt files, `count` prompts of each at even distances; raises `PromptFileError`."""
    files = list(dict.fromkeys(files))
    names = short_names(files)
    sets = []
    for name, file in zip(names, files, strict=True):
        texts = [prompt.text for prompt in read_prompts(file)]
        sets.append(PromptSet(name, tuple(evenly_spread(texts, count))))
    return tuple(sets)


def evenly_spread(items: Sequence[Item], count: int | None) -> list[Item]:
    """Return `count` of some items at even distances, or all where there are no more."""
    taken = min(count or len(items), len(items))
    return [items[index * len(items) // taken] for index in range(taken)]


def sha256_of_prompts(prompts: list[Prompt]) -> str:
    """Hash the texts of the prompts in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt.text).encode())
    return digest.hexdigest()


def short_names(files: Sequence[Path]) -> list[str]:
    """Name files by as many of their last parts as it takes to tell them apart."""
    parts = [file.with_suffix("").parts for file in files]
    depth = 1
    while len({part[-depth:] for part in parts}) < len({*parts}):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _parse(line: str, where: str, *, skip_broken: bool) -> Prompt | None:
    try:
        return _prompt(line, where)
    except PromptFileError as error:
        if not skip_broken:
            raise
        _LOG.warning("Left out: %s", error)
        return None


def _prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptFileError(f"{where}: not JSON ({error.msg}).") from error
    if not isinstance(record, dict):
        raise PromptFileError(f"{where}: a JSON object is needed, with the key `prompt`.")
    text = record.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise PromptFileError(f"{where}: `prompt` must be a string that is not empty.")
    return Prompt(text, str(record.get("source", "unknown")), str(record.get("license", "unknown")))
