"""Where the models lie that the project brings along."""

import os
import sys
from pathlib import Path

PREDICTOR = "predictor"
"""The name under which the project brings its predictor along."""


def model_places() -> list[Path]:
    """Return the folders that may hold them: the source tree's, then those of ament prefixes."""
    source_tree = Path(__file__).resolve().parents[3] / "models"
    prefixes = [p for p in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if p]
    shares = [Path(p) / "share" / "memspec_ros" / "models" for p in [*prefixes, sys.prefix]]
    return [source_tree, *shares]


def brought_along(name: str) -> Path | None:
    """Return the folder of a model that the project brings along, None if there is none."""
    return next((place / name for place in model_places() if (place / name).is_dir()), None)
