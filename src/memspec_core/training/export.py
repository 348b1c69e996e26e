"""Writing a trained draft as a folder: weights, manifest and model card, whole or not at all."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from memspec_core.files import whole_folder
from memspec_core.models.draft import (
    FUSE_FEATURES,
    FUSE_INPUT,
    HEAD_TOKENS,
    MANIFEST,
    WEIGHTS,
    Manifest,
)
from memspec_core.models.quantised import round_to_int4
from memspec_core.models.sources import EMBEDDING, FINAL_NORM
from memspec_core.training.feature import FeatureDraft
from memspec_core.training.truncated import TruncatedDraft

CARD = "README.md"

Draft = TruncatedDraft | FeatureDraft


@dataclass(frozen=True)
class Provenance:
    """What a draft was made from; `card` goes into manifest and model card as it is."""

    name: str
    kind: str
    layers: tuple[int, ...]
    taps: tuple[int, ...]
    context_tokens: int
    target_sha256: str
    tokenizer_sha256: str
    card: dict[str, Any]


def export_draft(model: Draft, provenance: Provenance, folder: Path) -> Manifest:
    """Write a draft folder; one that is there already is replaced only by a whole new one."""
    with whole_folder(folder) as partial:
        save_file(_tensors(model), partial / WEIGHTS)
        manifest = Manifest(
            name=provenance.name,
            kind=provenance.kind,
            layers=provenance.layers,
            taps=provenance.taps,
            hidden_size=model.head_rows.shape[1],
            head_tokens=len(model.head_token_ids),
            context_tokens=provenance.context_tokens,
            weights_sha256=sha256((partial / WEIGHTS).read_bytes()).hexdigest(),
            target_sha256=provenance.target_sha256,
            tokenizer_sha256=provenance.tokenizer_sha256,
            card=provenance.card,
        )
        (partial / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        (partial / CARD).write_text(_model_card(manifest), encoding="utf-8")
    return manifest


def _tensors(model: Draft) -> dict[str, torch.Tensor]:
    tensors = {HEAD_TOKENS: model.head_token_ids.cpu().to(torch.int32)}
    for name, value in model.state_dict().items():
        stem, rounded = _stored_name(name)
        if rounded:
            weight = round_to_int4(value)
            tensors[f"{stem}.codes"] = weight.pairs.cpu()
            tensors[f"{stem}.scale"] = weight.scale.bfloat16().cpu().contiguous()
            tensors[f"{stem}.minimum"] = weight.minimum.bfloat16().cpu().contiguous()
        elif stem != EMBEDDING:
            tensors[stem] = value.detach().cpu().float()
    return tensors


def _stored_name(name: str) -> tuple[str, bool]:
    """Return the name that a weight of a model has in a draft's file, and whether it is rounded."""
    stem = name.removeprefix("body.").replace(".parametrizations.weight.original", ".weight")
    rounded = ".parametrizations." in name
    names = {
        "norm": FINAL_NORM,
        "fuse_features.weight": FUSE_FEATURES,
        "fuse_input.weight": FUSE_INPUT,
    }
    return names.get(stem, stem), rounded


def _model_card(manifest: Manifest) -> str:
    card = manifest.card
    sources = "\n".join(
        f"| {source['source']} | {source['license']} | {source['prompts']} |"
        for source in card["prompt_sources"]
    )
    figures = "\n".join(f"- {key}: {value}" for key, value in card["training"].items())
    reads = f", over its states after layers {list(manifest.taps)}" if manifest.taps else ""
    base = f" It started from the weights of the draft `{card['base']}`." if card["base"] else ""
    return f"""# Draft `{manifest.name}`

A draft model for speculative decoding with **{card["target"]}**, made by `memspec distill`.
Kind: {manifest.kind}; layers {list(manifest.layers)} of the target{reads}, its embedding, and its
head over {manifest.head_tokens} tokens (both shared with the target, so not stored here).
Linear weights are stored at 4 bits in groups of 32. Licence: {card["license"]}.

It was trained on {card["text"]["tokens"]} tokens that the target itself gave to prompts of the
sources below; no text of the prompts is stored here. It proposes tokens only: what is generated is
the target's own.{base}

## Prompt sources

| source | licence | prompts |
|---|---|---|
{sources}

## Training

{figures}

"accepted" is how many proposals in a row the target would take, on average over held-out text
(prompts not trained on); of an independent draft only the first proposal counts.
"""
