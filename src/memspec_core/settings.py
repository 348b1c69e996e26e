"""Every parameter of the runtime: its default, range and meaning, checked in one place.

The node declares its ROS parameters from `PARAMETERS`; the command line reads the same YAML.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from memspec_core.errors import SettingsError
from memspec_core.request import LOOKUP, MAX_DRAFT_NAME_BYTES, PLAIN
from memspec_core.request_queue import QUEUE, QUEUE_POLICIES

DEFAULT = "default"
"""The path that stands for the model that the project brings along."""

STRATEGY_NAMES = ("memspec", "general_static", "mab_sync", "mab_async", "prediction_only")
DTYPES = ("stored", "fp32", "bf16", "int4", "int8")
DRAFT_SHAPES = ("chain", "tree")
_DRAFT_PATH = re.compile(r"drafts\.[^.]+\.path")
DRAFT_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9_]{{0,{MAX_DRAFT_NAME_BYTES - 1}}}")
MIB = 1024 * 1024

MAX_TEXT_BYTES = 4096
"""Of a parameter's text; the longest path that Linux takes."""

MAX_DRAFTS = 64
"""Names in drafts.names."""

Value = bool | int | float | str | list[str]


@dataclass(frozen=True)
class Parameter:
    """One parameter: `minimum` and `maximum` are inclusive, `choices` empty for any value."""

    name: str
    default: Value
    description: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    read_only: bool = True

    def check(self, value: object) -> Value:
        """Return the value in this parameter's type; raise `SettingsError` if it has no place."""
        checked = self._typed(value)
        if self.choices and checked not in self.choices:
            raise SettingsError(f"{self.name} is '{checked}'; it must be {_any_of(self.choices)}.")
        if isinstance(checked, int | float) and not isinstance(checked, bool):
            self._check_range(checked)
        return checked

    def _typed(self, value: object) -> Value:
        wanted = type(self.default)
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            return _as_float(value)
        if wanted is list:
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise SettingsError(f"{self.name} is {value!r}; a list of names is needed.")
            if len(value) > MAX_DRAFTS:
                raise SettingsError(f"{self.name} has more than {MAX_DRAFTS} names.")
            if not all(isinstance(item, str) for item in value):
                raise SettingsError(f"{self.name} is {value!r}; a list of names is needed.")
            for item in value:
                self._check_length(item)
            return list(value)
        if type(value) is not wanted:
            raise SettingsError(
                f"{self.name} is {value!r}; a value of type {wanted.__name__} is needed."
            )
        if isinstance(value, str):
            self._check_length(value)
        return value

    def _check_length(self, text: str) -> None:
        if len(text.encode(errors="surrogatepass")) > MAX_TEXT_BYTES:
            raise SettingsError(f"{self.name} is longer than {MAX_TEXT_BYTES} bytes.")

    def _check_range(self, value: float) -> None:
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        if not low <= value <= high:
            raise SettingsError(f"{self.name} is {value}; it must lie between {low} and {high}.")


PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "target.path",
        DEFAULT,
        "Folder (or GGUF file) of the target; 'default' is the embedded SmolLM2-135M-Instruct.",
    ),
    Parameter(
        "drafts.names",
        ["general", "code", "math", "medical", "law", "robot"],
        "Names of the candidate drafts; each has a parameter drafts.<name>.path, of which "
        "'default' is the draft of that name that the project brings along.",
    ),
    Parameter("device", "cpu", "Where the models run: cpu, cuda or cuda:<index>."),
    Parameter(
        "dtype",
        "stored",
        "Weights of the target: as stored (4 bits stay 4 bits), computed in fp32 or bf16, or the "
        "layers rounded to int4 or int8 when loaded, where they are dense (int8: CPU only).",
        choices=DTYPES,
    ),
    Parameter(
        "threads",
        0,
        "Threads for the models' arithmetic; 0 takes one for each physical core.",
        minimum=0,
        maximum=1024,
    ),
    Parameter(
        "strategy",
        "memspec",
        "How the draft is chosen: as a predictor expects, with the next ones made ready (memspec) "
        "or not (prediction_only); always the draft 'general' (general_static); or as a bandit "
        "learns, waiting for loads or not (mab_sync, mab_async).",
        choices=STRATEGY_NAMES,
    ),
    Parameter(
        "predictor.path",
        DEFAULT,
        "Folder of the predictor; 'default' is the one that the project brings along. Without one "
        "all drafts count alike.",
    ),
    Parameter(
        "observation",
        True,
        "Whether what the target accepts corrects the predictor; false is the paper's form.",
    ),
    Parameter(
        "cost_aware",
        True,
        "Whether drafts are weighed by what their catching up and loading cost (only with "
        "observation); false is the paper's form.",
    ),
    Parameter(
        "initial_wait",
        True,
        "Whether a goal that finds no draft resident waits for its first one's load; otherwise it "
        "begins plainly. With a resident draft no goal waits, but one that names another.",
    ),
    Parameter(
        "bandit_exploration",
        2.0,
        "c: how much the bandits explore.",
        minimum=0.0,
        maximum=1000.0,
    ),
    Parameter(
        "decisions.path",
        "",
        "File to which each scheduling decision is appended as a line of JSON; none if empty.",
    ),
    Parameter(
        "record.path",
        "",
        "File to which whole generations are appended as lines of JSON: the prompt's beginning, "
        "each scheduling decision and each iteration with its text; none if empty.",
    ),
    Parameter(
        "resident_capacity",
        2,
        "K: at most so many drafts in fast memory, loads under way included.",
        minimum=1,
        maximum=64,
        read_only=False,
    ),
    Parameter(
        "scheduling_interval",
        8,
        "N: iterations from one scheduling point to the next.",
        minimum=1,
        maximum=10_000,
        read_only=False,
    ),
    Parameter(
        "recent_tokens",
        64,
        "T: generated tokens that the strategy sees beside the prompt.",
        minimum=1,
        maximum=4096,
        read_only=False,
    ),
    Parameter(
        "draft_length",
        0,
        "Gamma: tokens that are proposed in one iteration; 0 has each iteration propose what "
        "pays most, by what passes cost here and what was accepted so far, or nothing. All of a "
        "tree's count.",
        minimum=0,
        maximum=16,
        read_only=False,
    ),
    Parameter(
        "lookup",
        True,
        "Whether proposals are also looked up where the last tokens occurred before in prompt or "
        "answer; takes no memory. A request that names a draft does without.",
    ),
    Parameter(
        "draft_shape",
        "chain",
        "Shape of the proposals: one token after another, or a tree of the likeliest paths, which "
        "suits machines on which verifying more rows costs little.",
        choices=DRAFT_SHAPES,
    ),
    Parameter(
        "memory.budget_mib",
        0,
        "Fast memory for target, drafts and their KV caches, in MiB; 0 takes what is available "
        "at configure, less memory.floor_mib.",
        minimum=0,
        maximum=1_000_000,
    ),
    Parameter(
        "memory.floor_mib",
        256,
        "System memory to leave to the rest of the robot, in MiB.",
        minimum=0,
        maximum=1_000_000,
    ),
    Parameter(
        "memory.warn_ratio",
        1.25,
        "Diagnostics warn while less than so many times memory.floor_mib is available.",
        minimum=1.0,
        maximum=100.0,
        read_only=False,
    ),
    Parameter(
        "queue_size",
        8,
        "Goals that may wait behind the running one; further ones are rejected.",
        minimum=1,
        maximum=64,
    ),
    Parameter(
        "queue_policy",
        QUEUE,
        "What becomes of a goal while another runs: it is rejected (reject), waits for its turn "
        "(queue), or ends all those whose priority is not higher than its own (preempt).",
        choices=QUEUE_POLICIES,
    ),
    Parameter(
        "context_tokens",
        4096,
        "Longest context, prompt and answer together; the KV caches are allocated for it. The "
        "checkpoint's own limit holds where it is shorter.",
        minimum=16,
        maximum=1_000_000,
    ),
    Parameter(
        "max_prompt_tokens",
        3072,
        "Longest prompt, in tokens; a longer one aborts.",
        minimum=1,
        maximum=1_000_000,
    ),
    Parameter(
        "default_max_new_tokens",
        256,
        "Tokens to generate where a goal does not say how many.",
        minimum=1,
        maximum=1_000_000,
    ),
    Parameter(
        "stream_period",
        0.05,
        "Seconds within which iterations share one feedback message and one chunk of ~/tokens; 0 "
        "sends each iteration by itself. A goal keeps the period that it began with.",
        minimum=0.0,
        maximum=1.0,
        read_only=False,
    ),
    Parameter(
        "diagnostics_period",
        1.0,
        "Seconds between two messages on /diagnostics.",
        minimum=0.05,
        maximum=3600.0,
    ),
    Parameter(
        "fallback_warn_ratio",
        0.25,
        "Share of decoding time in fallback (last 60 s) above which diagnostics warn.",
        minimum=0.0,
        maximum=1.0,
        read_only=False,
    ),
    Parameter(
        "temperature_warn",
        90.0,
        "Degrees Celsius of a board's sensor from which diagnostics warn.",
        minimum=0.0,
        maximum=200.0,
        read_only=False,
    ),
    Parameter("autostart", False, "Configure and activate without a lifecycle manager."),
)

_BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


def draft_path_parameter(name: str) -> Parameter:
    """Return the parameter that holds the path of the draft called `name`."""
    return Parameter(f"drafts.{name}.path", DEFAULT, f"Folder of the draft '{name}', or 'default'.")


@dataclass(frozen=True)
class DraftSource:
    """A candidate draft: its name and the path as it was given."""

    name: str
    path: str


@dataclass(frozen=True)
class Settings:
    """All parameters, checked. Fields are named as the parameters, dots written as `_`."""

    target_path: str
    drafts: tuple[DraftSource, ...]
    device: str
    dtype: str
    threads: int
    strategy: str
    predictor_path: str
    observation: bool
    cost_aware: bool
    initial_wait: bool
    bandit_exploration: float
    decisions_path: str
    record_path: str
    resident_capacity: int
    scheduling_interval: int
    recent_tokens: int
    draft_length: int
    lookup: bool
    draft_shape: str
    memory_budget_mib: int
    memory_floor_mib: int
    memory_warn_ratio: float
    queue_size: int
    queue_policy: str
    context_tokens: int
    max_prompt_tokens: int
    default_max_new_tokens: int
    stream_period: float
    diagnostics_period: float
    fallback_warn_ratio: float
    temperature_warn: float
    autostart: bool

    @classmethod
    def from_parameters(cls, values: Mapping[str, object] | None = None) -> "Settings":
        """Build settings from parameter values; those not given take their defaults.

        Paths of drafts that drafts.names does not name are passed over, so that a draft can be
        left out without removing its section. Raises `SettingsError` for an unknown name or a
        value that is out of range.
        """
        given = dict(values or {})
        names = _draft_names(given.get("drafts.names", _BY_NAME["drafts.names"].default))
        known = _BY_NAME | {p.name: p for p in map(draft_path_parameter, names)}
        for name in given:
            if name not in known and not _DRAFT_PATH.fullmatch(name):
                raise SettingsError(f"Unknown parameter '{name}'.")
        checked = {n: p.check(given.get(n, p.default)) for n, p in known.items()}
        drafts = tuple(DraftSource(n, str(checked.pop(f"drafts.{n}.path"))) for n in names)
        del checked["drafts.names"]
        fields: dict[str, Any] = {n.replace(".", "_"): v for n, v in checked.items()}
        return cls(drafts=drafts, **fields)

    def with_changes(self, changes: Mapping[str, object]) -> "Settings":
        """Return settings with some parameters changed that may change at run time."""
        fields = {}
        for name, value in changes.items():
            parameter = _BY_NAME.get(name)
            if parameter is None:
                raise SettingsError(f"Unknown parameter '{name}'.")
            if parameter.read_only:
                raise SettingsError(f"{name} cannot change after configure.")
            fields[name.replace(".", "_")] = parameter.check(value)
        return Settings(**{**self.__dict__, **fields})

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Names of the candidate drafts in their order."""
        return tuple(draft.name for draft in self.drafts)


def read_parameters(path: Path) -> dict[str, object]:
    """Read a ROS parameter YAML: the parameters of the node `memspec`, by their dotted names.

    Sections of `/**` and of any node whose name ends in `memspec` count; later ones win.
    Raises `SettingsError` if the file cannot be read or has no such section.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"Cannot read the parameter file {path}: {error}.") from error
    sections = document if isinstance(document, dict) else {}
    parameters: dict[str, object] = {}
    found = False
    for node, section in sections.items():
        if node != "/**" and not str(node).endswith("memspec"):
            continue
        if not isinstance(section, dict) or not isinstance(section.get("ros__parameters"), dict):
            continue
        found = True
        _flatten("", section["ros__parameters"], parameters)
    if not found:
        raise SettingsError(f"{path} has no section memspec: ros__parameters.")
    return parameters


def _flatten(prefix: str, tree: Mapping[str, object], into: dict[str, object]) -> None:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            _flatten(f"{name}.", value, into)
        else:
            into[name] = value


def _draft_names(value: object) -> list[str]:
    names = _BY_NAME["drafts.names"].check(value)
    assert isinstance(names, list)
    if names == [""]:
        return []  # ROS cannot tell the type of an empty list; this stands for it
    for name in names:
        if not DRAFT_NAME.fullmatch(name) or name in (PLAIN, LOOKUP):
            raise SettingsError(
                f"drafts.names holds '{name}'; a name has letters, digits and _, at most "
                f"{MAX_DRAFT_NAME_BYTES} of them, begins with a letter, and is neither "
                f"'{PLAIN}' nor '{LOOKUP}'."
            )
        if names.count(name) > 1:
            raise SettingsError(f"drafts.names holds '{name}' twice; names must differ.")
    return names


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _any_of(choices: tuple[str, ...]) -> str:
    return ", ".join(choices[:-1]) + f" or {choices[-1]}" if len(choices) > 1 else choices[0]
