"""Writing prompt files of paraphrases, each prompt with the source and licence it came with."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from memspec_core.errors import PromptFileError
from memspec_core.evaluation.paraphrase import MIXED, PARAPHRASES, mixed_pairs, two_topics
from memspec_core.files import whole_file
from memspec_core.training.prompts import Prompt, evenly_spread, read_prompts, short_names


def write_paraphrases(files: Sequence[Path], count: int | None, folder: Path) -> dict[str, int]:
    """Write `<folder>/<rule>/<domain>.jsonl`; return the number of prompts by file.

    A domain is the first of the parts that tell the files apart. Of two topics the file is named
    `<domain>+<domain>`, its prompts the first of both, the second of both, and so on. Raises
    `PromptFileError`.
    """
    domains = _read(files, count)
    written = {}
    for rule, said in PARAPHRASES.items():
        for domain, prompts in domains.items():
            path = folder / rule / f"{domain}.jsonl"
            written[str(path)] = _write(path, (replace(p, text=said(p.text)) for p in prompts))
    for pair in mixed_pairs(list(domains)):
        path = folder / MIXED / f"{'+'.join(pair)}.jsonl"
        both = zip(*(domains[domain] for domain in pair), strict=False)
        written[str(path)] = _write(path, (_mixed(one, other) for one, other in both))
    return written


def _read(files: Sequence[Path], count: int | None) -> Mapping[str, Sequence[Prompt]]:
    files = list(dict.fromkeys(files))
    names = [name.split("/")[0] for name in short_names(files)]
    if len({*names}) < len(names):
        raise PromptFileError(
            f"The files are of the domains {', '.join(names)}, some of them twice; give one file "
            "of each."
        )
    return {
        name: evenly_spread(read_prompts(file), count)
        for name, file in zip(names, files, strict=True)
    }


def _mixed(one: Prompt, other: Prompt) -> Prompt:
    sources, licenses = (
        " and ".join(dict.fromkeys(pair))
        for pair in ((one.source, other.source), (one.license, other.license))
    )
    return Prompt(two_topics(one.text, other.text), sources, licenses)


def _write(path: Path, prompts: Iterable[Prompt]) -> int:
    lines = [
        json.dumps({"prompt": fields.pop("text")} | fields)
        for fields in (asdict(prompt) for prompt in prompts)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
    return len(lines)
