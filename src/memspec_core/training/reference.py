"""A checkpoint as transformers computes it, its stored values dequantised."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from memspec_core.models.checkpoint import Checkpoint


def transformers_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """Load a checkpoint into transformers' own model, ready for inference on `device`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        gguf_file=checkpoint.gguf_file,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
    )
    return model.eval().to(device)
