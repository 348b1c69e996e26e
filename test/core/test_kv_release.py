"""Rows that are not taken go back to the system, and can be taken again."""

import mmap
from pathlib import Path

import torch

from core.tiny import CPU, load_target, logits_of


def test_what_is_taken_stays_and_the_rest_goes(target_folder: Path) -> None:
    target = load_target(target_folder, taps=(0, 2))
    tokens = [30 + place % 50 for place in range(250)]
    expected = logits_of(target, tokens)
    kept, features = target.cache.rows.clone(), target.cache.features
    assert features is not None
    before = features.clone()
    target.cache.truncate(64)
    target.cache.release_unused()
    assert torch.equal(features[:64], before[:64])
    assert int(target.cache.rows.count_nonzero()) < int(kept.count_nonzero())
    assert target.cache.rows.device == CPU
    again = logits_of(target, tokens[64:])
    assert torch.allclose(again, expected[64:], atol=1e-4)
    target.cache.truncate(0)
    target.cache.release_unused()
    # Of each head's rows no more stays than what shares its first and its last page with others.
    page_of_each = target.cache.rows.flatten(0, 1).shape[0] * mmap.PAGESIZE
    kept_bytes = int(target.cache.rows.count_nonzero()) * target.cache.rows.element_size()
    assert kept_bytes <= page_of_each
