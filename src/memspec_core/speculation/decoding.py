"""One generation on the target: its context, KV caches and answer, iteration by iteration."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import numpy as np
import torch

from memspec_core.clock import Clock
from memspec_core.errors import ModelError, PromptTooLongError
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.models.target import Target
from memspec_core.models.text import Piece
from memspec_core.prediction.context import POSITIONS, Vector
from memspec_core.request import LOOKUP, PLAIN, FinishReason, GenerationRequest
from memspec_core.speculation.acceptance import accept_greedy, accept_sampled, accept_tree
from memspec_core.speculation.answer import Answer
from memspec_core.speculation.calibration import MOST_ROWS
from memspec_core.speculation.course import Interruption
from memspec_core.speculation.feature import FeatureDraft
from memspec_core.speculation.lookup import NgramLookup
from memspec_core.speculation.planner import Candidate, Plan, Planner, fixed_plan
from memspec_core.speculation.proposal import Draft, Proposal
from memspec_core.speculation.sampling import Sampler
from memspec_core.speculation.structure import Document

PROMPT_ROWS = 256
"""Prompt tokens in one pass; an interruption is seen between passes."""

SURE_MATCH = 3
"""Where the length is fixed, a lookup that matched so many tokens goes before a draft."""


class Decoding:
    """Draft-and-verify over one context.

    `planner` chooses what each iteration proposes; with a `lookup` that competes with the draft.
    `interruption` is asked before each iteration and each part of the prompt; a reason that it
    gives ends the generation with what there is. What the target's cache holds of the prompt from
    the generation before is kept. With a `document` the target's tokens are chosen among those that
    may follow in it. `close` rolls every KV cache back to tokens of the context.
    """

    def __init__(
        self,
        target: Target,
        prompt_ids: Sequence[int],
        request: GenerationRequest,
        *,
        max_new_tokens: int,
        planner: Planner,
        lookup: NgramLookup | None = None,
        document: Document | None = None,
        interruption: Interruption,
        clock: Clock,
    ) -> None:
        room = target.context_tokens - len(prompt_ids)
        if room < 1:
            raise PromptTooLongError(
                f"The prompt has {len(prompt_ids)} tokens; the context holds "
                f"{target.context_tokens}, the answer included. Shorten it or raise "
                "context_tokens."
            )
        self._target = target
        self._prompt_ids = prompt_ids
        self._context = list(prompt_ids)
        self._prompt_tokens = len(prompt_ids)
        self._sampler = Sampler(request.sampling, target.decoder.device)
        self._planner = planner if self._sampler.greedy else planner.untimed()
        self._lookup = lookup
        self._document = document
        ends = target.end_of_sequence_ids | (document.end_ids if document else frozenset())
        self._answer = Answer(
            target.tokenizer.decode,
            stop=request.stop,
            end_of_sequence_ids=ends,
            max_tokens=min(max_new_tokens, room),
        )
        self._interruption = interruption
        self._clock = clock
        # Weak, since a draft that the cache evicts in mid-answer must be free at once.
        self._drafts: WeakValueDictionary[int, Draft] = WeakValueDictionary()
        self._read: dict[int, int] = {}
        self._iterations = 0
        self._ended_at: float | None = None
        self._prompt_state: Vector | None = None
        target.cache.settled = None  # before its rows are written over
        target.cache.keep_common(prompt_ids[:-1])

    @property
    def ended(self) -> bool:
        """Whether the answer is complete or was interrupted."""
        return self._answer.finish_reason is not None

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The tokens of the prompt."""
        return self._prompt_ids

    @property
    def generated_tokens(self) -> int:
        """How many tokens of the answer are verified."""
        return len(self._context) - self._prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens the length limit allows."""
        return self._answer.remaining_tokens

    def recent_ids(self, count: int) -> Sequence[int]:
        """Return the last `count` generated tokens, or all where there are fewer."""
        return self._context[max(self._prompt_tokens, len(self._context) - count) :]

    @property
    def prompt_state(self) -> Vector | None:
        """The mean [hidden] of the target's states at the prompt's end, None if it keeps none."""
        if self._prompt_state is None:
            last = self._prompt_tokens - 1
            self._prompt_state = self._mean_state(max(0, last - POSITIONS), last)
        return self._prompt_state

    def recent_state(self, count: int) -> Vector | None:
        """Return the mean [hidden] of the target's last `count` states of the answer.

        They begin with the prompt's newest token; the answer's newest has none yet. None where
        there are none.
        """
        if not self.generated_tokens:
            return None
        end = min(len(self._context) - 1, self._target.cache.length)
        return self._mean_state(max(self._prompt_tokens - 1, end - count), end)

    def read_prompt(self) -> None:
        """Feed all of the prompt but its last token to the target, and have the lookup read it."""
        last = self._prompt_tokens - 1
        for first in range(self._target.cache.length, last, PROMPT_ROWS):
            if self._interruption() is not None:
                return
            self._feed(self._context[first : min(first + PROMPT_ROWS, last)])
        if self._lookup is not None:
            self._lookup.read(self._context)

    def catch_up(self, draft: Draft) -> None:
        """Have a draft that pays read what it has not seen of the context."""
        if self._planner.pays(draft.name):
            draft.read(self._context)
            self._remember(draft, len(self._context))

    def unseen_tokens(self, draft: Draft) -> int:
        """Return how many tokens of the context a draft has not read."""
        if id(draft) not in self._drafts:
            self._remember(draft, draft.known(self._context))
        return len(self._context) - self._read[id(draft)]

    def iterate(
        self, draft: Draft | None, wanted: str, length: int, seconds: IterationSeconds
    ) -> Iteration:
        """Run one iteration with `length` proposals, or with what the planner chooses if it is 0.

        Plain decoding without a draft or lookup. `seconds` tells what was spent since the last
        iteration; all other time since then is added as decoding: drafting, verifying, and handing
        out what the last one gave.
        """
        self._answer.finish_reason = self._interruption()
        begins = self._document is not None and not self.generated_tokens
        opened = self._append([]) if begins and not self.ended else 0
        if self.ended:
            piece = self._answer.take()
            return self._event(_name(draft), wanted, seconds, piece, committed=opened)
        started = self._clock.now()
        room = self._answer.remaining_tokens - 1
        plan, proposal = self._proposed(draft, room, length)
        name = plan.source if proposal.token_ids else PLAIN
        drafted = self._clock.now()
        forced = len(self._context) - self._target.cache.length - 1
        accepted, tokens = self._verified(proposal)
        committed = self._append(tokens)
        verified = self._clock.now()
        self._planner.observe(
            plan if proposal.token_ids or proposal.steps or plan.least else Plan(),
            len(proposal.token_ids),
            proposal.steps or len(proposal.token_ids),
            accepted,
            drafted - started,
            0.0 if forced else verified - drafted,  # a pass of more rows than were proposed
        )
        since = started if self._ended_at is None else self._ended_at
        self._ended_at = verified
        apart = seconds.prediction + seconds.load_wait + seconds.prompt
        decode = verified - since - (0.0 if since == started else apart)
        spent = replace(seconds, decode=max(decode, verified - started))
        unable = draft is not None and name == PLAIN and (plan.length > 0 or room <= 0)
        if _name(draft) == wanted or unable:
            wanted = name  # nothing better was missing from memory
        return self._event(
            name,
            wanted,
            spent,
            self._answer.take(),
            proposed=len(proposal.token_ids),
            accepted=min(accepted, committed),
            committed=opened + committed,
        )

    def rest(self) -> Iteration:
        """Hand out what is held back, for an answer that a fault ends."""
        return self._event(PLAIN, PLAIN, IterationSeconds(), self._answer.rest())

    def close(self) -> None:
        """Leave every cache with rows of the context only."""
        self._roll_back()

    def _proposed(self, draft: Draft | None, room: int, length: int) -> tuple[Plan, Proposal]:
        """Return what is proposed, and the plan that it follows."""
        looked_up = Proposal()
        if self._lookup is not None and room > 0:
            most = min(room, length or MOST_ROWS - 1)
            looked_up = self._lookup.propose(self._context, most, self._sampler)
            if self._document is not None:
                looked_up = looked_up.cut(self._document.count_allowed(looked_up.token_ids))
        plan = self._plan(draft, looked_up, room, length)
        if draft is None or plan.name != draft.name:
            return plan, looked_up.cut(plan.length)
        self._remember(draft, len(self._context))
        if plan.least and isinstance(draft, FeatureDraft):
            found = draft.propose_likely(self._context, plan.length, plan.least, plan.worth)
        else:
            found = draft.propose(self._context, plan.length, self._sampler)
        return plan, self._document.within(found) if self._document else found

    def _remember(self, draft: Draft, tokens: int) -> None:
        """Note how much of the context a draft has read."""
        self._drafts[id(draft)] = draft
        self._read[id(draft)] = tokens

    def _plan(self, draft: Draft | None, looked_up: Proposal, room: int, length: int) -> Plan:
        candidates = []
        if draft is not None and room > 0:
            stops = isinstance(draft, FeatureDraft) and draft.stops and self._sampler.greedy
            candidates.append(Candidate(draft.name, room, self.unseen_tokens(draft), stops))
        if looked_up.token_ids:
            found = Candidate(f"{LOOKUP} {looked_up.matched}", len(looked_up.token_ids))
            surer = looked_up.matched >= SURE_MATCH
            candidates.insert(0 if surer else len(candidates), found)
        if length:
            return fixed_plan(candidates, length)
        return self._planner.choose(candidates)

    def _verified(self, proposal: Proposal) -> tuple[int, list[int]]:
        """Return how many proposals the target accepts, and the tokens that result."""
        if proposal.parents is not None:
            return self._verified_tree(proposal.token_ids, proposal.parents)
        proposed = proposal.token_ids
        unseen = self._context[self._target.cache.length :]
        hidden = self._feed([*unseen, *proposed])[-1 - len(proposed) :]
        if not self._sampler.greedy:
            p = self._distribution(hidden, proposed)
            accepted, extra = accept_sampled(proposed, proposal.probabilities, p, self._sampler)
            if self._document is not None:
                self._document.take(*proposed[:accepted], extra)
        elif self._document is not None:
            chain = range(-1, len(proposed) - 1)
            path, extra = accept_tree(proposed, chain, self._chooser(hidden))
            accepted = len(path)
        else:
            accepted, extra = accept_greedy(proposed, self._most_probable(hidden))
        return accepted, [*proposed[:accepted], extra]

    def _verified_tree(
        self, proposed: Sequence[int], parents: Sequence[int]
    ) -> tuple[int, list[int]]:
        """Do the same for a tree; the cache keeps the accepted path of it."""
        decoder, cache = self._target.decoder, self._target.cache
        *unseen, newest = self._context[cache.length :]
        if unseen:
            self._feed(unseen)
        # The context's newest token is the root, so that the tree's places are one higher here.
        start = cache.length
        rows = [-1, *(parent + 1 for parent in parents)]
        hidden = decoder.forward([newest, *proposed], cache, rows)
        path, extra = accept_tree(proposed, parents, self._chooser(hidden))
        decoder.keep(cache, start, [0, *(place + 1 for place in path)])
        return len(path), [*(proposed[place] for place in path), extra]

    def _chooser(self, hidden: torch.Tensor) -> Callable[[int], int]:
        """Return what chooses the target's token after a place of a tree, -1 for its root.

        `hidden` [n + 1, hidden]: the rows of the root and of the n places. It is to be asked along
        one path: a document goes on with what is chosen.
        """
        document, sampler = self._document, self._sampler
        if sampler.greedy:
            own = self._most_probable(hidden)
            if document is None:
                return lambda place: own[place + 1]
            logits = self._target.decoder.logits
            return lambda place: document.take_best(
                own[place + 1], lambda: logits(hidden[place + 1 : place + 2])[0]
            )
        if document is None:
            p = self._distribution(hidden)
            return lambda place: sampler.draw(p[place + 1])
        rows = self._logits(hidden)
        return lambda place: document.take_drawn(rows[place + 1], sampler)

    def _most_probable(self, hidden: torch.Tensor) -> list[int]:
        """Return the target's own tokens [n] after hidden rows [n, hidden]."""
        own, logits = self._target.decoder.most_probable(hidden)
        self._require_finite(sum(logits))
        return own

    def _distribution(self, hidden: torch.Tensor, proposed: Sequence[int] = ()) -> torch.Tensor:
        """Return what the target draws its tokens from [n, m] after hidden rows [n, hidden].

        A document allows what may follow it, and each of the proposed tokens, n - 1 of them.
        """
        logits = self._logits(hidden)
        if self._document is not None:
            logits = self._document.masked_along(logits, proposed)
        return self._sampler.distribution(logits)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the target's logits [n, m] after hidden rows [n, hidden]."""
        logits = self._target.decoder.logits(hidden)
        self._require_finite(float(logits.amax(dim=-1).sum()))
        return logits

    def _require_finite(self, logit: float) -> None:
        """Raise `ModelError` if the target's largest logits, or their sum, are no numbers."""
        if not math.isfinite(logit):
            self._target.cache.truncate(0)  # its rows are no good either
            raise ModelError(
                f"The target {self._target.checkpoint.path} computed logits that are no finite "
                f"numbers, in dtype {self._target.dtype}; check the checkpoint, or take dtype fp32."
            )

    def _mean_state(self, first: int, end: int) -> Vector | None:
        """Return the mean of the target's states at places of the context, normed for its head."""
        decoder, cache = self._target.decoder, self._target.cache
        if cache.features is None or end > cache.length:
            return None
        if first == end:  # a prompt of one token has no state yet: see `prediction.context`
            return np.zeros(decoder.config.hidden_size, np.float32)
        mean: Vector = decoder.mean_state(cache, first, end).cpu().numpy()
        return mean

    def _append(self, tokens: Sequence[int]) -> int:
        """Take verified tokens, and those that a document leaves no choice of after them.

        Returns how many of them came before the answer's end.
        """
        ahead = self._document.take_forced() if self._document else []
        committed = self._answer.extend([*tokens, *ahead])
        if ahead and self._document and self._document.complete:
            whole = committed == len(tokens) + len(ahead) - 1
            if whole:  # also where its last token is the last that the length limit allows
                self._answer.finish_reason = FinishReason.END_OF_SEQUENCE
        self._commit(tokens[:committed])
        # No pass has seen these: rows of rejected tokens in their place are gone before they come.
        self._context.extend(ahead[: max(0, committed - len(tokens))])
        return committed

    def _commit(self, tokens: Sequence[int]) -> None:
        self._context.extend(tokens)
        self._roll_back()
        self._target.cache.settled = (self._context, self._target.cache.length)

    def _roll_back(self) -> None:
        # The newest token of the context is never in a cache: its row is the next pass's first.
        known = len(self._context) - 1
        self._target.cache.truncate(known)
        for draft in self._drafts.values():
            draft.rollback(known)

    def _feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self._target.decoder.forward(token_ids, self._target.cache)

    def _event(
        self,
        draft: str,
        wanted: str,
        seconds: IterationSeconds,
        piece: Piece,
        *,
        proposed: int = 0,
        accepted: int = 0,
        committed: int = 0,
    ) -> Iteration:
        self._iterations += 1
        return Iteration(
            sequence=self._iterations - 1,
            draft=draft,
            wanted=wanted,
            proposed=proposed,
            accepted=accepted,
            committed=committed,
            token_ids=piece.token_ids,
            text=piece.text,
            generated_tokens=self._answer.generated_tokens,
            seconds=seconds,
            finish_reason=self._answer.finish_reason,
        )


def _name(draft: Draft | None) -> str:
    return PLAIN if draft is None else draft.name
