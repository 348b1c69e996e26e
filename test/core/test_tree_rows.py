"""Rows of a tree in a decoder and its cache: each is that of its path fed as a chain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.conftest import Checkpoints
from core.tiny import CPU, make_model
from memspec_core.models.decoder import Decoder
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.native import library as native
from memspec_core.models.target import plan_target

CAPACITY = 256
SIZES = {"vocab_size": 192, "num_hidden_layers": 2}
HEADS = {
    "native": {"num_key_value_heads": 1},
    "native, heads of 32": {
        "hidden_size": 192,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
    },
    "torch": {},
}


@dataclass
class Machine:
    """A decoder, how its rows are compared, and how its cache is read."""

    decoder: Decoder
    same: Callable[[torch.Tensor, torch.Tensor], None]
    native: bool

    def cache(self) -> KeyValueCache:
        dtype = torch.float16 if self.native else torch.float32
        return KeyValueCache(self.decoder.config, CAPACITY, dtype, CPU)

    def held(self, cache: KeyValueCache) -> torch.Tensor:
        """Return the cache's rows [layers, 2 * kv_heads, length, head_size] by position."""
        heads = self.decoder.config.kv_heads
        layers, _, positions, size = cache.rows.shape
        keys = cache.rows[:, :heads]
        if self.native:
            blocks = keys.reshape(layers, heads, positions // 16, size, 16)
            keys = blocks.permute(0, 1, 2, 4, 3).reshape(layers, heads, positions, size)
        return torch.cat((keys, cache.rows[:, heads:]), dim=1)[:, :, : cache.length]


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found, expected)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=HEADS)
def machine(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Machine:
    kind: str = request.param
    is_native = kind.startswith("native")
    if is_native and native.library() is None:
        pytest.skip("the native step is not there")
    folder = checkpoints.save(f"tree-{kind}", make_model(seed=5, **SIZES, **HEADS[kind]))
    dtype = "bf16" if is_native else "fp32"
    plan = plan_target(str(folder), dtype=dtype, device=CPU, context_tokens=CAPACITY)
    assert plan.backend.name == ("native" if is_native else "torch")
    return Machine(plan._decoder(lambda: None), equal if is_native else close, is_native)


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    """Return the rows from the context's child to `row`."""
    return [] if row < 0 else [*path_to(parents[row], parents), row]


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of up to 40 rows, some of them deep."""
    count = draw(st.integers(1, 40))
    backs = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    return [max(-1, row - 1 - back) for row, back in enumerate(backs)]


contexts = st.integers(0, 150)
tokens_of_rows = st.lists(st.integers(0, 191), min_size=40, max_size=40)


def begun(machine: Machine, context: int) -> KeyValueCache:
    cache = machine.cache()
    if context:
        machine.decoder.forward([(11 * i * i + i) % 192 for i in range(context)], cache)
    return cache


def fed(
    machine: Machine,
    cache: KeyValueCache,
    tokens: Sequence[int],
    parents: list[int],
    cuts: set[int],
) -> torch.Tensor:
    """Feed a tree in passes that begin at the cuts."""
    edges = sorted({0, len(parents)} | {cut for cut in cuts if cut < len(parents)})
    parts = [
        machine.decoder.forward(tokens[first:end], cache, parents[:end])
        for first, end in pairwise(edges)
    ]
    return torch.cat(parts)


@settings(max_examples=40)
@given(data=st.data(), context=contexts, parents=trees(), tokens=tokens_of_rows)
def test_a_row_is_that_of_its_path(
    data: st.DataObject, machine: Machine, context: int, parents: list[int], tokens: list[int]
) -> None:
    cuts = data.draw(st.sets(st.integers(1, 39), max_size=4))
    cache = begun(machine, context)
    hidden = fed(machine, cache, tokens, parents, cuts)
    assert cache.length == context + len(parents)
    row = data.draw(st.integers(0, len(parents) - 1))
    path = path_to(row, parents)
    chain = begun(machine, context)
    expected = machine.decoder.forward([tokens[row] for row in path], chain)
    machine.same(hidden[path], expected)

    machine.decoder.keep(cache, context, path)
    assert cache.length == chain.length == context + len(path)
    machine.same(machine.held(cache), machine.held(chain))
    machine.same(machine.decoder.forward([3], cache), machine.decoder.forward([3], chain))


def test_a_chain_as_a_tree(machine: Machine) -> None:
    tokens = list(range(20, 40))
    plain, tree = machine.cache(), machine.cache()
    expected = machine.decoder.forward(tokens, plain)
    machine.same(machine.decoder.forward(tokens, tree, range(-1, 19)), expected)
    machine.same(machine.held(tree), machine.held(plain))


def test_siblings_do_not_see_each_other(machine: Machine) -> None:
    one, other = begun(machine, 5), begun(machine, 5)
    hidden = machine.decoder.forward([7, 8, 9], one, [-1, -1, 0])
    changed = machine.decoder.forward([7, 80, 9], other, [-1, -1, 0])
    machine.same(hidden[[0, 2]], changed[[0, 2]])
    assert not torch.equal(hidden[1], changed[1])


def test_keeping_nothing_of_a_tree_rolls_back(machine: Machine) -> None:
    cache = begun(machine, 20)
    before = machine.held(cache).clone()
    machine.decoder.forward([7, 8], cache, [-1, -1])
    machine.decoder.keep(cache, 20, [])
    equal(machine.held(cache), before)


@pytest.mark.parametrize(
    ("tokens", "parents"), [([1, 2], [-1, 1]), ([1], [-2]), ([1, 2], [-1]), ([1], [-1] * 7)]
)
def test_what_is_no_tree_is_an_error(
    machine: Machine, tokens: list[int], parents: list[int]
) -> None:
    cache = begun(machine, 5)
    with pytest.raises((ValueError, RuntimeError), match=r"parent|tree"):
        machine.decoder.forward(tokens, cache, parents)
    assert cache.length == 5
