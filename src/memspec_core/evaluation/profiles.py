"""Hardware profiles of the simulator: what passes, steps and loads cost on a machine.

A profile is a JSON file: `name`, `description`, and `numbers`, each with its `value` and its
`source`, which says where it was measured or published, or that it is an assumption and why.
`drafts`, which may be left out, has such numbers by draft, for those that are not like the others.
The project brings some along; any other file of that form does as well.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memspec_core.errors import ProfileError
from memspec_core.files import whole_file

FOLDER = Path(__file__).parent / "profiles"

_RANGES: Mapping[str, tuple[float, float]] = {
    "memory_bytes_per_second": (1e8, 1e14),
    "storage_bytes_per_second": (1e5, 1e12),
    "draft_bytes": (1e4, 1e12),
    "verify_seconds": (1e-6, 100.0),
    "draft_step_seconds": (0.0, 10.0),
    "catch_up_seconds": (0.0, 10.0),
    "prompt_seconds": (0.0, 10.0),
    "prediction_seconds": (0.0, 10.0),
    "load_slowdown": (1.0, 10.0),
    "load_stretch": (0.1, 10.0),
    "load_deviation": (0.0, 2.0),
}
"""The numbers of a profile, each with what it can be at the least and at the most."""

_OF_A_DRAFT = ("draft_bytes", "draft_step_seconds", "catch_up_seconds")
"""Those that a draft can have of its own."""


@dataclass(frozen=True)
class Profile:
    """What a machine takes, in seconds: `verify_seconds[n - 1]` for the target's pass of n rows.

    `draft_step_seconds` for each proposal, `catch_up_seconds` and `prompt_seconds` for each token
    of the context that a draft, or the target, reads ahead; `prediction_seconds` for each ranking
    by a predictor. A draft has `draft_bytes`, which load at `storage_bytes_per_second`; while one
    loads, decoding takes `load_slowdown` times as long, and a load beside decoding `load_stretch`
    times as long as one that is waited for. Loads vary: `load_deviation` is the standard deviation
    of the logarithm of what they take. `drafts`: by name, the numbers of those
    that are not like the others.
    """

    name: str
    description: str
    memory_bytes_per_second: float
    storage_bytes_per_second: float
    draft_bytes: float
    verify_seconds: tuple[float, ...]
    draft_step_seconds: float
    catch_up_seconds: float
    prompt_seconds: float
    prediction_seconds: float
    load_slowdown: float
    load_stretch: float = 1.0
    load_deviation: float = 0.0
    drafts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, draft: str) -> "Profile":
        """Return the profile with a draft's own numbers in the place of the usual ones."""
        own: Mapping[str, Any] = self.drafts.get(draft, {})
        return replace(self, **own) if own else self

    @property
    def load_seconds(self) -> float:
        """Seconds from a draft's being asked for to its being resident, where nothing else runs."""
        return self.draft_bytes / self.storage_bytes_per_second

    @property
    def background_load_seconds(self) -> float:
        """The same beside decoding."""
        return self.load_seconds * self.load_stretch

    def iteration_seconds(self, length: int) -> float:
        """Return what an iteration of `length` proposals takes; raises `ProfileError`."""
        if length >= len(self.verify_seconds):
            raise ProfileError(
                f"The profile {self.name} knows passes of up to {len(self.verify_seconds)} rows "
                f"(verify_seconds); draft_length is {length}, which needs one of {length + 1}."
            )
        return length * self.draft_step_seconds + self.verify_seconds[length]


def profile_names() -> tuple[str, ...]:
    """Return the names of the profiles that the project brings along."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_profile(name: str) -> Profile:
    """Return the profile of a name, or in a file; raises `ProfileError` naming what is wrong."""
    path = FOLDER / f"{name}.json" if name in profile_names() else Path(name)
    if not path.is_file():
        raise ProfileError(
            f"There is no profile '{name}': it is neither a file nor one of "
            f"{', '.join(profile_names())}."
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"The profile {path} cannot be read: {error}.") from error
    return parse_profile(fields, str(path))


def parse_profile(fields: object, origin: str) -> Profile:
    """Return a profile from its JSON; raises `ProfileError` naming the field that is wrong."""
    whole = _mapping(fields, origin, "the file")
    texts: dict[str, Any] = {name: _text(whole, name, origin) for name in ("name", "description")}
    numbers = _mapping(whole.get("numbers"), origin, "numbers")
    for name in numbers:
        if name not in _RANGES:
            raise ProfileError(f"The profile {origin} has an unknown number '{name}'.")
    values: dict[str, Any] = {name: _value(numbers, name, origin) for name in _RANGES}
    drafts = _mapping(whole.get("drafts", {}), origin, "drafts")
    own = {draft: _own_numbers(found, f"{origin}, {draft}") for draft, found in drafts.items()}
    return Profile(**texts, **values, drafts=own)


def write_profile(profile: Profile, sources: Mapping[str, str], path: Path) -> None:
    """Write a profile's file, whole or not at all, with the source of each number.

    `sources`: by number, and one named `drafts` for those that drafts have of their own.
    """
    numbers = {name: {"value": getattr(profile, name), "source": sources[name]} for name in _RANGES}
    drafts = {
        draft: {name: {"value": value, "source": sources["drafts"]} for name, value in own.items()}
        for draft, own in profile.drafts.items()
    }
    fields = {
        "name": profile.name,
        "description": profile.description,
        "numbers": numbers,
        "drafts": drafts,
    }
    with whole_file(path) as file:
        file.write(json.dumps(fields, indent=2).encode() + b"\n")


def _own_numbers(found: object, origin: str) -> Mapping[str, float]:
    numbers = _mapping(found, origin, "the draft's numbers")
    for name in numbers:
        if name not in _OF_A_DRAFT:
            raise ProfileError(
                f"The profile {origin} has the number '{name}'; a draft can have "
                f"{', '.join(_OF_A_DRAFT)} of its own."
            )
    own: dict[str, Any] = {name: _value(numbers, name, origin) for name in numbers}
    return own


def _mapping(value: object, origin: str, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"The profile {origin}: {what} is no JSON object.")
    return value


def _text(fields: Mapping[str, Any], name: str, origin: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ProfileError(f"The profile {origin}: {name} is missing; a text is needed.")
    return value


def _value(numbers: Mapping[str, Any], name: str, origin: str) -> float | tuple[float, ...]:
    if name not in numbers:
        raise ProfileError(f"The profile {origin}: {name} is missing.")
    number = _mapping(numbers[name], origin, name)
    _text(number, "source", f"{origin}, {name}")
    value = number.get("value")
    if name != "verify_seconds":
        return _in_range(value, name, origin)
    if not isinstance(value, list) or len(value) < 2:
        raise ProfileError(
            f"The profile {origin}: {name} is {value!r}; a list is needed, of the seconds of "
            "passes of 1, 2, 3 and more rows."
        )
    seconds = tuple(_in_range(one, name, origin) for one in value)
    if list(seconds) != sorted(seconds):
        raise ProfileError(f"The profile {origin}: {name} falls; more rows cannot take less time.")
    return seconds


def _in_range(value: object, name: str, origin: str) -> float:
    least, most = _RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= float(value) <= most:  # type: ignore[arg-type]
        raise ProfileError(
            f"The profile {origin}: {name} is {value!r}; a number from {least:g} to {most:g} is "
            "needed."
        )
    return float(value)  # type: ignore[arg-type]
