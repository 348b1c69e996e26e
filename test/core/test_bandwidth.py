"""The read bandwidth; how much it is, is the machine's affair."""

import pytest
import torch

from memspec_core.measurement.bandwidth import read_bandwidth, torch_threads


def test_bytes_over_the_median_of_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    # One reading takes from an even moment to the next odd one; the first is not counted.
    moments = iter([0.0, 50.0, 100.0, 101.0, 200.0, 204.0, 300.0, 302.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    assert read_bandwidth(1, size_bytes=800, repeats=3) == 400.0
    assert list(moments) == []


def test_the_threads_are_those_asked_for_and_then_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, seen = torch.get_num_threads(), []
    summed = torch.Tensor.sum

    def watched(words: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return summed(words)

    monkeypatch.setattr(torch.Tensor, "sum", watched)
    assert read_bandwidth(before + 1, size_bytes=8000, repeats=2) > 0.0
    assert seen == [before + 1] * 3
    assert torch.get_num_threads() == before


def test_threads_are_restored_after_a_failure() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="broken"), torch_threads(before + 1):
        raise ValueError("broken")
    assert torch.get_num_threads() == before
