"""What a JSON schema lets an answer go on with: the state of a document beside its tokens."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from memspec_core.errors import SchemaError
from memspec_core.models.target import Target
from memspec_core.speculation.proposal import Proposal
from memspec_core.speculation.sampling import Sampler
from memspec_core.speculation.schema import grammar_of, library, limits, require_usable

KEPT_GRAMMARS = 8

TABLE_BYTES = 900
"""That the library's table of tokens takes for each of them, with the grammars that are kept."""


class Grammars:
    """Documents of one target, by schema; the last few grammars are kept.

    The table of the target's tokens is built for the first document, which takes 0.2 s for 49,152
    of them. `book` is told its bytes before, and may raise `MemoryBudgetError`. For the thread that
    decodes.
    """

    def __init__(self, target: Target, book: Callable[[int], None]) -> None:
        self._target = target
        self._book = book
        self._table: Any = None
        self._grammars: OrderedDict[str, Any] = OrderedDict()

    def begin(self, schema: str) -> "Document":
        """Begin a document that is valid for a schema; raises `SchemaError`."""
        matcher = self._grammars.pop(schema, None) or self._compiled(schema)
        self._grammars[schema] = matcher
        if len(self._grammars) > KEPT_GRAMMARS:
            self._grammars.popitem(last=False)
        return Document(matcher.deep_copy(), self._tokens())

    def _compiled(self, schema: str) -> Any:
        grammar = grammar_of(schema)
        matcher = library().LLMatcher(self._tokens(), grammar, log_level=0, limits=limits())
        require_usable(matcher)
        return matcher

    def _tokens(self) -> Any:
        if self._table is None:
            guidance = library()
            vocabulary_size = self._target.decoder.config.vocabulary_size
            tokenizer = self._target.tokenizer.serialised()
            if tokenizer is None:
                raise SchemaError(
                    f"The tokenizer in {self._target.tokenizer.where} is not of the kind that a "
                    "json_schema needs: one with a tokenizer.json."
                )
            self._book(TABLE_BYTES * vocabulary_size)
            self._table = guidance.LLTokenizer(
                tokenizer,
                n_vocab=max(vocabulary_size, len(self._target.tokenizer.token_map())),
                eos_token=sorted(self._target.end_of_sequence_ids) or None,
                slices=guidance.LLTokenizer.json_slices(),
            )
        return self._table


class Document:
    """A JSON document in the making: which tokens may follow those that it has taken.

    Where the text leaves no choice, its usual tokens alone may: they are `forced`. A document that
    nothing can follow is `complete`; an end-of-sequence token may follow wherever it could end.
    """

    def __init__(self, matcher: Any, table: Any) -> None:
        self._matcher = matcher
        self._forced: list[int] | None = None
        self._bits = np.empty((1, (table.vocab_size + 31) // 32), np.int32)
        self.end_ids = frozenset(int(token) for token in table.eos_tokens)

    @property
    def complete(self) -> bool:
        """Whether it is whole, and nothing may follow it."""
        matcher = self._matcher
        return bool(matcher.is_accepting()) and matcher.stop_reason().startswith("NoExtension")

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of some tokens may follow, one after the other."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def within(self, proposal: Proposal) -> Proposal:
        """Return of a draft's proposal what may follow; the steps that it took remain.

        Of tokens that were drawn by their probabilities the first that may not follow stays: the
        target's law is kept only if it is rejected by the rule for all of them.
        """
        steps = proposal.steps or len(proposal.token_ids)
        if proposal.parents is not None:
            return self._pruned(proposal.token_ids, proposal.parents, steps)
        allowed = self.count_allowed(proposal.token_ids)
        drawn = proposal.probabilities is not None
        return replace(proposal.cut(allowed + drawn), steps=steps)

    def take(self, *token_ids: int) -> None:
        """Go on with tokens; raises `SchemaError` where one may not follow."""
        for token in token_ids:
            if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
                require_usable(self._matcher)
            forced = self._forced
            self._forced = (forced[1:] or None) if forced and forced[0] == token else None

    def take_forced(self) -> list[int]:
        """Go on with everything that is forced, an end-of-sequence token after the last."""
        taken: list[int] = []
        while (token := self._next_forced()) is not None:
            self.take(token)
            taken.append(token)
        return [*taken, min(self.end_ids)] if self.complete else taken

    def take_best(self, best: int, logits: Callable[[], torch.Tensor]) -> int:
        """Go on with the most probable token that may follow, and return it.

        `best` is the most probable of all; `logits` gives those of all [m], where it may not.
        """
        token = self._only()
        if token is None and self._matcher.try_consume_tokens([best]):
            self._forced = None
            return best
        if token is None:
            token = int(self._masked(logits()).max(dim=-1).indices)
        self.take(token)
        return token

    def take_drawn(self, logits: torch.Tensor, sampler: Sampler) -> int:
        """Go on with a token drawn from what may follow, by its logits [m], and return it."""
        token = self._only()
        if token is None:
            token = sampler.draw(sampler.distribution(self._masked(logits)[None])[0])
        self.take(token)
        return token

    def masked_along(self, logits: torch.Tensor, proposed: Sequence[int]) -> torch.Tensor:
        """Return logits [n + 1, m], minus infinity for what may not follow after each of n tokens.

        Rows after a token that may not follow itself, which no one comes to, are as they were.
        """
        result, taken = logits.clone(), 0
        for row, token in enumerate([*proposed, None]):
            only = self._only()
            if only is None:
                result[row] = self._masked(logits[row])
            else:
                result[row] = -torch.inf
                result[row, only] = 0.0
            if token is None or self._matcher.is_stopped() or result[row, token].isneginf():
                break
            self.take(token)
            taken += 1
        self._matcher.rollback(taken)
        self._forced = None
        return result

    def _only(self) -> int | None:
        """Return the one token that may follow, None where there is a choice."""
        return min(self.end_ids) if self._matcher.is_stopped() else self._next_forced()

    def _next_forced(self) -> int | None:
        if self._forced is None:
            self._forced = self._matcher.compute_ff_tokens()
        return self._forced[0] if self._forced else None

    def _masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [m] with minus infinity for what may not follow."""
        bits = self._bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        require_usable(self._matcher)
        known = np.unpackbits(bits.view(np.uint8)[0], bitorder="little")
        allowed = torch.zeros(logits.shape[-1], dtype=torch.bool)
        count = min(len(known), len(allowed))
        allowed[:count] = torch.from_numpy(known[:count]).bool()
        return logits.float().masked_fill(~allowed.to(logits.device), -torch.inf)

    def _pruned(self, token_ids: Sequence[int], parents: Sequence[int], steps: int) -> Proposal:
        """Return a tree without the paths that may not follow."""
        paths: list[list[int]] = []
        places: dict[int, int] = {-1: -1}
        for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            paths.append([*(paths[parent] if parent >= 0 else ()), token])
            if parent in places and self.count_allowed(paths[node]) == len(paths[node]):
                places[node] = len(places) - 1
        kept = [node for node in places if node >= 0]
        return Proposal(
            tuple(token_ids[node] for node in kept),
            parents=tuple(places[parents[node]] for node in kept),
            steps=steps,
        )
