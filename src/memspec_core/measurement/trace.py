"""A decoding trace: at each place of the target's answers, what every draft would have got right.

Under greedy decoding the answer does not depend on the draft. So one answer a prompt, and for each
draft and place the number of its proposals that the target would accept, tell how any choice of
drafts would have gone; oracles, labels and the simulator are computed from that.

A trace is a folder: `trace.json` says what it was made from, and `trace-NNNNN.npz` hold some
prompts each, with the arrays

    domains        [p]       the name of the prompt file
    prompt_ends    [p]       where each prompt ends in prompt_ids
    answer_ends    [p]       where each answer ends in token_ids, accepted and states
    prompt_ids     [.]       tokens of the prompts
    token_ids      [n]       tokens of the answers
    accepted       [n, d]    with the answer known up to this place: how many proposals of draft d
                             in a row are the answer's next tokens, of `length` at most
    matched        [n]       tokens that the lookup matched here, 0 where it found nothing
    states         [n, h]    the target's last state before this place, normed; only on request
    prompt_states  [p, h]    the mean of these states at the prompt's end, as `prediction.context`
                             has it at the first scheduling point; only with states

A **reduced** trace is small enough to be handed on, and holds no text of prompts. Instead of
prompt_ids it has

    prompt_hashes  [p]       what tells prompts apart: see `TracedPrompt.prompt_hash`

and states and prompt_states hold what a predictor makes of a context, before the softmax [d]:
in row t of an answer what it gives after token t, in prompt_states what it gives after the
prompt. The folder `predictor` beside them reads these numbers as they are; so strategies and
simulator do on a reduced trace what they do on the whole one. See `evaluation.reduction`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from memspec_core.errors import TraceError
from memspec_core.files import claim_folder, whole_file
from memspec_core.measurement.decisions import digest_of_prompt, hash_of_context

RECORD = "trace.json"
FORMAT_VERSION = 1

States = npt.NDArray[np.float16] | npt.NDArray[np.float32]
"""The target's states in fp16, or a predictor's numbers in fp32."""


@dataclass(frozen=True)
class TraceHeader:
    """What a trace was made from.

    `drafts`: the columns of `accepted`, each with the checksum of its weights, empty for a lookup.
    `length`: proposals at each place. `states`: whether the target's are there; `reduced`: see
    the module.
    """

    target_sha256: str
    prompts_sha256: str
    drafts: Mapping[str, str]
    length: int
    max_new_tokens: int
    states: bool
    reduced: bool = False


@dataclass(frozen=True)
class TracedPrompt:
    """One prompt with its answer; the arrays are those of the module's description.

    In a reduced trace the ids of the prompt are zeros, as many as there were, and `kept_hash` is
    what they hashed to.
    """

    domain: str
    prompt_ids: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.uint8]
    matched: npt.NDArray[np.uint8]
    states: States | None = None
    prompt_state: States | None = None
    kept_hash: str = ""

    @property
    def prompt_hash(self) -> str:
        """The first 16 digits of the SHA-256 of the prompt's tokens."""
        return self.kept_hash or hash_of_prompt(self.prompt_ids.tolist())


@dataclass(frozen=True)
class Trace:
    """A header with its prompts."""

    header: TraceHeader
    prompts: Sequence[TracedPrompt]

    @property
    def drafts(self) -> tuple[str, ...]:
        """The names of the columns of `accepted`."""
        return tuple(self.header.drafts)

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains in their order."""
        return tuple(dict.fromkeys(prompt.domain for prompt in self.prompts))

    def first(self, count: int) -> "Trace":
        """Return the first prompts of each domain, so many at the most."""
        of_domain = {d: [p for p in self.prompts if p.domain == d][:count] for d in self.domains}
        return Trace(self.header, [p for prompts in of_domain.values() for p in prompts])

    def only(self, drafts: Sequence[str]) -> "Trace":
        """Return the trace of some of its drafts, in that order; raises `TraceError`."""
        if missing := [name for name in drafts if name not in self.header.drafts]:
            raise TraceError(
                f"The trace has no draft '{missing[0]}'; it has {', '.join(self.drafts)}."
            )
        columns = [self.drafts.index(name) for name in drafts]
        header = replace(self.header, drafts={name: self.header.drafts[name] for name in drafts})
        return Trace(header, [replace(p, accepted=p.accepted[:, columns]) for p in self.prompts])


def hash_of_prompt(prompt_ids: Sequence[int]) -> str:
    """Return what tells a prompt apart; a record of decisions has it of the first context."""
    return hash_of_context(digest_of_prompt(prompt_ids), ())


def claim_trace(folder: Path, header: TraceHeader) -> None:
    """Begin a trace, or go on with it; raises `CacheMismatchError` if it is another one's."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / RECORD
    claim_folder(
        record, "trace", _fields(header), _fields(_read_header(folder)) if record.exists() else None
    )


def _fields(header: TraceHeader) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION} | asdict(header)


def part_file(folder: Path, index: int) -> Path:
    """Return where a part of a trace lies."""
    return folder / f"trace-{index:05d}.npz"


def write_part(path: Path, prompts: Sequence[TracedPrompt], *, reduced: bool = False) -> None:
    """Write some prompts, whole or not at all; reduced ones without the ids of the prompts."""
    states = [prompt.states for prompt in prompts if prompt.states is not None]
    ends = [prompt.prompt_state for prompt in prompts if prompt.prompt_state is not None]
    arrays: dict[str, Any] = {
        "domains": np.array([prompt.domain for prompt in prompts]),
        "prompt_ends": np.cumsum([len(prompt.prompt_ids) for prompt in prompts]),
        "answer_ends": np.cumsum([len(prompt.token_ids) for prompt in prompts]),
        **_identity(prompts, reduced),
        "token_ids": _narrowed(np.concatenate([prompt.token_ids for prompt in prompts])),
        "accepted": np.concatenate([prompt.accepted for prompt in prompts]),
        "matched": np.concatenate([prompt.matched for prompt in prompts]),
        **({"states": np.concatenate(states)} if states else {}),
        **({"prompt_states": np.stack(ends)} if ends else {}),
    }
    with whole_file(path) as file:
        np.savez_compressed(file, **arrays)


def _narrowed(ids: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
    """Return tokens in half the space where the vocabulary allows it."""
    return ids.astype(np.uint16) if ids.max(initial=0) <= np.iinfo(np.uint16).max else ids


def _identity(prompts: Sequence[TracedPrompt], reduced: bool) -> dict[str, npt.NDArray[Any]]:
    if reduced:
        return {"prompt_hashes": np.array([prompt.prompt_hash for prompt in prompts])}
    return {"prompt_ids": np.concatenate([prompt.prompt_ids for prompt in prompts])}


def read_trace(folder: Path, target_sha256: str = "") -> Trace:
    """Read a trace; raises `TraceError` if there is none, or one of another target than asked."""
    header = _read_header(folder)
    if target_sha256 and header.target_sha256 != target_sha256:
        raise TraceError(
            f"The trace in {folder} was made with another target (checksum "
            f"{header.target_sha256[:12]}, not {target_sha256[:12]}); make one with memspec trace."
        )
    parts = sorted(folder.glob("trace-*.npz"))
    prompts = [prompt for part in parts for prompt in _read_part(part)]
    if not prompts:
        raise TraceError(f"The trace in {folder} holds no prompts yet; go on with memspec trace.")
    return Trace(header, prompts)


def _read_header(folder: Path) -> TraceHeader:
    path = folder / RECORD
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields.pop("format_version")
        header = TraceHeader(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} is not the record of a trace: {error!r}.") from error
    if version != FORMAT_VERSION:
        raise TraceError(f"{path} has format {version}; {FORMAT_VERSION} is supported.")
    return header


def _read_part(path: Path) -> Iterator[TracedPrompt]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        ends = arrays["answer_ends"][:-1]
        prompts, hashes = _prompts(arrays)
        arrays["token_ids"] = arrays["token_ids"].astype(np.int32)
        columns = [np.split(arrays[name], ends) for name in ("token_ids", "accepted", "matched")]
        none = [None] * len(prompts)
        states = np.split(arrays["states"], ends) if "states" in arrays else none
        prompt_states = arrays.get("prompt_states", none)
        domains = arrays["domains"].tolist()
        rows = zip(domains, prompts, *columns, states, prompt_states, hashes, strict=True)
        yield from (TracedPrompt(*row) for row in rows)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise TraceError(f"{path} is damaged ({error}); delete it and go on with it.") from error


def _prompts(
    arrays: Mapping[str, npt.NDArray[Any]],
) -> tuple[list[npt.NDArray[np.int32]], list[str]]:
    """Return the ids of the prompts and, where these are left out, their hashes."""
    ends = arrays["prompt_ends"]
    if "prompt_ids" in arrays:
        return np.split(arrays["prompt_ids"], ends[:-1]), [""] * len(ends)
    lengths = np.diff(ends, prepend=0).tolist()
    return [np.zeros(n, np.int32) for n in lengths], arrays["prompt_hashes"].tolist()
