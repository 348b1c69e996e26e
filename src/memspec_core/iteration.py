"""The one event of the runtime: what a draft-and-verify iteration did.

Streaming, accounting, diagnostics and figures are all readers of it.
"""

from dataclasses import dataclass, field

from memspec_core.request import PLAIN, FinishReason


@dataclass(frozen=True)
class IterationSeconds:
    """Where the time of one iteration went.

    `decode`: drafting and verifying; `prediction`: ranking at the scheduling point before it;
    `load_wait`: decoding stopped for a load before it; `prompt`: prompt processing before it
    (first iteration only).
    """

    decode: float = 0.0
    prediction: float = 0.0
    load_wait: float = 0.0
    prompt: float = 0.0


@dataclass(frozen=True)
class Iteration:
    """One draft-and-verify iteration of one generation.

    `draft` ran ("none": plain decoding) where the strategy wanted `wanted`; of `proposed` draft
    tokens the target accepted `accepted` and added one of its own; `committed` counts what of
    that came before the answer's end (0 in a closing event, which only hands out the rest after
    an interruption or a fault), `generated_tokens` the answer so far.

    `token_ids` and `text` are what became final: a token is held back while its text is not whole
    characters or may yet turn out to be part of a stop string, so that the concatenation over all
    iterations equals the result. `finish_reason` is set on the last one.
    """

    sequence: int
    draft: str
    wanted: str
    proposed: int
    accepted: int
    committed: int
    token_ids: tuple[int, ...]
    text: str
    generated_tokens: int
    seconds: IterationSeconds = field(default_factory=IterationSeconds)
    finish_reason: FinishReason | None = None

    @property
    def fallback(self) -> bool:
        """Whether another draft than the wanted one ran, for want of residency."""
        return self.draft != self.wanted

    @property
    def ran(self) -> bool:
        """Whether the target ran; false for a closing event."""
        return self.committed > 0 or self.seconds.decode > 0.0

    @property
    def judged(self) -> int:
        """Positions of the proposed chain that the target judged: up to the first it refused.

        Of a tree the accepted path counts, and one more token.
        """
        return min(self.accepted + 1, self.proposed)

    @property
    def plain(self) -> bool:
        """Whether no draft took part."""
        return self.draft == PLAIN
