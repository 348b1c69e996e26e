"""The benchmark: every configuration on the same prompts, beside plain decoding in one run.

A round is one prompt answered by every configuration in turn. Ratios are taken within a round,
and the order of rounds alternates, so that a machine that slows down or warms up treats all
alike.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memspec_core.errors import MeasurementError, PromptFileError
from memspec_core.evaluation.limit import (
    ReadBytes,
    draft_weight_bytes,
    target_bytes,
)
from memspec_core.evaluation.peers import (
    ASSISTED,
    Peer,
    PeerAnswer,
    PeerPlan,
    open_peers,
    require_peers,
    stands_alone,
)
from memspec_core.measurement.bandwidth import read_bandwidth
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.tokenizer import Tokenizer
from memspec_core.request import (
    PLAIN,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
)
from memspec_core.runtime import Runtime
from memspec_core.settings import DEFAULT, DraftSource, Settings
from memspec_core.snapshot import DraftState, TargetSnapshot
from memspec_core.training.prompts import PromptSet

_LOG = logging.getLogger(__name__)

PLAIN_NAME = "plain"
"""The configuration that all others are measured against."""

ASSISTED_LENGTH = 2
"""What assisted generation proposes where our own drafts' length is not fixed."""

_WARM_UP_PROMPT = "Name three metals."
_WARM_UP_TOKENS = 8

Progress = Callable[[str], None]
"""Called with one line on what has been measured."""


@dataclass(frozen=True)
class Configuration:
    """What answers a prompt: a draft, a strategy's choice or plain decoding; or a peer.

    `draft` is as in a request: a name, "none", or empty for the strategy's choice.
    """

    name: str
    draft: str = PLAIN
    strategy: str = ""
    draft_length: int | None = None
    peer: str = ""


@dataclass(frozen=True)
class BenchPlan:
    """What to measure. `parameters` are the node's; each of `series` is one load of the models."""

    parameters: Mapping[str, object]
    prompt_sets: tuple[PromptSet, ...]
    drafts: tuple[str, ...]
    dtypes: tuple[str, ...]
    strategies: tuple[str, ...]
    draft_lengths: tuple[int, ...]
    peers: tuple[str, ...]
    max_new_tokens: int
    repeats: int

    def settings(self, dtype: str, strategy: str = "") -> Settings:
        """Return the settings of one load; raises `SettingsError`."""
        chosen = {"dtype": dtype} | ({"strategy": strategy} if strategy else {})
        return Settings.from_parameters({**self.parameters, **chosen})

    def series(self) -> list[tuple[Settings, tuple[Configuration, ...]]]:
        """Return each load of the models with what runs on it; plain decoding runs on all.

        A strategy is fixed when models are loaded, so that each has a load of its own. Named
        drafts run on the first load of a dtype, peers on the first of all.
        """
        loads: list[tuple[Settings, tuple[Configuration, ...]]] = []
        for dtype in self.dtypes:
            for index, strategy in enumerate(self.strategies or ("",)):
                drafts = self.drafts if index == 0 else ()
                peers = self.peers if not loads else ()
                configurations = (
                    Configuration(PLAIN_NAME),
                    *(self._with_draft(d, n) for d in drafts for n in self.draft_lengths),
                    *(self._with_strategy(strategy, n) for n in self.draft_lengths if strategy),
                    *map(self._with_peer, peers),
                )
                loads.append((self.settings(dtype, strategy), configurations))
        return loads

    def assisting_draft(self) -> DraftSource | None:
        """Return the draft that assists the peer.

        The first that is measured, or configured, and is a model of its own; else the one of that
        kind that the project brings along, if the target is the one that it was made for.
        """
        settings = self.settings(self.dtypes[0])
        configured = {draft.name: draft for draft in settings.drafts}
        named = (*(name for name in self.drafts if name in configured), *configured)
        own = [configured[name] for name in named]
        brought = [DraftSource("general_only", DEFAULT)] if settings.target_path == DEFAULT else []
        return next((draft for draft in (*own, *brought) if stands_alone(draft)), None)

    def _with_peer(self, peer: str) -> Configuration:
        # 0 is a length that is found while running, which the peer does not do.
        length = self.draft_lengths[0] or ASSISTED_LENGTH if peer == ASSISTED else None
        return Configuration(peer, draft="", draft_length=length, peer=peer)

    def _with_draft(self, draft: str, length: int) -> Configuration:
        return Configuration(_label(draft, length), draft=draft, draft_length=length)

    def _with_strategy(self, strategy: str, length: int) -> Configuration:
        name = _label(strategy, length)
        return Configuration(name, draft="", strategy=strategy, draft_length=length)


@dataclass(frozen=True)
class Run:
    """One answer of one configuration to one prompt, in one round.

    `round` counts prompts and repeats through; `identical`: the tokens are those of plain
    decoding in the same round. `stats` are None for a peer.
    """

    configuration: str
    prompt_set: str
    prompt: int
    round: int
    generated_tokens: int
    tokens_per_second: float
    time_to_first_token_seconds: float
    identical: bool
    stats: GenerationStats | None


@dataclass(frozen=True)
class Series:
    """Everything that was measured on one load of the models.

    `bandwidths`: bytes a second, measured before and after; `left_out`: prompts that do not fit.
    """

    target: TargetSnapshot
    configurations: tuple[Configuration, ...]
    read: ReadBytes
    bandwidths: tuple[float, ...]
    left_out: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class _Prompt:
    set_name: str
    index: int
    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True)
class _Answer:
    token_ids: tuple[int, ...]
    tokens_per_second: float
    time_to_first_token_seconds: float
    stats: GenerationStats | None

    @classmethod
    def of_ours(cls, result: GenerationResult) -> "_Answer":
        stats = result.stats
        first = stats.time_to_first_token_seconds
        return cls(result.token_ids, stats.tokens_per_second, first, stats)

    @classmethod
    def of_peer(cls, answer: PeerAnswer) -> "_Answer":
        return cls(answer.token_ids, answer.tokens_per_second, answer.first_seconds, None)


def plan_bench(
    parameters: Mapping[str, object],
    prompt_sets: tuple[PromptSet, ...],
    *,
    drafts: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    strategies: Sequence[str] = (),
    draft_lengths: Sequence[int] = (),
    peers: Sequence[str] = (),
    max_new_tokens: int = 128,
    repeats: int = 3,
) -> BenchPlan:
    """Fill in what is not given from the parameters, and check all of it.

    Drafts are by default all that are configured. Raises `SettingsError`, `RequestError`,
    `CheckpointError` or `PeerError`.
    """
    configured = Settings.from_parameters(parameters)
    named = dict.fromkeys(drafts or configured.draft_names)
    plan = BenchPlan(
        parameters=parameters,
        prompt_sets=prompt_sets,
        drafts=tuple(name for name in named if name != PLAIN),
        dtypes=tuple(dict.fromkeys(dtypes or (configured.dtype,))),
        strategies=tuple(dict.fromkeys(strategies)),
        draft_lengths=tuple(dict.fromkeys(draft_lengths or (configured.draft_length,))),
        peers=tuple(dict.fromkeys(peers)),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
    )
    for settings, configurations in plan.series():
        for configuration in configurations:
            if configuration.draft_length is not None:
                settings.with_changes({"draft_length": configuration.draft_length})
            _request(_WARM_UP_PROMPT, configuration, max_new_tokens).validated(settings.draft_names)
    require_peers(plan.peers, open_checkpoint(configured.target_path), plan.assisting_draft())
    return plan


def run_bench(plan: BenchPlan, progress: Progress) -> list[Series]:
    """Measure all series of a plan.

    Raises `CheckpointError`, `MemoryBudgetError` or `PeerError` if models cannot be loaded,
    `PromptFileError` if no prompt fits, and `MeasurementError` if an answer fails.
    """
    measured = []
    for settings, configurations in plan.series():
        progress(f"{settings.dtype}: loading {settings.target_path}")
        runtime = Runtime(settings)
        runtime.load()
        try:
            runtime.open()
            measured.append(_Bench(plan, settings, configurations, runtime).measure(progress))
        finally:
            runtime.close()
    return measured


class _Bench:
    """One load of the models, and what runs on it."""

    def __init__(
        self,
        plan: BenchPlan,
        settings: Settings,
        configurations: tuple[Configuration, ...],
        runtime: Runtime,
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._configurations = configurations
        self._runtime = runtime
        self._checkpoint = open_checkpoint(settings.target_path)
        self._tokenizer = Tokenizer.of(self._checkpoint)
        self._peers: dict[str, Peer] = {}

    def measure(self, progress: Progress) -> Series:
        target = self._runtime.snapshot().target
        prompts = self._prompts_that_fit(target.context_tokens)
        wanted = sum(len(prompt_set.texts) for prompt_set in self._plan.prompt_sets)
        read = self._read_bytes()
        try:
            self._peers = self._open_peers(target, progress)
            self._warm_up()
            before = read_bandwidth(target.threads, self._settings.device)
            runs = self._rounds(prompts, progress)
            after = read_bandwidth(target.threads, self._settings.device)
        finally:
            for peer in self._peers.values():
                peer.close()
        return Series(
            target=target,
            configurations=self._configurations,
            read=read,
            bandwidths=(before, after),
            left_out=wanted - len(prompts),
            runs=tuple(runs),
        )

    def _prompts_that_fit(self, context_tokens: int) -> list[_Prompt]:
        """Leave out prompts that have no room for the whole answer: they would end early."""
        room = context_tokens - self._plan.max_new_tokens
        longest = min(room, self._settings.max_prompt_tokens)
        prompts = [
            _Prompt(prompt_set.name, index, text, self._token_ids(text))
            for prompt_set in self._plan.prompt_sets
            for index, text in enumerate(prompt_set.texts)
        ]
        fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= longest]
        if not fitting:
            raise PromptFileError(
                f"No prompt fits: with {self._plan.max_new_tokens} new tokens the context of "
                f"{context_tokens} leaves room for {max(0, longest)}."
            )
        if len(fitting) < len(prompts):
            _LOG.warning(
                "%d prompts are longer than %d tokens and are left out",
                len(prompts) - len(fitting),
                longest,
            )
        return fitting

    def _token_ids(self, text: str) -> list[int]:
        return self._tokenizer.prompt_ids(GenerationRequest(prompt=text).validated(()))

    def _read_bytes(self) -> ReadBytes:
        """Weigh the models: each draft is made resident alone, since the books have sums only."""
        snapshot = self._runtime.snapshot()
        named = {c.draft for c in self._configurations if c.draft not in ("", PLAIN)}
        if any(c.strategy for c in self._configurations):
            named.update(self._settings.draft_names)
        drafts = {}
        self._runtime.change({"resident_capacity": 1})
        for name in sorted(named):
            self._warm_up_with(Configuration(name, draft=name))
            drafts[name] = draft_weight_bytes(self._runtime.snapshot(), name)
        self._runtime.change({"resident_capacity": self._settings.resident_capacity})
        return ReadBytes(
            target_bytes(snapshot, self._checkpoint), snapshot.target.kv_bytes_per_token, drafts
        )

    def _open_peers(self, target: TargetSnapshot, progress: Progress) -> dict[str, Peer]:
        lengths = {c.peer: c.draft_length for c in self._configurations if c.peer}
        if not lengths:
            return {}
        progress(f"loading the peers {', '.join(lengths)}")
        plan = PeerPlan(
            checkpoint=self._checkpoint,
            draft=self._plan.assisting_draft(),
            draft_length=lengths.get(ASSISTED) or ASSISTED_LENGTH,
            device=self._settings.device,
            threads=target.threads,
            context_tokens=target.context_tokens,
        )
        return open_peers(tuple(lengths), plan)

    def _warm_up(self) -> None:
        for configuration in self._configurations:
            self._warm_up_with(configuration)

    def _warm_up_with(self, configuration: Configuration) -> None:
        prompt = _Prompt("", 0, _WARM_UP_PROMPT, self._token_ids(_WARM_UP_PROMPT))
        self._answer(configuration, prompt, _WARM_UP_TOKENS)

    def _rounds(self, prompts: Sequence[_Prompt], progress: Progress) -> list[Run]:
        """Answer all prompts before the first repeat, so that a slow spell hits none twice."""
        runs: list[Run] = []
        count = len(prompts) * self._plan.repeats
        for number in range(count):
            prompt = prompts[number % len(prompts)]
            # From prompt to prompt, and from repeat to repeat of the same prompt.
            forward = (number % len(prompts) + number // len(prompts)) % 2 == 0
            done = self._round(prompt, number, forward=forward)
            runs += done
            speeds = ", ".join(f"{r.configuration} {r.tokens_per_second:.1f}" for r in done)
            where = f"{prompt.set_name} prompt {prompt.index + 1}"
            progress(
                f"{self._settings.dtype}: {number + 1} of {count}, {where}, tokens/s: {speeds}"
            )
        return runs

    def _round(self, prompt: _Prompt, number: int, *, forward: bool) -> list[Run]:
        ordered = self._configurations if forward else self._configurations[::-1]
        answers = {c: self._answer(c, prompt, self._plan.max_new_tokens) for c in ordered}
        plain = answers[self._configurations[0]]
        return [
            Run(
                configuration=configuration.name,
                prompt_set=prompt.set_name,
                prompt=prompt.index,
                round=number,
                generated_tokens=len(answers[configuration].token_ids),
                tokens_per_second=answers[configuration].tokens_per_second,
                time_to_first_token_seconds=answers[configuration].time_to_first_token_seconds,
                identical=answers[configuration].token_ids == plain.token_ids,
                stats=answers[configuration].stats,
            )
            for configuration in self._configurations
        ]

    def _answer(
        self, configuration: Configuration, prompt: _Prompt, max_new_tokens: int
    ) -> _Answer:
        if configuration.peer:
            peer = self._peers[configuration.peer]
            return _Answer.of_peer(peer.answer(prompt.token_ids, max_new_tokens))
        if configuration.draft_length is not None:
            self._runtime.change({"draft_length": configuration.draft_length})
        self._make_resident(configuration.draft)
        return self._ours(_request(prompt.text, configuration, max_new_tokens))

    def _make_resident(self, draft: str) -> None:
        """Load a draft that was evicted before time counts: what is measured is decoding."""
        found = (d.state for d in self._runtime.snapshot().drafts if d.name == draft)
        if DraftState.STORED in found:
            self._ours(GenerationRequest(prompt=_WARM_UP_PROMPT, max_new_tokens=1, draft=draft))

    def _ours(self, request: GenerationRequest) -> _Answer:
        result = self._runtime.submit(request).result()
        if result.finish_reason is FinishReason.ABORTED:
            raise MeasurementError(result.error)
        return _Answer.of_ours(result)


def _request(prompt: str, configuration: Configuration, max_new_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt, max_new_tokens=max_new_tokens, draft=configuration.draft
    )


def _label(what: str, length: int) -> str:
    return f"{what} γ={length}" if length else what
