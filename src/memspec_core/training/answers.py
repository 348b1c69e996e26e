"""The target's answers to many prompts, one after the other or in batches."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from memspec_core.clock import SystemClock
from memspec_core.iteration import IterationSeconds
from memspec_core.models.target import Target
from memspec_core.request import PLAIN, ChatMessage, GenerationRequest, SamplingSettings
from memspec_core.speculation.calibration import calibrate
from memspec_core.speculation.decoding import Decoding
from memspec_core.speculation.lookup import NgramLookup
from memspec_core.speculation.planner import Planner
from memspec_core.training.reference import transformers_model


class Answering:
    """Has a target answer prompts: through the runtime, or in batches where a GPU computes."""

    def __init__(self, target: Target, max_new_tokens: int, temperature: float) -> None:
        self._target = target
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._planner: Planner | None = None
        self._model: PreTrainedModel | None = None

    def answers(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        """Return the answer to each prompt, without the end-of-sequence token."""
        if self._target.decoder.device.type == "cuda":
            return self._in_batches(prompts, seeds[0])
        return [self._answer(p, seed) for p, seed in zip(prompts, seeds, strict=True)]

    def _answer(self, prompt: Sequence[int], seed: int) -> list[int]:
        clock = SystemClock()
        if self._planner is None:
            self._planner = Planner(calibrate(self._target, {}, clock))
        sampling = SamplingSettings(temperature=self._temperature, seed=seed)
        decoding = Decoding(
            self._target,
            prompt,
            GenerationRequest(messages=(ChatMessage("user", ""),), sampling=sampling),
            max_new_tokens=self._max_new_tokens,
            planner=self._planner,
            lookup=NgramLookup(),
            interruption=lambda: None,
            clock=clock,
        )
        decoding.read_prompt()
        while not decoding.ended:
            decoding.iterate(None, PLAIN, 0, IterationSeconds())
        decoding.close()
        return list(decoding.recent_ids(self._max_new_tokens))

    @torch.inference_mode()
    def _in_batches(self, prompts: Sequence[Sequence[int]], seed: int) -> list[list[int]]:
        """Have transformers answer; its kernels are others than the runtime's, its tokens alike."""
        target = self._target
        if self._model is None:
            self._model = transformers_model(
                target.checkpoint, torch.bfloat16, target.decoder.device
            )
        torch.manual_seed(seed)
        padded = target.tokenizer.backend.pad(
            {"input_ids": [list(ids) for ids in prompts]}, padding_side="left", return_tensors="pt"
        ).to(target.decoder.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if self._temperature > 0:
            sampling = {"do_sample": True, "temperature": self._temperature}
            sampling |= {"top_k": 0, "top_p": 1.0}
        ends = sorted(target.end_of_sequence_ids)
        output = self._model.generate(
            **padded,
            max_new_tokens=self._max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=target.tokenizer.backend.pad_token_id,
            **sampling,
        )
        rows = output[:, padded["input_ids"].shape[1] :].tolist()
        return [_to_end(row, target.end_of_sequence_ids) for row in rows]


def _to_end(token_ids: list[int], ends: frozenset[int]) -> list[int]:
    length = next((n for n, token in enumerate(token_ids) if token in ends), None)
    return token_ids[:length]
