"""Which proposed tokens the target accepts, and the one it adds."""

from collections.abc import Callable, Sequence

import torch

from memspec_core.speculation.sampling import Sampler


def accept_greedy(proposed: Sequence[int], own: Sequence[int]) -> tuple[int, int]:
    """Return how many proposed tokens equal the target's own, and the target's next token.

    `own` [n + 1]: the target's most probable token after the context and after each proposal.
    """
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == own[accepted]:
        accepted += 1
    return accepted, own[accepted]


def accept_sampled(
    proposed: Sequence[int], draft: torch.Tensor | None, target: torch.Tensor, sampler: Sampler
) -> tuple[int, int]:
    """Rejection sampling that keeps the target's law (Leviathan et al., Chen et al.).

    `draft` [n, m] and `target` [n + 1, m]: final distributions in fp32; no `draft` where each
    proposal was certain, which is q(x) = 1. Accepts x with probability min(1, p(x) / q(x)); the
    token after the first rejection is drawn from max(0, p - q), the one after full acceptance
    from p.
    """
    for index, token in enumerate(proposed):
        p = target[index]
        q = None if draft is None else draft[index]
        chance = 1.0 if q is None else float(q[token])
        if sampler.uniform() * chance >= float(p[token]):
            return index, sampler.draw(_after_rejection(p, q, token))
    return len(proposed), sampler.draw(target[len(proposed)])


def accept_tree(
    proposed: Sequence[int], parents: Sequence[int], own: Callable[[int], int]
) -> tuple[list[int], int]:
    """Return the accepted path of a tree, as places in it, and the target's next token.

    `own(place)` is the target's token after that node, or after the context for -1: its most
    probable one, or one drawn from its law there. It is asked once a node of the path, so that a
    tree that does not depend on what is drawn keeps the target's law (SpecExec).
    """
    path: list[int] = []
    place = -1
    while True:
        token = own(place)
        steps = zip(proposed, parents, strict=True)
        found = [child for child, step in enumerate(steps) if step == (token, place)]
        if not found:
            return path, token
        place = found[0]
        path.append(place)


def _after_rejection(p: torch.Tensor, q: torch.Tensor | None, token: int) -> torch.Tensor:
    """Return the weights [m] of the token in place of a rejected one."""
    if q is None:
        remainder = p.clone()
        remainder[token] = 0.0
    else:
        remainder = (p - q).clamp(min=0.0)
    # Without a remainder nothing is rejected but by rounding; p itself is then right.
    return remainder if float(remainder.sum()) > 0.0 else p
