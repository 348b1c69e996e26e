"""Prompt files: one JSON object a line with a `prompt`, and optionally `source` and `license`."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from memspec_core.errors import PromptFileError


@dataclass(frozen=True)
class Prompt:
    """One prompt and where it comes from."""

    text: str
    source: str = "unknown"
    license: str = "unknown"


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a JSONL file in their order, each text once.

    Raises `PromptFileError`, which names the file and the line, for a file that cannot be read
    and for a line that is not a JSON object with a non-empty string `prompt`.
    """
    try:
        # Not `str.splitlines()`: prompts may hold U+2028, which is no end of line in JSONL.
        with path.open(encoding="utf-8") as lines:
            prompts = [
                _parse(line, f"{path}, line {number}")
                for number, line in enumerate(lines, start=1)
                if line.strip()
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"Cannot read the prompt file {path}: {error}.") from error
    if not prompts:
        raise PromptFileError(f"The prompt file {path} holds no prompts.")
    unique: dict[str, Prompt] = {}
    for prompt in prompts:
        unique.setdefault(prompt.text, prompt)
    return list(unique.values())


def sha256_of_prompts(prompts: list[Prompt]) -> str:
    """Hash the texts of the prompts in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt.text).encode())
    return digest.hexdigest()


def _parse(line: str, where: str) -> Prompt:
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
