"""`memspec inspect`: what a checkpoint or a draft folder holds."""

import argparse
import json
from pathlib import Path

from memspec_core.cli.arguments import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what a checkpoint or a draft folder holds",
        description="Show what a checkpoint or a draft folder holds.",
    )
    parser.add_argument("path", help="a folder, a GGUF file, or 'default' for the embedded target")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what there is."""
    from memspec_core.models.draft import MANIFEST

    is_draft = (Path(arguments.path).expanduser() / MANIFEST).exists()
    found = describe_draft(Path(arguments.path)) if is_draft else describe(arguments.path)
    if arguments.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        width = max(map(len, found))
        for key, value in found.items():
            print(f"{key:<{width}}  {value}")
    return 0


def describe(path: str) -> dict[str, object]:
    """Describe a decoder checkpoint; raises `CheckpointError`."""
    import torch

    from memspec_core.models.backend import choose_backend
    from memspec_core.models.checkpoint import open_checkpoint
    from memspec_core.models.tokenizer import Tokenizer

    checkpoint = open_checkpoint(path)
    tokenizer = Tokenizer.of(checkpoint)
    sizes = checkpoint.config
    backend = choose_backend(checkpoint.weights, sizes, "stored", torch.device("cpu"), 1)
    return {
        "path": str(checkpoint.folder),
        "gguf_file": checkpoint.gguf_file,
        "family": sizes.family,
        "format": "gguf" if checkpoint.gguf_file else "safetensors",
        "quantisation": checkpoint.quantisation,
        "cpu_backend": backend.name,
        "layers": sizes.layers,
        "hidden_size": sizes.hidden_size,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_size": sizes.head_size,
        "intermediate_size": sizes.intermediate_size,
        "vocabulary_size": sizes.vocabulary_size,
        "tied_head": sizes.tied_head,
        "context_tokens": sizes.context_tokens,
        "stored_memory_bytes": checkpoint.weights.memory_bytes(None),
        "end_of_sequence_ids": sorted(
            checkpoint.end_of_sequence_ids | tokenizer.end_of_sequence_ids()
        ),
        "chat_template": tokenizer.backend.chat_template is not None,
        "tokenizer_sha256": tokenizer.sha256(),
        "sha256": checkpoint.sha256(),
    }


def describe_draft(folder: Path) -> dict[str, object]:
    """Describe a draft folder; raises `CheckpointError`."""
    from memspec_core.models.draft import WEIGHTS, read_manifest, weights_are_whole

    manifest = read_manifest(folder)
    fields = dict(manifest.__dict__)
    fields |= {"layers": list(manifest.layers), "taps": list(manifest.taps)}
    return {
        "path": str(folder),
        **fields,
        "weights_bytes": (folder / WEIGHTS).stat().st_size,
        "weights_whole": weights_are_whole(folder, manifest),
    }
