"""What is asked of the runtime and what comes back."""

import json
from dataclasses import dataclass, field, replace
from enum import IntEnum

from memspec_core.errors import RequestError, SchemaError

PLAIN = "none"
"""The name that asks for, and stands for, decoding without a draft."""

LOOKUP = "lookup"
"""The same for proposals from prompt and answer."""

MAX_PROMPT_BYTES = 1024 * 1024
"""Longer prompts are refused before they are tokenised."""

MAX_MESSAGES = 1024
MAX_ROLE_BYTES = 64
MAX_SCHEMA_BYTES = 64 * 1024
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_DRAFT_NAME_BYTES = 64


class FinishReason(IntEnum):
    """Why a generation ended; the values are those of memspec_msgs/FinishReason."""

    END_OF_SEQUENCE = 1
    STOP_STRING = 2
    LENGTH = 3
    TIME_LIMIT = 4
    CANCELLED = 5
    ABORTED = 6


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation; `role` is what the chat template of the target knows."""

    role: str
    content: str


@dataclass(frozen=True)
class SamplingSettings:
    """How the next token is drawn. `temperature` 0 is greedy; `top_p` and `top_k` 0 are off."""

    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class GenerationRequest:
    """One generation. Either `prompt` or `messages` is given.

    A `prompt` is one user message in the target's chat template, or the text itself if `raw`.
    `max_new_tokens` 0 takes the default of the settings, `draft` is empty for the strategy's
    choice, a draft's name, "lookup" or "none". `time_limit_seconds` counts from the submission, 0
    sets no limit; of those that wait the highest `priority` runs first. With a `json_schema` the
    answer is a JSON document that is valid for it; the target is not shown it.
    """

    prompt: str = ""
    messages: tuple[ChatMessage, ...] = ()
    raw: bool = False
    max_new_tokens: int = 0
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop: tuple[str, ...] = ()
    draft: str = ""
    time_limit_seconds: float = 0.0
    priority: int = 0
    json_schema: str = ""

    def validated(self, draft_names: tuple[str, ...]) -> "GenerationRequest":
        """Return this request, its messages filled in from the prompt.

        Raises `RequestError` with one sentence for the first field that is out of range.
        """
        self._check_text()
        self._check_numbers()
        check_draft_name(self.draft)
        self._check_schema()
        known_names = (*draft_names, LOOKUP, PLAIN)
        if self.draft and self.draft not in known_names:
            known = ", ".join(known_names)
            raise RequestError(f"Unknown draft {self.draft!r}; there are: {known}.")
        if self.raw or self.messages:
            return self
        return replace(self, messages=(ChatMessage("user", self.prompt),))

    def _check_text(self) -> None:
        if self.prompt and self.messages:
            raise RequestError("Give either a prompt or messages, not both.")
        if self.raw and self.messages:
            raise RequestError("raw takes a prompt, not messages.")
        if not self.messages and not self.prompt.strip():
            raise RequestError("The prompt is empty.")
        if len(self.messages) > MAX_MESSAGES:
            raise RequestError(f"At most {MAX_MESSAGES} messages are taken.")
        for message in self.messages:
            if not message.role.strip():
                raise RequestError("A message has no role; use system, user or assistant.")
            if _utf8_length(message.role, "A message's role") > MAX_ROLE_BYTES:
                raise RequestError(f"A message's role has at most {MAX_ROLE_BYTES} bytes.")
        if self.messages and not any(message.content.strip() for message in self.messages):
            raise RequestError("All messages are empty.")
        texts = [self.prompt, *(message.content for message in self.messages)]
        texts += [message.role for message in self.messages]
        if sum(_utf8_length(text, "The prompt") for text in texts) > MAX_PROMPT_BYTES:
            raise RequestError(f"The prompt is longer than {MAX_PROMPT_BYTES} bytes.")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"At most {MAX_STOP_STRINGS} stop strings are taken.")
        for stop in self.stop:
            if not 0 < _utf8_length(stop, "A stop string") <= MAX_STOP_BYTES:
                raise RequestError(f"A stop string has 1 to {MAX_STOP_BYTES} bytes.")

    def _check_schema(self) -> None:
        """Check the schema's form; what it says is `speculation.schema`'s affair."""
        if not self.json_schema:
            return
        if self.stop:
            raise RequestError("Give either stop strings or a json_schema, not both.")
        if _utf8_length(self.json_schema, "json_schema") > MAX_SCHEMA_BYTES:
            raise SchemaError(f"json_schema is longer than {MAX_SCHEMA_BYTES} bytes.")
        try:
            schema = json.loads(self.json_schema, parse_constant=_no_number)
        except ValueError as error:
            raise SchemaError(f"json_schema is no JSON: {error}.") from error
        except RecursionError as error:
            raise SchemaError("json_schema is nested too deeply.") from error
        if not isinstance(schema, dict):
            raise SchemaError('json_schema must be a JSON object, such as {"type": "object"}.')

    def _check_numbers(self) -> None:
        _check_range("max_new_tokens", self.max_new_tokens, 0, 1_000_000)
        _check_range("temperature", self.sampling.temperature, 0.0, 100.0)
        _check_range("top_p", self.sampling.top_p, 0.0, 1.0)
        _check_range("top_k", self.sampling.top_k, 0, 10_000_000)
        _check_range("seed", self.sampling.seed, 0, 2**64 - 1)
        _check_range("time_limit", self.time_limit_seconds, 0.0, 1e9)
        _check_range("priority", self.priority, -128, 127)


@dataclass(frozen=True)
class DraftUsage:
    """What one draft (or "none") did in one generation.

    `judged_at[i]`: iterations in which its proposal i, counted from 0, was judged, all before it
    being right; `accepted_at[i]`: those in which that one was right too.
    """

    draft: str
    iterations: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    judged_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationStats:
    """Counts and times of one generation; the fields of memspec_msgs/GenerationStats.

    `mean_accepted` counts accepted draft tokens an iteration; `tokens_per_second` leaves prompt
    processing out. The seconds of desired, fallback, load wait and prediction add up to the
    time of decoding (paper, Figures 4 and 7).
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    iterations: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    mean_accepted: float = 0.0
    time_to_first_token_seconds: float = 0.0
    tokens_per_second: float = 0.0
    desired_seconds: float = 0.0
    fallback_seconds: float = 0.0
    load_wait_seconds: float = 0.0
    prediction_seconds: float = 0.0
    prompt_seconds: float = 0.0
    draft_switches: int = 0
    drafts: tuple[DraftUsage, ...] = ()


@dataclass(frozen=True)
class GenerationResult:
    """How a generation ended, with everything that was generated.

    `token_ids` are those that `text` was decoded from: no end-of-sequence token, and nothing
    after a stop string; where a stop string begins inside a token, that token is the last.
    `error` is empty unless `finish_reason` is ABORTED.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str = ""
    stats: GenerationStats = field(default_factory=GenerationStats)


def check_draft_name(name: str) -> None:
    """Raise `RequestError` for what is too long to be a draft's name, and to be shown in a log."""
    if _utf8_length(name, "The draft's name") > MAX_DRAFT_NAME_BYTES:
        raise RequestError(f"A draft's name has at most {MAX_DRAFT_NAME_BYTES} bytes.")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # nor is NaN
        raise RequestError(f"{name} is {value}; it must lie between {low} and {high}.")


def _utf8_length(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not valid UTF-8.") from error
