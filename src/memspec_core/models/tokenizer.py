"""A checkpoint's tokenizer and chat template, through transformers."""

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from memspec_core.errors import (
    CheckpointError,
    RequestError,
    VocabularyMismatchError,
    is_out_of_memory,
)
from memspec_core.models.checkpoint import Checkpoint
from memspec_core.models.kept_tokenizer import kept_tokenizer
from memspec_core.request import GenerationRequest


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, backend: PreTrainedTokenizerBase, where: str) -> None:
        self.backend = backend
        self.where = where
        self._sha256 = ""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Tokenizer":
        """Load the tokenizer that belongs to a checkpoint; raises `CheckpointError`."""
        folder, gguf_file = checkpoint.folder, checkpoint.gguf_file
        try:
            backend = (
                kept_tokenizer(folder / gguf_file, _loaded, lambda: _loaded(folder, gguf_file))
                if gguf_file
                else _loaded(folder)
            )
        except Exception as error:  # transformers raises many types for broken files
            if is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"The tokenizer in {checkpoint.path} cannot be loaded: {error}"
            ) from error
        return cls(backend, str(checkpoint.path))

    def prompt_ids(self, request: GenerationRequest) -> list[int]:
        """Tokenise what a validated request asks for, with the chat template unless raw."""
        if request.raw:
            return list(self.backend.encode(request.prompt))
        if self.backend.chat_template is None:
            raise RequestError(
                f"The checkpoint {self.where} has no chat template; send the prompt with raw."
            )
        messages = [{"role": m.role, "content": m.content} for m in request.messages]
        try:
            ids = self.backend.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates raise their own errors, for an unknown role say
            raise RequestError(f"The chat template refuses these messages: {error}") from error
        return [int(token) for token in ids]

    def decode(self, token_ids: list[int]) -> str:
        """Turn token ids into text, special tokens left out."""
        return str(
            self.backend.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def end_of_sequence_ids(self) -> frozenset[int]:
        """Return the tokenizer's own end-of-sequence token, if it has one."""
        token = self.backend.eos_token_id
        return frozenset() if token is None else frozenset((int(token),))

    def token_map(self) -> dict[str, int]:
        """Return every token with its id."""
        return dict(self.backend.get_vocab())

    def serialised(self) -> str | None:
        """Return what a tokenizer.json would hold; None where this is a tokenizer without one."""
        fast = getattr(self.backend, "backend_tokenizer", None)
        return None if fast is None else str(fast.to_str())

    def sha256(self) -> str:
        """Hash the token map; equal maps have equal hashes whatever the file format.

        Computed once: it takes a tenth of a second, and every load of a draft asks for it.
        """
        if not self._sha256:
            pairs = sorted(self.token_map().items())
            self._sha256 = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
        return self._sha256

    def require_same_tokens(self, draft: "Tokenizer") -> None:
        """Raise `VocabularyMismatchError` unless a draft gives the same ids to the same tokens.

        Tokens at the end that only one side has (padding of the table) are no difference.
        """
        ours, theirs = self.token_map(), draft.token_map()
        shared = ours.keys() & theirs.keys()
        differing = sorted(token for token in shared if ours[token] != theirs[token])
        unshared = {t: i for t, i in (ours | theirs).items() if t not in shared}
        if not differing and all(i >= len(shared) for i in unshared.values()):
            return
        example = differing[0] if differing else min(unshared, key=lambda t: unshared[t])
        raise VocabularyMismatchError(
            f"The tokenizer of the draft {draft.where} differs from that of the target "
            f"{self.where} (for example in {example!r}); use a draft made for this target."
        )


def _loaded(folder: Path, gguf_file: str | None = None) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(
        folder, gguf_file=gguf_file, local_files_only=True, trust_remote_code=False
    )
