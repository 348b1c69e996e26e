"""Feature drafts: the definition in plain torch, both backends, caches, and decoding with them."""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import PreTrainedModel

from core.conftest import Checkpoints
from core.tiny import (
    CPU,
    ManualClock,
    decode,
    ids_of,
    load_draft,
    load_feature_draft,
    load_target,
    make_model,
    make_settings,
    sampling,
    truncated,
    without_ends,
    write_feature_draft,
)
from memspec_core.cli.inspect import describe_draft
from memspec_core.engine import load_engine
from memspec_core.errors import CheckpointError
from memspec_core.models.decoder import FeatureDecoder
from memspec_core.models.draft import (
    FUSE_FEATURES,
    FUSE_INPUT,
    MANIFEST,
    plan_draft,
    shared_taps,
)
from memspec_core.models.kv_cache import KeyValueCache
from memspec_core.models.native.backend import SharedThreads
from memspec_core.models.native.library import library
from memspec_core.models.pieces import at_once
from memspec_core.models.quantised import round_to_int4
from memspec_core.models.safetensors_files import SafetensorsFiles
from memspec_core.models.target import Target, plan_target
from memspec_core.request import SamplingSettings
from memspec_core.speculation.calibration import calibrate
from memspec_core.speculation.feature import FeatureDraft
from memspec_core.speculation.proposal import Proposal
from memspec_core.speculation.read_ahead import read_ahead
from memspec_core.speculation.sampling import Sampler

TAPS = (0, 2)
CONTEXT = 96
VOCABULARY = 192
HEAD = range(0, VOCABULARY, 3)
GREEDY = Sampler(SamplingSettings(), CPU)


def tokens(count: int) -> list[int]:
    return [(7 * index * index + 3 * index + 1) % VOCABULARY for index in range(count)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model(seed=9, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def place(checkpoints: Checkpoints, model: PreTrainedModel) -> Path:
    return checkpoints.save("of-features", model)


@dataclass(frozen=True)
class Room:
    """A target that keeps features, and a draft's folder."""

    target: Target
    folder: Path

    def draft(self, tree: bool = False) -> FeatureDraft:
        return load_feature_draft("draft", self.folder, self.target, tree)

    def fresh_target(self) -> Target:
        """Return the target with a cache of its own."""
        old = self.target.cache
        config = self.target.decoder.config
        cache = KeyValueCache(config, CONTEXT, old.rows.dtype, CPU, TAPS)
        return replace(self.target, cache=cache)

    def proposal(self, context: list[int], length: int, tree: bool = False) -> Proposal:
        """Return what a new draft proposes beside a target that was fed the context anew."""
        target = self.fresh_target()
        if context[:-1]:
            target.decoder.forward(context[:-1], target.cache)
        return load_feature_draft("fresh", self.folder, target, tree).propose(
            context, length, GREEDY
        )


def make_room(kind: str, place: Path, folder: Path, **draft: Any) -> Room:
    native = kind == "native"
    if native and library() is None:
        pytest.skip("the native step is not there")
    dtype = "bf16" if native else "fp32"
    target = load_target(place, dtype=dtype, context_tokens=CONTEXT, taps=TAPS, threads=2)
    assert target.backend.name == kind
    write_feature_draft(folder, target, TAPS, four_bits=native, **draft)
    return Room(without_ends(target), folder)


@pytest.fixture(scope="module", params=["torch", "native"])
def room(
    request: pytest.FixtureRequest, place: Path, tmp_path_factory: pytest.TempPathFactory
) -> Room:
    return make_room(request.param, place, tmp_path_factory.mktemp("drafts") / "draft", layers=2)


# The definition.


def true_features(model: PreTrainedModel, context: Sequence[int]) -> torch.Tensor:
    kept: dict[int, torch.Tensor] = {}
    hooks = [
        model.model.layers[tap].register_forward_hook(
            lambda _, __, out, tap=tap: kept.update({tap: out[0] if out.dim() == 3 else out})
        )
        for tap in TAPS
    ]
    with torch.inference_mode():
        model(input_ids=torch.tensor([list(context)]))
    for hook in hooks:
        hook.remove()
    norms = [*(layer.input_layernorm for layer in model.model.layers), model.model.norm]
    return torch.cat([rms(kept[tap]) * norms[tap + 1].weight.detach() for tap in TAPS], dim=-1)


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt()


class Reference:
    """The definition, a whole context at a time."""

    def __init__(self, model: PreTrainedModel, target: Target, folder: Path) -> None:
        self.files = SafetensorsFiles([folder / "draft.safetensors"])
        self.model = model
        self.config = target.decoder.config
        self.ids = self.files.raw("head.token_ids").long()

    def weight(self, name: str) -> torch.Tensor:
        return self.files.dense(name).float()

    def propose(
        self, context: list[int], features: torch.Tensor, count: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the hidden row and the logits [head] of each greedy proposal."""
        embed = self.model.get_input_embeddings().weight.detach()
        known = len(context) - 1
        first_norm = self.model.model.layers[0].input_layernorm.weight.detach()
        thought = rms(features[:known] @ self.weight(FUSE_FEATURES).T)
        fed, found = context[1:], []
        head = self.model.get_output_embeddings().weight.detach()[self.ids]
        head = round_to_int4(head).dequantised()
        for _ in range(count):
            embedded = rms(embed[torch.tensor(fed)]) * first_norm
            y = self.layers(torch.cat((embedded, thought), dim=-1) @ self.weight(FUSE_INPUT).T)
            normed = rms(y[-1:]) * self.weight("norm.weight")
            logits = normed[0] @ head.T
            found.append((y[-1], logits))
            fed = [*fed, int(self.ids[int(logits.argmax())])]
            thought = torch.cat((thought, normed))
        return found

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(json.loads((self.folder / MANIFEST).read_text())["layers"])):
            x = self.layer(x, f"layers.{index}.")
        return x

    @property
    def folder(self) -> Path:
        return Path(self.files.where).parent

    def layer(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        c = self.config
        normed = rms(x) * self.weight(f"{prefix}input_layernorm.weight")
        q, k, v = (
            (normed @ self.weight(f"{prefix}self_attn.{part}_proj.weight").T)
            .unflatten(-1, (-1, c.head_size))
            .transpose(0, 1)
            for part in "qkv"
        )
        group = c.heads // c.kv_heads
        attended = F.scaled_dot_product_attention(
            self.turned(q),
            self.turned(k).repeat_interleave(group, 0),
            v.repeat_interleave(group, 0),
            is_causal=True,
        )
        joined = attended.transpose(0, 1).flatten(1)
        x = x + joined @ self.weight(f"{prefix}self_attn.o_proj.weight").T
        normed = rms(x) * self.weight(f"{prefix}post_attention_layernorm.weight")
        gate = F.silu(normed @ self.weight(f"{prefix}mlp.gate_proj.weight").T)
        up = normed @ self.weight(f"{prefix}mlp.up_proj.weight").T
        return x + (gate * up) @ self.weight(f"{prefix}mlp.down_proj.weight").T

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.tensor(self.config.inverse_frequencies)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        one, other = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-other, one), dim=-1) * sin


def test_features_are_the_normed_residual_stream(model: PreTrainedModel, room: Room) -> None:
    target, context = room.fresh_target(), tokens(70)
    target.decoder.forward(context, target.cache)
    assert target.cache.features is not None
    found = target.cache.features[:70].float()
    expected = true_features(model, context)
    near = 0.02 if room.target.backend.name == "native" else 1e-3
    assert float((found - expected).norm() / expected.norm()) < near
    assert not target.cache.features[70:].any()


@pytest.mark.parametrize("length", [2, 3, 20, 70])
def test_logits_are_those_of_the_definition(
    length: int, model: PreTrainedModel, room: Room
) -> None:
    target, context, count = room.fresh_target(), tokens(length), 4
    target.decoder.forward(context[:-1], target.cache)
    features = target.cache.features
    assert features is not None
    expected = Reference(model, target, room.folder).propose(context, features.float(), count)
    decoder, cache = plan_draft("d", str(room.folder), target).load_feature(target)
    state = decoder.feed(context[1:], features, cache)[-1:]
    # The step rounds rows to 8 bits; what is computed wrongly is off by about 1.
    near = 0.1 if target.backend.name == "native" else 1e-4
    for row, right in expected:
        logits = decoder.logits(state)[0]
        assert float((state[0] - row).norm() / row.norm()) < near
        assert float((logits - right).norm() / right.norm()) < max(near, 0.02)
        # From the right row, so that what was rounded before does not add up.
        state = decoder.follow([HEAD[int(right.argmax())]], row[None], cache)


@pytest.mark.parametrize("length", [2, 20])
def test_proposals_that_are_too_unlikely_are_left_out(length: int, room: Room) -> None:
    target, context, count = room.fresh_target(), tokens(length), 5
    target.decoder.forward(context[:-1], target.cache)
    features = target.cache.features
    assert features is not None
    decoder, cache = of(room)
    state = decoder.feed(context[1:], features, cache)[-1:]
    likely, whole = [], []
    for _ in range(count):
        probabilities = decoder.logits(state)[0].float().softmax(-1)
        index = int(probabilities.argmax())
        likely.append(float(probabilities[index]) * (likely[-1] if likely else 1.0))
        whole.append(int(decoder.head_token_ids[index]))
        state = decoder.follow(whole[-1:], state, cache)
    for kept, bound in enumerate(likely):
        rolls = decoder.roll
        cache.truncate(0)
        assert rolls(context[1:], features, cache, count, 1.001 * bound) == whole[:kept]
        assert cache.length == length - 1 + kept
        cache.truncate(0)
        assert rolls(context[1:], features, cache, count, 0.999 * bound) == whole[: kept + 1]
    # A further one is looked for where it would be worth it, were it as likely as the last.
    own = [bound / before for bound, before in zip(likely, [1.0, *likely], strict=False)]
    expected = [bound * each for bound, each in zip(likely, own, strict=True)]
    for worth in (factor * bound for bound in expected for factor in (0.999, 1.001)):
        steps = next((n for n, bound in enumerate(expected[:-1], 1) if bound < worth), count)
        cache.truncate(0)
        found = decoder.roll(context[1:], features, cache, count, 0.0, worth)
        assert found == whole[:steps]
        assert cache.length == length - 1 + steps - 1


# What a row is does not depend on the pass.


@pytest.fixture(scope="module")
def native(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Room:
    return make_room("native", place, tmp_path_factory.mktemp("native") / "draft")


def of(room: Room) -> tuple[Any, KeyValueCache]:
    decoder, cache = plan_draft("d", str(room.folder), room.target).load_feature(room.target)
    return decoder, cache


def test_features_do_not_depend_on_the_pass(native: Room) -> None:
    context, whole = tokens(90), native.fresh_target()
    whole.decoder.forward(context, whole.cache)
    for threads in (1, 2, 3):
        parts = native.fresh_target()
        decoder: Any = parts.decoder
        decoder._threads = SharedThreads(threads)
        for first in range(0, 90, 13):
            decoder.forward(context[first : first + 13], parts.cache)
        decoder._threads = SharedThreads(2)
        assert parts.cache.features is not None
        assert whole.cache.features is not None
        assert torch.equal(parts.cache.features, whole.cache.features)


def test_a_thread_that_is_lent_comes_back() -> None:
    threads = SharedThreads(3)
    with ThreadPoolExecutor(1) as other, threads.lending():
        assert threads.count == 1
        assert other.submit(lambda: threads.count).result() == 2
        with threads.lending():
            assert other.submit(lambda: threads.count).result() == 1
        assert threads.count == 1
    assert threads.count == 3
    with pytest.raises(RuntimeError), threads.lending():
        raise RuntimeError
    assert threads.count == 3


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("length", [2, 40, 90])
def test_one_call_is_step_by_step(length: int, threads: int, native: Room) -> None:
    target, context, count = native.fresh_target(), tokens(length), 5
    target.decoder.forward(context[:-1], target.cache)
    features = target.cache.features
    assert features is not None
    decoder, cache = of(native)
    for row, token in enumerate(context[1:]):
        state = decoder.feed([token], features, cache)
        assert cache.length == row + 1
    expected = []
    for _ in range(count):
        expected.append(int(decoder.head_token_ids[int(decoder.logits(state).argmax())]))
        state = decoder.follow(expected[-1:], state, cache)
    cache.truncate(length - 1 + count - 1)
    other, rolled = of(native)
    other._threads = SharedThreads(threads)
    assert other.roll(context[1:], features, rolled, count) == expected
    assert rolled.token_ids == cache.token_ids
    # The step by step cache has the row of the last proposal as well.
    held = [
        c.rows[:, native.target.decoder.config.kv_heads :, : rolled.length] for c in (cache, rolled)
    ]
    assert torch.equal(*held)


# The draft.


def feed_to(target: Target, context: Sequence[int]) -> None:
    target.cache.keep_common(context[:-1])
    unseen = list(context[target.cache.length : -1])
    if unseen:
        target.decoder.forward(unseen, target.cache)


@pytest.mark.parametrize("tree", [False, True])
def test_edges(tree: bool, room: Room) -> None:
    target = room.target
    draft = room.draft(tree)
    target.cache.truncate(0)
    assert draft.propose([5], 3, GREEDY) == Proposal()
    context = tokens(20)
    assert draft.propose(context, 3, GREEDY) == Proposal()
    feed_to(target, context[:-1])
    draft.read(context)
    assert draft.propose(context, 3, GREEDY) == Proposal()  # the newest feature is missing
    feed_to(target, context)
    assert draft.propose(context, 0, GREEDY) == Proposal()
    assert draft.propose(context, 3, GREEDY) == room.proposal(context, 3, tree)
    assert draft._cache.length == len(context) - 1
    assert set(draft.propose(context, 8, GREEDY).token_ids) <= set(HEAD)
    full = tokens(CONTEXT)
    feed_to(target, full)
    assert len(draft.propose(full, 1, GREEDY).token_ids) == 1
    if not tree:
        assert len(draft.propose(full, 9, GREEDY).token_ids) == 2
    target.cache.truncate(0)


def test_a_short_context_of_the_draft(room: Room, tmp_path: Path) -> None:
    folder = write_feature_draft(tmp_path / "short", room.target, TAPS, context_tokens=32)
    draft = load_feature_draft("short", folder, room.target)
    for length, most in ((30, 4), (33, 1), (34, 0), (60, 0)):
        feed_to(room.target, tokens(length))
        draft.read(tokens(length))
        assert len(draft.propose(tokens(length), 9, GREEDY).token_ids) == most
    room.target.cache.truncate(0)


def test_another_first_token_is_another_context(room: Room) -> None:
    draft, one, other = room.draft(), [1, *tokens(10)], [2, *tokens(10)]
    for context in (one, other, one):
        feed_to(room.target, context)
        assert draft.propose(context, 4, GREEDY) == room.proposal(context, 4)
    room.target.cache.truncate(0)


def test_a_draft_reads_ahead_what_is_settled(room: Room) -> None:
    context, target = tokens(90), room.fresh_target()
    target.decoder.forward(context, target.cache)
    draft = load_feature_draft("ahead", room.folder, target)
    read_ahead(draft, target, at_once)
    assert draft.known(context) == 0  # nothing is settled
    target.cache.settled = (context, 80)
    read_ahead(draft, target, at_once)
    assert draft.known(context) == 80
    target.cache.truncate(len(context) - 1)
    assert draft.propose(context, 4, GREEDY) == room.proposal(context, 4)


def test_what_was_read_of_a_context_that_is_gone_is_forgotten(room: Room) -> None:
    context, target = tokens(90), room.fresh_target()
    target.decoder.forward(context, target.cache)
    target.cache.settled = (context, 89)
    draft = load_feature_draft("ahead", room.folder, target)

    def another_begins(_: int) -> None:
        target.cache.settled = None

    read_ahead(draft, target, another_begins)
    assert draft.known(context) == 0


def test_a_draft_reads_ahead_beside_a_generation(room: Room) -> None:
    prompt, target = tokens(60), room.fresh_target()
    draft = load_feature_draft("ahead", room.folder, target)
    with ThreadPoolExecutor(1) as loader:
        reads: list[Future[None]] = []

        def begin() -> None:
            if target.cache.settled and not reads:
                reads.append(loader.submit(read_ahead, draft, target, at_once))

        ids = ids_of(decode(target, prompt, interruption=begin, max_new_tokens=30))
        reads[0].result()
    context = [*prompt, *ids]
    assert draft.known(context) >= len(prompt)
    assert draft.propose(context, 3, GREEDY) == room.proposal(context, 3)
    assert ids == ids_of(decode(room.fresh_target(), prompt, max_new_tokens=30))


steps = st.lists(
    st.tuples(
        st.integers(0, 5),  # tokens asked for
        st.integers(0, 5),  # how many of them are taken
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
        st.booleans(),  # whether the draft looks on
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=12)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=3),
    course=steps,
    tree=st.booleans(),
)
def test_what_was_before_does_not_matter(
    prompts: list[list[int]],
    course: list[tuple[int, int, list[int], bool]],
    tree: bool,
    room: Room,
) -> None:
    draft, target = room.draft(tree), room.target
    for prompt in prompts:
        context = list(prompt)
        feed_to(target, context)
        draft.read(context)
        for length, taken, extra, idle in course:
            feed_to(target, context)
            proposal = Proposal() if idle else draft.propose(context, length, GREEDY)
            if not idle and target.backend.name == "native":
                assert proposal == room.proposal(context, length, tree)
            context += [*proposal.token_ids[:taken], *extra]
            draft.rollback(len(context) - 1)
    feed_to(target, context)
    if target.backend.name == "native":
        assert draft.propose(context, 3, GREEDY) == room.proposal(context, 3, tree)
    assert draft._cache.length <= len(context) - 1


PROMPTS = [[1], [30, 40, 50, 60], tokens(40)]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_greedy_is_plain_greedy(
    gamma: int, tree: bool, room: Room, checkpoints: Checkpoints, model: PreTrainedModel
) -> None:
    draft = room.draft(tree)
    other = load_draft("other", checkpoints.save("cut", truncated(model, 1)), room.target)
    for prompt in PROMPTS:
        plain = ids_of(decode(room.target, prompt, max_new_tokens=40))
        events = decode(room.target, prompt, draft, gamma=gamma, max_new_tokens=40)
        assert ids_of(events) == plain
        assert sum(event.proposed for event in events) > 20
        switching = decode(
            room.target,
            prompt,
            lambda i: (draft, other, None)[i % 3],
            gamma=gamma,
            max_new_tokens=40,
        )
        assert ids_of(switching) == plain


def test_sampling(room: Room) -> None:
    events = decode(room.target, PROMPTS[1], room.draft(), sampling=sampling(1.0, seed=4))
    assert sum(event.proposed for event in events) > 10
    sampler = Sampler(sampling(0.8, top_k=5, seed=1), CPU)
    context = tokens(12)
    feed_to(room.target, context)
    proposal = room.draft().propose(context, 3, sampler)
    assert proposal.probabilities is not None
    assert proposal.probabilities.shape == (3, VOCABULARY)
    torch.testing.assert_close(proposal.probabilities.sum(-1), torch.ones(3))
    off_head = [token for token in range(VOCABULARY) if token not in HEAD]
    assert not proposal.probabilities[:, off_head].any()
    room.target.cache.truncate(0)


def test_torch_computes_a_head_that_the_step_cannot(native: Room, tmp_path: Path) -> None:
    folder = write_feature_draft(
        tmp_path / "odd", native.target, TAPS, head_tokens=range(50), four_bits=True
    )
    assert plan_draft("odd", str(folder), native.target).backend.name == "torch"
    draft = load_feature_draft("odd", folder, native.target)
    plain = ids_of(decode(native.target, PROMPTS[1]))
    events = decode(native.target, PROMPTS[1], draft)
    assert ids_of(events) == plain
    assert sum(event.proposed for event in events) > 10


def test_kept_rows_of_a_tree_have_their_features(room: Room) -> None:
    tree, chain, context = room.fresh_target(), room.fresh_target(), tokens(20)
    for target in (tree, chain):
        target.decoder.forward(context, target.cache)
    tree.decoder.forward([3, 4, 5, 6], tree.cache, [-1, -1, 0, 2])
    tree.decoder.keep(tree.cache, 20, [0, 2, 3])
    chain.decoder.forward([3, 5, 6], chain.cache)
    assert tree.cache.features is not None
    assert chain.cache.features is not None
    torch.testing.assert_close(
        tree.cache.features[:23], chain.cache.features[:23], atol=2e-3, rtol=2e-3
    )


# Loading.


def refused(folder: Path, target: Target, *said: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_feature_draft("draft", folder, target)
    for part in (str(folder), *said):
        assert part in str(error.value), str(error.value)


@pytest.mark.parametrize("name", [FUSE_FEATURES, FUSE_INPUT, "layers.0.mlp.up_proj.weight"])
def test_a_missing_tensor(name: str, room: Room, tmp_path: Path) -> None:
    folder = write_feature_draft(tmp_path / "draft", room.target, TAPS, without=name)
    refused(folder, room.target, name)


def test_folders_that_do_not_fit(room: Room, tmp_path: Path) -> None:
    def written(taps: tuple[int, ...] = TAPS, **changes: Any) -> Path:
        return write_feature_draft(tmp_path / "draft", room.target, taps, **changes)

    refused(written(target_sha256="0"), room.target, "another target")
    refused(written((1, 2)), room.target, "[1, 2]", "[0, 2]")
    refused(written((0, 3)), room.target, "[0, 3]", "which has 3")
    refused(written((1, 1)), room.target, "[1, 1]")
    folder = written((0, 1))
    fields = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(fields | {"taps": [0, 1, 2]}))
    wider = load_target(room.target.checkpoint.path, taps=(0, 1, 2))
    refused(folder, wider, FUSE_FEATURES, "(64, 128)", "(64, 192)")
    folder = written()
    tensors = {FUSE_INPUT: torch.zeros(64, 64)}
    save_file(tensors, folder / "draft.safetensors")
    refused(folder, room.target, "checksum")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_a_draft_keeps_nothing_of_its_file(room: Room) -> None:
    draft = room.draft()
    maps = Path("/proc/self/maps").read_text()

    assert draft.kind == "feature"
    assert str(room.folder) not in maps, "whoever truncates the file would end the process"


def test_all_drafts_share_their_taps(room: Room, tmp_path: Path) -> None:
    one = write_feature_draft(tmp_path / "one", room.target, TAPS)
    two = write_feature_draft(tmp_path / "two", room.target, (1, 2))
    plans = [plan_draft(folder.name, str(folder), room.target) for folder in (one, one, two)]
    assert shared_taps([]) == ()
    assert shared_taps(plans[:2]) == TAPS
    with pytest.raises(CheckpointError, match=r"'one' and 'two'.*\[0, 2\] and \[1, 2\]"):
        shared_taps(plans)


def test_bytes_are_counted(room: Room) -> None:
    plan = plan_target(
        str(room.target.checkpoint.path), dtype="fp32", device=CPU, context_tokens=64
    )
    tapped = plan.with_taps(TAPS)
    assert tapped.kv_bytes - plan.kv_bytes == 64 * 2 * 64 * 2
    cache = tapped.load().cache
    assert cache.features is not None
    assert cache.rows.nbytes + cache.features.nbytes == tapped.kv_bytes
    draft = plan_draft("draft", str(room.folder), room.target)
    decoder, rows = draft.load_feature(room.target)
    assert isinstance(decoder, FeatureDecoder)
    assert rows.rows.nbytes == draft.kv_bytes
    assert decoder.layer_bytes > decoder.fuse.weight_bytes > 0
    own_bytes = decoder.layer_bytes + decoder.head.weight_bytes
    assert abs(own_bytes - draft.weight_bytes) < 0.5 * draft.weight_bytes


def test_a_folder_is_described(room: Room) -> None:
    found = describe_draft(room.folder)
    assert (found["kind"], found["taps"]) == ("feature", list(TAPS))
    assert found["weights_whole"]


def test_a_step_is_measured(room: Room) -> None:
    asked = []

    class Watched(FeatureDraft):
        def propose(self, context: Sequence[int], length: int, sampler: Sampler) -> Proposal:
            asked.append((length, len(super().propose(context, length, sampler).token_ids)))
            return Proposal()

    plan = plan_draft("draft", str(room.folder), room.target)
    decoder, cache = plan.load_feature(room.target)
    draft = Watched("draft", decoder, cache, VOCABULARY, room.target.cache)
    costs = calibrate(room.target, {"draft": draft}, ManualClock(0.001))
    assert costs.draft_seconds["draft"] > 0
    assert asked
    assert all(length == proposed for length, proposed in asked)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_an_engine_with_one(shape: str, room: Room, place: Path, tmp_path: Path) -> None:
    folder = write_feature_draft(tmp_path / "one", room.target, TAPS)
    chosen = make_settings(place, {"one": folder}, draft_shape=shape, context_tokens=CONTEXT)
    engine = load_engine(
        lambda: chosen,
        ManualClock(0.0),
        between_parts=lambda: None,
        on_change=lambda: None,
        on_load_finished=lambda: None,
    )
    try:
        assert engine.target.cache.taps == TAPS
        draft = engine.cache.require("one")
        assert draft.kind == "feature"
        plain = ids_of(decode(engine.target, PROMPTS[1]))
        events = decode(engine.target, PROMPTS[1], draft)
        assert ids_of(events) == plain
    finally:
        engine.close()
