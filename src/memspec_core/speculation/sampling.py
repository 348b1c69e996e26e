"""From logits to the distribution that a token is drawn from."""

import torch

from memspec_core.request import SamplingSettings

_LEAST_TEMPERATURE = 1e-6
"""Below it the most probable token has all the mass in fp32; division would give infinities."""


class Sampler:
    """Temperature, top-k and top-p in fp32, and the generator that draws.

    Target and draft go through the same sampler, so that the acceptance ratio compares the
    distributions that were really drawn from.
    """

    def __init__(self, settings: SamplingSettings, device: torch.device) -> None:
        self.settings = settings
        self._generator = torch.Generator(device=device)
        self._generator.manual_seed(settings.seed)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.settings.greedy

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Return probabilities [n, m] in fp32 for logits [n, m]."""
        centred = logits.float() - logits.float().amax(dim=-1, keepdim=True)
        scaled = centred / max(self.settings.temperature, _LEAST_TEMPERATURE)
        if 0 < self.settings.top_k < scaled.shape[-1]:
            least = scaled.topk(self.settings.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        probabilities = scaled.softmax(dim=-1)
        if 0.0 < self.settings.top_p < 1.0:
            probabilities = _nucleus(probabilities, self.settings.top_p)
        return probabilities

    def draw(self, probabilities: torch.Tensor) -> int:
        """Draw one index from weights [m] that need not sum to one."""
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def uniform(self) -> float:
        """Draw a number from [0, 1)."""
        device = self._generator.device
        return float(torch.rand((), generator=self._generator, device=device))


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the most probable tokens whose mass first reaches `top_p` (Holtzman et al.)."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    mass_before[..., 0] = -1.0  # the first stays, also where top_p is zero in fp32
    ordered = ordered.masked_fill(mass_before >= top_p, 0.0)
    kept = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)
