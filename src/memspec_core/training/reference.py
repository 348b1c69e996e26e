"""A checkpoint as transformers computes it, its stored values dequantised."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from memspec_core.models.checkpoint import Checkpoint
from memspec_core.models.gptq import GptqFiles


def transformers_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """Load a checkpoint into transformers' own model, ready for inference on `device`."""
    if isinstance(checkpoint.weights, GptqFiles):
        return _dequantised_model(checkpoint, checkpoint.weights, dtype).eval().to(device)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        gguf_file=checkpoint.gguf_file,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
    )
    return model.eval().to(device)


def _dequantised_model(
    checkpoint: Checkpoint, weights: GptqFiles, dtype: torch.dtype
) -> PreTrainedModel:
    """Fill a dense model from packed weights; transformers reads them with GPTQModel only."""
    config = AutoConfig.from_pretrained(
        checkpoint.folder, local_files_only=True, trust_remote_code=False
    )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=False
    )
    for name in weights.names():
        place = name if name.startswith("lm_head.") else f"model.{name}"
        model.load_state_dict({place: weights.dense(name)}, strict=False)
    model.generation_config.eos_token_id = sorted(checkpoint.end_of_sequence_ids) or None
    return model
