"""The distribution that tokens are drawn from."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.tiny import CPU, assert_law, sampling
from memspec_core.request import SamplingSettings
from memspec_core.speculation.sampling import Sampler


def logits(size: int = 12, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(1, size, generator=torch.Generator().manual_seed(seed))


def distribution(settings: SamplingSettings, values: torch.Tensor) -> torch.Tensor:
    return Sampler(settings, CPU).distribution(values)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0, 100.0])
def test_temperature(temperature: float) -> None:
    values = logits()
    expected = (values / temperature).softmax(-1)
    torch.testing.assert_close(distribution(sampling(temperature), values), expected)


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38, 1e-45, 1e-300])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    values = logits(scale=30.0)
    found = distribution(sampling(temperature), values)
    assert int(found.argmax()) == int(values.argmax())
    assert float(found.max()) == pytest.approx(1.0)
    assert float(found.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("top_k", [1, 3, 12, 100])
def test_top_k(top_k: int) -> None:
    values = logits()
    best = values[0].topk(min(top_k, 12)).indices
    expected = torch.zeros(1, 12)
    expected[0, best] = values[0, best].softmax(-1)
    torch.testing.assert_close(distribution(sampling(top_k=top_k), values), expected)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    values = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.4, 1), (0.5, 1), (0.51, 2), (0.79, 2), (0.9, 3), (0.99, 4)):
        found = distribution(sampling(top_p=top_p), values)
        assert int((found > 0).sum()) == kept, top_p
        assert float(found.sum()) == pytest.approx(1.0)
        expected = values[0].exp()[:kept] / values[0].exp()[:kept].sum()
        torch.testing.assert_close(found[0, :kept], expected)


def test_zero_and_one_switch_top_p_off() -> None:
    for top_p in (0.0, 1.0):
        found = distribution(sampling(top_p=top_p), logits())
        torch.testing.assert_close(found, logits().softmax(-1))


@given(
    temperature=st.floats(1e-6, 100.0),
    top_k=st.integers(0, 20),
    top_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 100),
)
def test_always_a_distribution(temperature: float, top_k: int, top_p: float, seed: int) -> None:
    settings = sampling(temperature, top_k=top_k, top_p=top_p)
    found = distribution(settings, logits(seed=seed, scale=20.0))
    assert found.dtype is torch.float32
    assert bool((found >= 0).all())
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-4)
    assert 0 <= Sampler(settings, CPU).draw(found[0]) < 12


def test_half_precision_logits_are_computed_in_fp32() -> None:
    values = logits().half()
    torch.testing.assert_close(distribution(sampling(), values), values.float().softmax(-1))


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_a_seed_draws_the_same_again(seed: int) -> None:
    weights = torch.ones(1000)

    def draws(used: int) -> list[float]:
        sampler = Sampler(sampling(seed=used), CPU)
        return [*(float(sampler.draw(weights)) for _ in range(5)), sampler.uniform()]

    assert draws(seed) == draws(seed)
    assert draws(seed) != draws(seed ^ 12345)


def test_draws_follow_their_weights() -> None:
    weights = torch.tensor([5.0, 0.0, 3.0, 2.0])  # they need not sum to one
    sampler = Sampler(sampling(), CPU)
    counts = [0] * 4
    for _ in range(2000):
        counts[sampler.draw(weights)] += 1
    assert_law(counts, (weights / 10.0).tolist())


def test_uniform_numbers() -> None:
    sampler = Sampler(sampling(), CPU)
    drawn = [sampler.uniform() for _ in range(2000)]
    assert all(0.0 <= number < 1.0 for number in drawn)
    assert_law([sum(int(n * 10) == tenth for n in drawn) for tenth in range(10)], [0.1] * 10)
