"""One generation on the target: its context, KV caches and answer, iteration by iteration."""

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch

from memspec_core.clock import Clock
from memspec_core.errors import PromptTooLongError
from memspec_core.iteration import Iteration, IterationSeconds
from memspec_core.models.target import Target
from memspec_core.models.text import Piece
from memspec_core.request import PLAIN, FinishReason, GenerationRequest
from memspec_core.speculation.acceptance import accept_greedy, accept_sampled, accept_tree
from memspec_core.speculation.answer import Answer
from memspec_core.speculation.proposal import Draft, Proposal
from memspec_core.speculation.sampling import Sampler

PROMPT_ROWS = 256
"""Prompt tokens in one pass; an interruption is seen between passes."""

Interruption = Callable[[], FinishReason | None]


class Decoding:
    """Draft-and-verify over one context.

    `interruption` is asked before each iteration and each part of the prompt; a reason that it
    gives ends the generation with what there is. `close` rolls every KV cache back to tokens
    that are part of the context.
    """

    def __init__(
        self,
        target: Target,
        prompt_ids: Sequence[int],
        request: GenerationRequest,
        *,
        max_new_tokens: int,
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
        self._context = list(prompt_ids)
        self._prompt_tokens = len(prompt_ids)
        self._sampler = Sampler(request.sampling, target.decoder.device)
        self._answer = Answer(
            target.tokenizer.decode,
            stop=request.stop,
            end_of_sequence_ids=target.end_of_sequence_ids,
            max_tokens=min(max_new_tokens, room),
        )
        self._interruption = interruption
        self._clock = clock
        # Weak, since a draft that the cache evicts in mid-answer must be free at once.
        self._drafts: WeakValueDictionary[int, Draft] = WeakValueDictionary()
        self._iterations = 0
        target.cache.truncate(0)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete or was interrupted."""
        return self._answer.finish_reason is not None

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The tokens of the prompt."""
        return self._context[: self._prompt_tokens]

    def recent_ids(self, count: int) -> Sequence[int]:
        """Return the last `count` generated tokens, or all where there are fewer."""
        return self._context[max(self._prompt_tokens, len(self._context) - count) :]

    def read_prompt(self) -> None:
        """Fill the target's cache with all of the prompt but its last token."""
        last = self._prompt_tokens - 1
        for first in range(0, last, PROMPT_ROWS):
            if self._interruption() is not None:
                return
            self._feed(self._context[first : min(first + PROMPT_ROWS, last)])

    def iterate(
        self, draft: Draft | None, wanted: str, length: int, seconds: IterationSeconds
    ) -> Iteration:
        """Run one iteration of up to `length` proposals; plain decoding without a draft.

        `seconds` tells what was spent before; the time of drafting and verifying is added.
        """
        self._answer.finish_reason = self._interruption()
        if self.ended:
            return self._event(_name(draft), wanted, seconds, self._answer.take())
        started = self._clock.now()
        proposal = self._proposed(draft, length)
        accepted, tokens = self._verified(proposal)
        committed = self._answer.extend(tokens)
        self._commit(tokens[:committed])
        spent = IterationSeconds(
            self._clock.now() - started, seconds.prediction, seconds.load_wait, seconds.prompt
        )
        if draft is not None and not proposal.token_ids:
            # Nothing proposed: the answer's last token, the draft's own context is full, or a
            # lookup found nothing.
            draft, wanted = None, PLAIN
        return self._event(
            _name(draft),
            wanted,
            spent,
            self._answer.take(),
            proposed=len(proposal.token_ids),
            accepted=min(accepted, committed),
            committed=committed,
        )

    def rest(self) -> Iteration:
        """Hand out what is held back, for an answer that a fault ends."""
        return self._event(PLAIN, PLAIN, IterationSeconds(), self._answer.rest())

    def close(self) -> None:
        """Leave every cache with rows of the context only."""
        self._roll_back()

    def _proposed(self, draft: Draft | None, length: int) -> Proposal:
        length = min(length, self._answer.remaining_tokens - 1)
        if draft is None or length <= 0:
            return Proposal()
        if id(draft) not in self._drafts:
            draft.rollback(0)
            self._drafts[id(draft)] = draft
        return draft.propose(self._context, length, self._sampler)

    def _verified(self, proposal: Proposal) -> tuple[int, list[int]]:
        """Return how many proposals the target accepts, and the tokens that result."""
        if proposal.parents is not None:
            return self._verified_tree(proposal.token_ids, proposal.parents)
        proposed = proposal.token_ids
        unseen = self._context[self._target.cache.length :]
        hidden = self._feed([*unseen, *proposed])
        logits = self._target.decoder.logits(hidden[-1 - len(proposed) :])
        if self._sampler.greedy:
            accepted, extra = accept_greedy(proposed, logits.argmax(dim=-1).tolist())
        else:
            p = self._sampler.distribution(logits)
            accepted, extra = accept_sampled(proposed, proposal.probabilities, p, self._sampler)
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
        logits = decoder.logits(decoder.forward([newest, *proposed], cache, rows))
        if self._sampler.greedy:
            best = logits.argmax(dim=-1).tolist()
            path, extra = accept_tree(proposed, parents, lambda place: int(best[place + 1]))
        else:
            p = self._sampler.distribution(logits)
            path, extra = accept_tree(
                proposed, parents, lambda place: self._sampler.draw(p[place + 1])
            )
        decoder.keep(cache, start, [0, *(place + 1 for place in path)])
        return len(path), [*(proposed[place] for place in path), extra]

    def _commit(self, tokens: Sequence[int]) -> None:
        self._context.extend(tokens)
        self._roll_back()

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
