"""A tree of the paths that a draft finds most probable, grown best first.

After SpecExec (Svirschevski et al., 2024): since a child is never more probable than its parent,
the n most probable nodes are a tree, and growing it by depth takes one draft pass a depth.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memspec_core.speculation.chain import IndependentDraft
from memspec_core.speculation.model_draft import ModelDraft
from memspec_core.speculation.proposal import Proposal
from memspec_core.speculation.sampling import Sampler

MAX_BEAMS = 16
"""Nodes that one draft pass follows at most; the native step takes 64."""


@dataclass(frozen=True, eq=False)
class Node:
    """A token after a path: `score` is the log-probability of the path and the token."""

    token_id: int
    parent: "Node | None"
    score: float


Children = list[tuple[int, float]]
"""Tokens with their log-probabilities."""


def best_tree(
    roots: Children,
    follow: Callable[[Sequence[Node]], list[Children]],
    budget: int,
    max_beams: int = MAX_BEAMS,
) -> list[Node]:
    """Return the `budget` most probable nodes, the best first and parents before children.

    `roots` are what may follow the context. `follow` gives what may follow some nodes, the likelier
    first; for fewer of them where there is no room for more. The result is exact unless a depth
    has more than `max_beams` nodes worth following.
    """
    kept = _best([Node(token, None, score) for token, score in roots], budget)
    new = set(kept)
    while opened := [node for node in kept[: budget - 1] if node in new][:max_beams]:
        # The last of a full tree is not followed: its children can only be worse.
        found = [
            Node(token, node, node.score + score)
            for node, children in zip(opened, follow(opened), strict=False)
            for token, score in children
        ]
        kept = _best([*kept, *found], budget)
        new = set(found)
    return kept


def _best(nodes: list[Node], budget: int) -> list[Node]:
    # The sort keeps the order of equals: parents, which are older, stay in front.
    return sorted(nodes, key=lambda node: -node.score)[:budget]


def to_proposal(tree: Sequence[Node]) -> Proposal:
    """Return nodes, parents before children, as a proposal."""
    places = {node: place for place, node in enumerate(tree)}
    parents = tuple(-1 if node.parent is None else places[node.parent] for node in tree)
    return Proposal(tuple(node.token_id for node in tree), parents=parents)


class TreeShaped(ModelDraft):
    """A draft with a model that proposes trees.

    Nothing in them is drawn at random: with a sampler that samples, its distribution of the
    draft's logits ranks the paths, since that is what the target's tokens are drawn from.
    """

    def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
        """Propose a tree of up to `length` tokens after the context; none where the cache is full.

        The cache is left with the context alone.
        """
        if self._room(context) <= 0 or length <= 0:
            return Proposal()
        newest = self._catch_up(context)
        known = self._cache.length
        roots = self._children(self._logits(newest), length, sampler)[0]
        rows: dict[Node | None, int] = {None: -1}
        states: dict[Node | None, torch.Tensor] = {None: newest[0]}
        parents: list[int] = []

        def follow(nodes: Sequence[Node]) -> list[Children]:
            nodes = nodes[: self._cache.capacity - self._cache.length]
            if not nodes:
                return []
            for node in nodes:
                rows[node] = len(parents)
                parents.append(rows[node.parent])
            before = torch.stack([states[node.parent] for node in nodes])
            hidden = self._follow([node.token_id for node in nodes], before, parents)
            states.update(zip(nodes, hidden, strict=True))
            return self._children(self._logits(hidden), length, sampler)

        tree = best_tree(roots, follow, length)
        self._cache.truncate(known)
        return to_proposal(tree)

    def _children(self, logits: torch.Tensor, count: int, sampler: Sampler) -> list[Children]:
        """Return the most probable tokens for each row of logits [n, m]."""
        if sampler.greedy:
            scores = logits.float().log_softmax(dim=-1)
        else:
            scores = sampler.distribution(logits).log()
        best = scores.topk(min(count, scores.shape[-1]), dim=-1)
        # Rounding may put a probability above one, but no child above its parent.
        return [
            [
                (self._token(index), min(score, 0.0))
                for index, score in zip(indices, row, strict=True)
                if math.isfinite(score)
            ]
            for indices, row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


class TreeDraft(TreeShaped, IndependentDraft):
    """A causal draft that proposes trees."""
