"""The record of generations: what was asked, why which draft ran, and what each iteration did.

A file of JSON lines, of three kinds that `line` tells apart: a `generation` begins with the fields
of `Beginning`; then come, in the order in which they happened, a `decision` with those of
`Decision` at each scheduling point, and an `iteration` with those of `Iteration`, the moment of its
end and the drafts that were in memory then. A generation without a finish reason in its last
iteration was ended by an error, or its record by something else.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from memspec_core.errors import RecordError
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.measurement.decisions import Decision, digest_of_prompt, hash_of_context
from memspec_core.measurement.lines import line_writer
from memspec_core.request import FinishReason, GenerationRequest
from memspec_core.settings import Settings

FORMAT_VERSION = 1
PROMPT_CHARACTERS = 300
"""A record holds the prompt's beginning only."""

_GENERATION, _DECISION, _ITERATION = "generation", "decision", "iteration"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """What a generation began with.

    `prompt`: the beginning of what was asked, `prompt_sha256` the first 16 digits of its tokens'
    hash. `profile`: the hardware profile of a simulated generation, empty for a real one. K, N and
    what follows are the settings, of which some may change while it runs.
    """

    prompt: str
    prompt_sha256: str
    prompt_tokens: int
    profile: str
    drafts: tuple[str, ...]
    strategy: str
    resident_capacity: int
    scheduling_interval: int
    recent_tokens: int
    draft_length: int
    draft_shape: str
    lookup: bool
    observation: bool
    cost_aware: bool

    @classmethod
    def of(
        cls,
        prompt: str,
        prompt_ids: Sequence[int],
        strategy: str,
        settings: Settings,
        profile: str = "",
    ) -> "Beginning":
        """Tell a generation's beginning from what it is run with."""
        set_so = {f.name: vars(settings)[f.name] for f in fields(cls) if f.name in vars(settings)}
        told = {
            "prompt": prompt[:PROMPT_CHARACTERS],
            "prompt_sha256": hash_of_context(digest_of_prompt(prompt_ids), ()),
            "prompt_tokens": len(prompt_ids),
            "profile": profile,
            "drafts": settings.draft_names,
            "strategy": strategy,
        }
        return cls(**set_so | told)


@dataclass(frozen=True)
class RecordedIteration:
    """An iteration with its end on the runtime's clock, and the drafts in memory then."""

    at_seconds: float
    resident: tuple[str, ...]
    loading: tuple[str, ...]
    iteration: Iteration


@dataclass(frozen=True)
class RecordedGeneration:
    """One recorded generation; `events` in the order in which they happened."""

    beginning: Beginning
    events: tuple[Decision | RecordedIteration, ...]

    @property
    def iterations(self) -> tuple[RecordedIteration, ...]:
        """The iterations alone."""
        return tuple(event for event in self.events if isinstance(event, RecordedIteration))

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, None if the record does not say."""
        return self.iterations[-1].iteration.finish_reason if self.iterations else None


class RecordWriter:
    """Appends generations to a record, each line whole; one thread writes.

    Raises `SettingsError` if the file cannot be opened. A write that fails later ends the record
    and no answer.
    """

    def __init__(self, path: Path) -> None:
        self._write = line_writer(path, "Generations")

    def begin(self, beginning: Beginning) -> None:
        """Write that a generation begins; what follows belongs to it."""
        self._line(_GENERATION, {"version": FORMAT_VERSION} | asdict(beginning))

    def decision(self, decision: Decision) -> None:
        """Write a scheduling decision."""
        self._line(_DECISION, asdict(decision))

    def iteration(
        self,
        iteration: Iteration,
        at_seconds: float,
        resident: Collection[str],
        loading: Collection[str],
    ) -> None:
        """Write an iteration that ended just now."""
        reason = iteration.finish_reason
        self._line(
            _ITERATION,
            {"at_seconds": at_seconds, "resident": list(resident), "loading": list(loading)}
            | asdict(iteration)
            | {"finish_reason": reason.name if reason else None},
        )

    def _line(self, kind: str, values: Mapping[str, object]) -> None:
        self._write(json.dumps({"line": kind, **values}))


def prompt_of(request: GenerationRequest) -> str:
    """Return what was asked: the prompt, or the last message."""
    return request.messages[-1].content if request.messages else request.prompt


def read_record(path: Path) -> list[RecordedGeneration]:
    """Read a record; a line that was cut off is left out, with one warning for all of them.

    Raises `RecordError` if there is no record, or something else, with the number of the line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"Cannot read the record {path}: {error}.") from error
    found: list[tuple[Beginning, list[Decision | RecordedIteration]]] = []
    for number, event in _events(path, lines):
        if isinstance(event, Beginning):
            found.append((event, []))
        elif not found:
            raise _not_a_record(path, number, "it comes before any generation")
        elif _goes_on(found[-1][1], event):
            found[-1][1].append(event)
        else:
            raise _not_a_record(path, number, "it is earlier than the line before; did two write?")
    if not found:
        raise RecordError(f"The record {path} holds no generation; set record.path and generate.")
    return [RecordedGeneration(beginning, tuple(events)) for beginning, events in found]


def _events(
    path: Path, lines: Sequence[bytes]
) -> Iterator[tuple[int, Beginning | Decision | RecordedIteration]]:
    """Yield the lines with their numbers from 1, without those that were cut off."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    cut: list[int] = []
    for place, (number, line) in enumerate(numbered):
        try:
            values = json.loads(line)
        except ValueError:
            # Whoever goes on after a cut begins with a generation.
            following = numbered[place + 1][1] if place + 1 < len(numbered) else b""
            if number == 1 or (following and not _begins(following)):
                raise _not_a_record(path, number, "it is no JSON") from None
            cut.append(number)
            continue
        try:
            yield number, _parsed(values)
        except KeyError as error:
            raise _not_a_record(path, number, f"{error} is missing or unknown") from error
        except ValueError as error:
            raise _not_a_record(path, number, str(error)) from error
    if cut:
        where = ", ".join(map(str, cut))
        _LOG.warning("The record %s was cut off in line %s, which is left out", path, where)


def _begins(line: bytes) -> bool:
    try:
        values = json.loads(line)
    except ValueError:
        return False
    return isinstance(values, dict) and values.get("line") == _GENERATION


def _parsed(values: Any) -> Beginning | Decision | RecordedIteration:
    """Return what a line says; raises `ValueError` or `KeyError` if it is none."""
    if not isinstance(values, dict) or "line" not in values:
        if isinstance(values, dict) and set(values) == {f.name for f in fields(Decision)}:
            raise ValueError("it is a decision of decisions.path; a record comes of record.path")
        raise ValueError("it does not say which kind of line it is")
    kind = values.pop("line")
    if kind == _GENERATION:
        if (version := values.pop("version")) != FORMAT_VERSION:
            raise ValueError(f"it has format {version}; {FORMAT_VERSION} is supported")
        return _read(Beginning, values)
    if kind == _DECISION:
        return _read(Decision, values)
    if kind == _ITERATION:
        reason = values.pop("finish_reason")
        own = {name: values.pop(name) for name in ("at_seconds", "resident", "loading")}
        values["seconds"] = _read(IterationSeconds, values["seconds"])
        iteration = _read(Iteration, values | {"finish_reason": None})
        if reason is not None:
            iteration = replace(iteration, finish_reason=FinishReason[str(reason)])
        return _read(RecordedIteration, own | {"iteration": iteration})
    raise ValueError(f"'{kind}' is no kind of line")


_Kind = TypeVar("_Kind")


def _read(kind: Callable[..., _Kind], values: Any) -> _Kind:
    """Make a dataclass of values that were read, all of which must be there and of its types."""
    hints = get_type_hints(kind)
    given = values if isinstance(values, dict) else {}
    if set(given) != set(hints):
        names = ", ".join(sorted(set(given) ^ set(hints)))
        raise ValueError(f"it has missing or unknown fields: {names}")
    for name, hint in hints.items():
        if not _fits(given[name], hint):
            raise ValueError(f"its {name} is {given[name]!r}")
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})


def _fits(value: object, hint: Any) -> bool:
    """Whether a value that JSON gave is of a field's type."""
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(v, get_args(hint)[0]) for v in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(v, get_args(hint)[1]) for v in value.values())
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _goes_on(
    before: Sequence[Decision | RecordedIteration], event: Decision | RecordedIteration
) -> bool:
    """Whether an event is not earlier than the last one; false for a time that is no number."""
    return event.at_seconds >= (before[-1].at_seconds if before else float("-inf"))


def _not_a_record(path: Path, number: int, why: str) -> RecordError:
    return RecordError(f"Line {number} of {path} is no line of a record: {why}.")
