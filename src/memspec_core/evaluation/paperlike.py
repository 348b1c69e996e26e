"""Generated traces with the paper's contrasts between drafts, to check policies against its claims.

They say nothing about any model. Each answer is a sequence of passages; a passage has a topic,
which is the prompt's domain or, where it digresses, another one. At each place the draft of the
topic is right with the probability `matched`, the others with `unmatched`; the general draft is the
one of general text. At a share `alike` of the places what is hard for one draft is hard for all, at
the others they are right independently.

A state of the target says with some noise which topic it is at, one number a topic; the prompt's
says how much of each there will be. So a predictor can be trained on such traces as on real ones.

The numbers of `PaperLike` that the paper does not give were found by
`benchmarks/fit_paper_like.py`: so that the tokens an iteration (the acceptance of the paper's
Equation 1), with four proposals and all drafts resident, have the contrasts of its Figure 1, and
the predictor the recall of its Table 2. They are not the only ones that do.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memspec_core.measurement.trace import Trace, TracedPrompt, TraceHeader

DRAFTS = ("general", "code", "math", "law", "medical")
"""Drafts, and the domains of prompts and passages."""

LENGTH = 8


@dataclass(frozen=True)
class PaperLike:
    """How a trace is generated.

    `prompts` of each domain, answers of `tokens`. A passage has `passage_tokens` on average; a
    share `digressing` of them is on the one other topic of the prompt, and `straying` on any.
    `state_noise`, `prompt_noise`: the deviation of each number of a state, and of the prompt's.
    """

    prompts: int = 100
    tokens: int = 128
    prompt_tokens: int = 100
    passage_tokens: int = 34
    digressing: float = 0.186
    straying: float = 0.199
    matched: float = 0.869
    unmatched: float = 0.491
    alike: float = 0.986
    state_noise: float = 0.826
    prompt_noise: float = 0.0746
    seed: int = 0


def paper_like_trace(plan: PaperLike) -> Trace:
    """Generate a trace; the same plan gives the same one."""
    random = np.random.default_rng(plan.seed)
    header = TraceHeader(
        target_sha256="",
        prompts_sha256=f"paper-like, seed {plan.seed}",
        drafts=dict.fromkeys(DRAFTS, ""),
        length=LENGTH,
        max_new_tokens=plan.tokens,
        states=True,
    )
    noise = np.random.default_rng((plan.seed, 1))  # of its own: answers do not depend on states
    prompts = [
        _prompt(plan, domain, random, noise)
        for domain in range(len(DRAFTS))
        for _ in range(plan.prompts)
    ]
    return Trace(header, prompts)


def _prompt(
    plan: PaperLike, domain: int, random: np.random.Generator, noise: np.random.Generator
) -> TracedPrompt:
    topics = _topics(plan, domain, random)
    chance = np.where(topics[:, None] == np.arange(len(DRAFTS)), plan.matched, plan.unmatched)
    draws = random.random(chance.shape)
    alike = random.random(plan.tokens) < plan.alike
    draws = np.where(alike[:, None], draws[:, :1], draws)
    # Beyond the answer's end nothing is right, as in a trace.
    right = np.zeros((plan.tokens + LENGTH, len(DRAFTS)), bool)
    right[: plan.tokens] = draws < chance
    runs = np.stack([right[ahead : ahead + plan.tokens] for ahead in range(LENGTH)])
    return TracedPrompt(
        domain=DRAFTS[domain],
        prompt_ids=np.zeros(plan.prompt_tokens, np.int32),
        token_ids=np.zeros(plan.tokens, np.int32),
        accepted=np.cumprod(runs, axis=0).sum(axis=0).astype(np.uint8),
        matched=np.zeros(plan.tokens, np.uint8),
        states=_states(plan, domain, topics, noise),
        prompt_state=_prompt_state(plan, topics, noise),
    )


def _states(
    plan: PaperLike, domain: int, topics: npt.NDArray[np.int64], noise: np.random.Generator
) -> npt.NDArray[np.float16]:
    """Return the states [n, topics] before each place: what is known is the token before it."""
    known = np.eye(len(DRAFTS))[[domain, *topics[:-1]]]
    return _half(known + plan.state_noise * noise.normal(size=known.shape))


def _prompt_state(
    plan: PaperLike, topics: npt.NDArray[np.int64], noise: np.random.Generator
) -> npt.NDArray[np.float16]:
    """Return the prompt's mean state [topics]."""
    shares = np.eye(len(DRAFTS))[topics].mean(axis=0)
    return _half(shares + plan.prompt_noise * noise.normal(size=shares.shape))


def _half(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float16]:
    return values.astype(np.float16)


def _topics(plan: PaperLike, domain: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the topic at each place [n]."""
    others = [topic for topic in range(len(DRAFTS)) if topic != domain]
    other = int(random.choice(others))
    topics: list[int] = []
    while len(topics) < plan.tokens:
        draw = random.random()
        if draw < plan.straying:
            topic = int(random.choice(others))
        else:
            topic = other if draw < plan.straying + plan.digressing else domain
        topics += [topic] * int(
            random.integers(plan.passage_tokens // 2, 3 * plan.passage_tokens // 2)
        )
    return np.array(topics[: plan.tokens])
