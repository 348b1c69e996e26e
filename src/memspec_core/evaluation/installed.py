"""Which models are installed, by their checksums: figures of others are no figures of theirs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memspec_core.errors import TraceError
from memspec_core.models.checkpoint import open_checkpoint
from memspec_core.models.draft import MANIFEST, draft_folder, read_manifest
from memspec_core.settings import Settings


@dataclass(frozen=True)
class Models:
    """Checksums of a target and of drafts by name; empty for a draft without a manifest."""

    target_sha256: str
    drafts: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return it as `of_json` reads it."""
        return asdict(self)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> "Models":
        """Return what `to_json` gave."""
        return cls(fields["target_sha256"], dict(fields["drafts"]))

    def require(self, others: "Models", what: str) -> None:
        """Raise `TraceError` unless target and drafts are the same, as far as both name them."""
        if others.target_sha256 != self.target_sha256:
            raise TraceError(
                f"{what} was made with another target (checksum {others.target_sha256[:12]}; the "
                f"installed one has {self.target_sha256[:12]}); make it anew."
            )
        for name, checksum in self.drafts.items():
            theirs = others.drafts.get(name, checksum)
            if theirs != checksum:
                raise TraceError(
                    f"{what} was made with another draft '{name}' (checksum {theirs[:12]}; the "
                    f"installed one has {checksum[:12]}); make it anew."
                )


def installed_models(settings: Settings) -> Models:
    """Return the checksums of the models that settings name; raises `CheckpointError`."""
    folders = {draft.name: draft_folder(draft.name, draft.path) for draft in settings.drafts}
    drafts = {
        name: read_manifest(folder).weights_sha256 if (folder / MANIFEST).exists() else ""
        for name, folder in folders.items()
    }
    return Models(open_checkpoint(settings.target_path).sha256(), drafts)
