"""Writing a trained draft as a folder: weights, manifest and model card, whole or not at all."""

import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from memspec_core.models.draft import HEAD_TOKENS, INDEPENDENT, MANIFEST, WEIGHTS, Manifest
from memspec_core.models.quantised import round_to_int4
from memspec_core.models.safetensors_files import pack_codes
from memspec_core.models.sources import FINAL_NORM
from memspec_core.training.truncated import TruncatedDraft

CARD = "README.md"


@dataclass(frozen=True)
class Provenance:
    """What a draft was made from; `card` goes into manifest and model card as it is."""

    name: str
    layers: tuple[int, ...]
    context_tokens: int
    target_sha256: str
    tokenizer_sha256: str
    card: dict[str, Any]


def export_draft(model: TruncatedDraft, provenance: Provenance, folder: Path) -> Manifest:
    """Write a draft folder; one that is there already is replaced only by a whole new one."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(_tensors(model), partial / WEIGHTS)
    manifest = Manifest(
        name=provenance.name,
        kind=INDEPENDENT,
        layers=provenance.layers,
        hidden_size=model.body.config.hidden_size,
        head_tokens=len(model.head_token_ids),
        context_tokens=provenance.context_tokens,
        weights_sha256=sha256((partial / WEIGHTS).read_bytes()).hexdigest(),
        target_sha256=provenance.target_sha256,
        tokenizer_sha256=provenance.tokenizer_sha256,
        card=provenance.card,
    )
    (partial / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    (partial / CARD).write_text(_model_card(manifest), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return manifest


def _tensors(model: TruncatedDraft) -> dict[str, torch.Tensor]:
    tensors = {HEAD_TOKENS: model.head_token_ids.cpu().to(torch.int32)}
    tensors[FINAL_NORM] = model.body.norm.weight.detach().cpu().float()
    for name, value in model.body.layers.state_dict().items():
        stem = f"layers.{name}".replace(".parametrizations.weight.original", ".weight")
        if stem == f"layers.{name}":
            tensors[stem] = value.detach().cpu().float()
            continue
        rounded = round_to_int4(value)
        tensors[f"{stem}.codes"] = pack_codes(rounded.codes).cpu().contiguous()
        tensors[f"{stem}.scale"] = rounded.scale.bfloat16().cpu().contiguous()
        tensors[f"{stem}.minimum"] = rounded.minimum.bfloat16().cpu().contiguous()
    return tensors


def _model_card(manifest: Manifest) -> str:
    card = manifest.card
    sources = "\n".join(
        f"| {source['source']} | {source['license']} | {source['prompts']} |"
        for source in card["prompt_sources"]
    )
    figures = "\n".join(f"- {key}: {value}" for key, value in card["training"].items())
    return f"""# Draft `{manifest.name}`

A draft model for speculative decoding with **{card["target"]}**, made by `memspec distill`.
Kind: {manifest.kind}; layers {list(manifest.layers)} of the target, its embedding, and its head
over {manifest.head_tokens} frequent tokens (both shared with the target, so not stored here).
Linear weights are stored at 4 bits in groups of 32. Licence: {card["license"]}.

It was trained on continuations that the target itself gave to the prompts below; no text of the
prompts is stored here. It proposes tokens only: what is generated is the target's own.

## Prompt sources

| source | licence | prompts |
|---|---|---|
{sources}

## Training

{figures}

"Agreement" is the share of positions of held-out text (prompts not trained on) at which the
draft's most probable token is the target's.
"""
