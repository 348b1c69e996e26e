"""Collecting a decoding trace: the target's answers, then each draft's proposals at each place."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from memspec_core.clock import SystemClock
from memspec_core.engine import Engine, load_engine
from memspec_core.measurement.trace import (
    TracedPrompt,
    TraceHeader,
    claim_trace,
    part_file,
    write_part,
)
from memspec_core.models.kv_cache import common_length
from memspec_core.prediction.context import prompt_mean
from memspec_core.request import LOOKUP, ChatMessage, GenerationRequest, SamplingSettings
from memspec_core.settings import Settings
from memspec_core.speculation.lookup import NgramLookup
from memspec_core.speculation.proposal import Draft
from memspec_core.speculation.sampling import Sampler
from memspec_core.training.answers import Answering
from memspec_core.training.prompts import PromptSet

PROMPTS_A_PART = 20


@dataclass(frozen=True)
class TracePlan:
    """What to trace.

    `parameters`: the node's, which name target and drafts; all drafts are traced, and a lookup.
    `length`: proposals at each place. `states`: whether the target's states are kept.
    """

    parameters: Mapping[str, object]
    prompt_sets: Sequence[PromptSet]
    folder: Path
    length: int = 8
    max_new_tokens: int = 128
    states: bool = False


def collect_trace(plan: TracePlan, progress: Callable[[str, int, int], None]) -> None:
    """Write a trace; a second call goes on where the first stopped.

    Prompts that leave no room for an answer are left out. Raises `SettingsError`,
    `CheckpointError` or `CacheMismatchError`.
    """
    settings = Settings.from_parameters(plan.parameters)
    settings = replace(settings, resident_capacity=max(1, len(settings.drafts)))
    engine = load_engine(
        lambda: settings,
        SystemClock(),
        between_parts=lambda: None,
        on_change=lambda: None,
        on_load_finished=lambda: None,
    )
    try:
        prompts = _prompts(plan, engine)
        tracer = _Tracer(plan, engine)
        claim_trace(plan.folder, _header(plan, engine, prompts))
        parts = [prompts[i : i + PROMPTS_A_PART] for i in range(0, len(prompts), PROMPTS_A_PART)]
        for index, part in enumerate(parts):
            path = part_file(plan.folder, index)
            if not path.exists():
                write_part(path, [tracer.traced(domain, ids) for domain, ids in part])
            progress("trace", index + 1, len(parts))
    finally:
        engine.close()


def _prompts(plan: TracePlan, engine: Engine) -> list[tuple[str, list[int]]]:
    tokenizer = engine.target.tokenizer
    tokenised = [
        (chosen.name, tokenizer.prompt_ids(_request(text)))
        for chosen in plan.prompt_sets
        for text in chosen.texts
    ]
    room = engine.target.context_tokens - plan.max_new_tokens
    return [(domain, ids) for domain, ids in tokenised if len(ids) <= room]


def _request(text: str) -> GenerationRequest:
    return GenerationRequest(messages=(ChatMessage("user", text),))


def _header(
    plan: TracePlan, engine: Engine, prompts: Sequence[tuple[str, list[int]]]
) -> TraceHeader:
    drafts = {
        name: "" if draft.manifest is None else draft.manifest.weights_sha256
        for name, draft in engine.drafts.items()
    }
    return TraceHeader(
        target_sha256=engine.target.checkpoint.sha256(),
        prompts_sha256=hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        drafts=drafts | {LOOKUP: ""},
        length=plan.length,
        max_new_tokens=plan.max_new_tokens,
        states=plan.states,
    )


class _Tracer:
    def __init__(self, plan: TracePlan, engine: Engine) -> None:
        self._plan = plan
        self._target = engine.target
        self._drafts: list[Draft] = [engine.cache.require(name) for name in engine.drafts]
        self._lookup = NgramLookup()
        self._greedy = Sampler(SamplingSettings(), engine.target.decoder.device)
        self._answering = Answering(engine.target, plan.max_new_tokens, 0.0)

    def traced(self, domain: str, prompt: list[int]) -> TracedPrompt:
        [answer] = self._answering.answers([prompt], [0])
        context = [*prompt, *answer]
        states = self._fed(context).to(torch.float16).cpu().numpy()
        columns = [self._accepted(draft, context, len(prompt)) for draft in self._drafts]
        looked_up = self._looked_up(context, len(prompt))
        return TracedPrompt(
            domain=domain,
            prompt_ids=np.asarray(prompt, np.int32),
            token_ids=np.asarray(answer, np.int32),
            accepted=np.asarray([*columns, looked_up[0]], np.uint8).T,
            matched=np.asarray(looked_up[1], np.uint8),
            states=states[len(prompt) - 1 : -1] if self._plan.states else None,
            prompt_state=prompt_mean(states[: len(prompt) - 1]) if self._plan.states else None,
        )

    def _fed(self, context: list[int]) -> torch.Tensor:
        """Feed the target all of a context; return the normed states [tokens, hidden]."""
        decoder, sizes = self._target.decoder, self._target.decoder.config
        hidden = self._target.read(context)
        return F.rms_norm(hidden, (sizes.hidden_size,), decoder.norm, sizes.norm_epsilon)

    def _accepted(self, draft: Draft, context: list[int], first: int) -> list[int]:
        """Return how many proposals are right at each place of the answer."""
        return [
            common_length(self._proposed(draft, context[:end]), context[end:])
            for end in range(first, len(context))
        ]

    def _looked_up(self, context: list[int], first: int) -> tuple[list[int], list[int]]:
        accepted, matched = [], []
        for end in range(first, len(context)):
            proposal = self._lookup.propose(context[:end], self._plan.length, self._greedy)
            accepted.append(common_length(proposal.token_ids, context[end:]))
            matched.append(proposal.matched)
        return accepted, matched

    def _proposed(self, draft: Draft, context: list[int]) -> tuple[int, ...]:
        return draft.propose(context, self._plan.length, self._greedy).token_ids
