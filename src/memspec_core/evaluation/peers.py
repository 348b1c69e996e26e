"""Other runtimes on the same target checkpoint, to be measured beside this one."""

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from memspec_core.errors import PeerError
from memspec_core.measurement.bandwidth import torch_threads
from memspec_core.models.checkpoint import Checkpoint, id_set, open_checkpoint
from memspec_core.models.draft import (
    INDEPENDENT,
    MANIFEST,
    WEIGHTS,
    Manifest,
    draft_folder,
    read_manifest,
)
from memspec_core.models.safetensors_files import SafetensorsFiles
from memspec_core.models.sources import FINAL_NORM
from memspec_core.settings import DraftSource
from memspec_core.training.reference import transformers_model

TRANSFORMERS = "transformers"
ASSISTED = "assisted"
LLAMA_CPP = "llama_cpp"
PEERS = (TRANSFORMERS, ASSISTED, LLAMA_CPP)


@dataclass(frozen=True)
class PeerAnswer:
    """One greedy answer of a peer, up to its own end of sequence, which is no part of it.

    `first_tokens` tokens were there after `first_seconds`, prompt processing included; all of
    them after `seconds`.
    """

    token_ids: tuple[int, ...]
    first_tokens: int
    first_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding after the first tokens; 0 where no further ones came."""
        further = len(self.token_ids) - self.first_tokens
        decoding = self.seconds - self.first_seconds
        return further / decoding if further > 0 and decoding > 0.0 else 0.0


class Peer(Protocol):
    """A runtime that answers greedily, one prompt at a time."""

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> PeerAnswer:
        """Answer a tokenised prompt with at most `max_new_tokens` tokens."""
        ...

    def close(self) -> None:
        """Give up the models."""
        ...


@dataclass(frozen=True)
class PeerPlan:
    """What the peers run: the target and the draft of ours, on as many threads.

    `draft` None: there is none, so that assisted generation cannot be had.
    """

    checkpoint: Checkpoint
    draft: DraftSource | None
    draft_length: int
    device: str
    threads: int
    context_tokens: int


def stands_alone(draft: DraftSource) -> bool:
    """Whether a draft can assist without the target's hidden states; raises `CheckpointError`."""
    folder = draft_folder(draft.name, draft.path)
    return not (folder / MANIFEST).exists() or read_manifest(folder).kind == INDEPENDENT


def require_peers(names: Sequence[str], checkpoint: Checkpoint, draft: DraftSource | None) -> None:
    """Raise `PeerError` with one sentence for the first peer that cannot be had."""
    for name in names:
        if name not in PEERS:
            raise PeerError(f"Unknown peer '{name}'; there are: {', '.join(PEERS)}.")
    if ASSISTED in names and draft is None:
        raise PeerError(
            f"The peer {ASSISTED} needs a draft of kind {INDEPENDENT}; configure one in "
            "drafts.names."
        )
    if LLAMA_CPP in names:
        if importlib.util.find_spec("llama_cpp") is None:
            raise PeerError(
                f"The peer {LLAMA_CPP} is not installed; run `pip install llama-cpp-python`."
            )
        if checkpoint.gguf_file is None:
            raise PeerError(f"The peer {LLAMA_CPP} reads GGUF files only, not {checkpoint.path}.")


def open_peers(names: Sequence[str], plan: PeerPlan) -> dict[str, Peer]:
    """Load the peers that `names` asks for; raises `PeerError` or `CheckpointError`."""
    require_peers(names, plan.checkpoint, plan.draft)
    peers: dict[str, Peer] = {}
    if TRANSFORMERS in names or ASSISTED in names:
        model = _greedy(transformers_model(plan.checkpoint, torch.bfloat16, plan.device))
        if TRANSFORMERS in names:
            peers[TRANSFORMERS] = TransformersPeer(model, plan.threads)
        if ASSISTED in names:
            assistant = _assistant(model, plan)
            peers[ASSISTED] = TransformersPeer(model, plan.threads, assistant)
    if LLAMA_CPP in names:
        peers[LLAMA_CPP] = LlamaCppPeer(plan)
    return {name: peers[name] for name in names}


class TransformersPeer:
    """`generate` of transformers, not compiled; with an assistant it is assisted generation."""

    def __init__(
        self, model: PreTrainedModel, threads: int, assistant: PreTrainedModel | None = None
    ) -> None:
        self._model = model
        self._threads = threads
        self._assistant = assistant

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> PeerAnswer:
        """Answer a tokenised prompt with at most `max_new_tokens` tokens."""
        fed = torch.tensor([list(prompt_ids)], device=self._model.device)
        more = {} if self._assistant is None else {"assistant_model": self._assistant}
        arrivals = _Arrivals()
        with torch_threads(self._threads), torch.inference_mode():
            arrivals.started = time.perf_counter()
            output = self._model.generate(
                input_ids=fed,
                attention_mask=torch.ones_like(fed),
                max_new_tokens=max_new_tokens,
                streamer=arrivals,
                **more,
            )
            tokens = output[0, len(prompt_ids) :].tolist()
            seconds = time.perf_counter() - arrivals.started
        kept = _before_end(tokens, id_set(self._model.generation_config.eos_token_id))
        return PeerAnswer(kept, arrivals.first_tokens, arrivals.first_seconds, seconds)

    def close(self) -> None:
        """Give up the models."""
        del self._model, self._assistant


class _Arrivals(BaseStreamer):
    """Notes when the first generated tokens come."""

    def __init__(self) -> None:
        self.started = 0.0
        self.first_tokens = 0
        self.first_seconds = 0.0
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take what is new: the prompt first, then the tokens of each round."""
        if self._prompt_seen and not self.first_tokens:
            self.first_tokens = value.numel()
            self.first_seconds = time.perf_counter() - self.started
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is left to do."""


class LlamaCppPeer:
    """llama.cpp's evaluation loop through llama-cpp-python: the most probable token each time."""

    def __init__(self, plan: PeerPlan) -> None:
        self._api = importlib.import_module("llama_cpp")
        self._llama = self._api.Llama(
            model_path=str(plan.checkpoint.path),
            n_ctx=plan.context_tokens,
            n_threads=plan.threads,
            n_threads_batch=plan.threads,
            n_gpu_layers=0 if plan.device == "cpu" else -1,
            logits_all=False,
            verbose=False,
        )
        self._vocabulary = self._api.llama_model_get_vocab(self._llama.model)

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> PeerAnswer:
        """Answer a tokenised prompt with at most `max_new_tokens` tokens."""
        self._llama.reset()
        started = time.perf_counter()
        self._llama.eval(list(prompt_ids))
        token = self._most_probable()
        first_seconds = time.perf_counter() - started
        tokens: list[int] = []
        while not self._api.llama_vocab_is_eog(self._vocabulary, token):
            tokens.append(token)
            if len(tokens) == max_new_tokens:
                break
            self._llama.eval([token])
            token = self._most_probable()
        seconds = time.perf_counter() - started
        return PeerAnswer(tuple(tokens), 1, first_seconds, seconds)

    def close(self) -> None:
        """Give up the model."""
        self._llama.close()

    def _most_probable(self) -> int:
        # Read where they lie: the sampler chain of the Python package costs more than this.
        logits = self._api.llama_get_logits_ith(self._llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self._llama.n_vocab(),)).argmax())


def _greedy(model: PreTrainedModel) -> PreTrainedModel:
    """Keep of a checkpoint's generation settings the end of sequence alone."""
    ends = model.generation_config.eos_token_id
    padding = (ends[0] if isinstance(ends, list) else ends) or 0
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=padding)
    return model


def _before_end(tokens: Sequence[int], ends: frozenset[int]) -> tuple[int, ...]:
    at = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[:at])


def _assistant(target: PreTrainedModel, plan: PeerPlan) -> PreTrainedModel:
    """Return our draft as a model of transformers that proposes `draft_length` tokens a round."""
    assert plan.draft is not None
    folder = draft_folder(plan.draft.name, plan.draft.path)
    if (folder / MANIFEST).exists():
        assistant = _truncated(target, folder, read_manifest(folder))
    else:
        assistant = transformers_model(open_checkpoint(folder), torch.bfloat16, plan.device)
    settings = _greedy(assistant).generation_config
    settings.num_assistant_tokens = plan.draft_length
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    return assistant


def _truncated(target: PreTrainedModel, folder: Path, manifest: Manifest) -> PreTrainedModel:
    """Build a distilled draft under the target's embedding and its whole head.

    Transformers has no head over a part of the vocabulary.
    """
    sizes: dict[str, Any] = target.config.to_dict()
    count = len(manifest.layers)
    sizes["num_hidden_layers"] = count
    if sizes.get("layer_types"):
        sizes["layer_types"] = sizes["layer_types"][:count]
    model = AutoModelForCausalLM.from_config(type(target.config)(**sizes), dtype=target.dtype)
    model.set_input_embeddings(target.get_input_embeddings())
    model.set_output_embeddings(target.get_output_embeddings())
    weights = SafetensorsFiles([folder / WEIGHTS])
    body = model.get_decoder()
    _fill(body.layers, lambda name: weights.dense(f"layers.{name}"))
    _fill(body.norm, lambda _: weights.dense(FINAL_NORM))
    return model.eval().to(target.device)


def _fill(module: torch.nn.Module, weight: Callable[[str], torch.Tensor]) -> None:
    module.load_state_dict({name: weight(name) for name in module.state_dict()})
