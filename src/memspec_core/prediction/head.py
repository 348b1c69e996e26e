"""The ranking head: a linear map of the context and a softmax, one probability a draft.

A predictor is a folder: `predictor.safetensors` holds `weight` [drafts, inputs], `bias` [drafts]
and `acceptance` [drafts, drafts], all fp32; `predictor.json` says what they are for.
"""

import json
import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from memspec_core.errors import PredictorError
from memspec_core.files import whole_folder
from memspec_core.models.places import PREDICTOR, brought_along
from memspec_core.prediction.context import BOTH, FORMS, RECENT, Vector
from memspec_core.settings import DEFAULT

MANIFEST = "predictor.json"
WEIGHTS = "predictor.safetensors"
FORMAT_VERSION = 1

HIDDEN_STATES = "hidden_states"
"""The target's own states."""

MINILM = "minilm"
"""A sentence encoder's, over the text: the paper's form, for comparison."""

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PredictorPlan:
    """What a predictor reads and ranks.

    `drafts` in the order of the rows; `inputs`: one of `context.FORMS`; `hidden_size`: numbers
    that the encoder gives; `positions`: states, or tokens for a text encoder, that are recent;
    `prompt_positions`: those that count of the prompt; `interval`: iterations between scheduling
    points that it was trained for; `card`: everything else, for people.
    """

    drafts: tuple[str, ...]
    inputs: str
    encoder: str
    hidden_size: int
    positions: int
    prompt_positions: int
    interval: int
    target_sha256: str
    card: dict[str, Any]

    @property
    def input_size(self) -> int:
        """How many numbers the head reads."""
        return self.hidden_size * (2 if self.inputs == BOTH else 1)


@dataclass(frozen=True)
class RankingHead:
    """One probability a draft: softmax of `weight` [d, inputs] times the context plus `bias` [d].

    The mean and scale of the training inputs are folded into both. `acceptance` [d, d]: in row k
    the share of proposals of each draft that were right where draft k was the label.
    """

    plan: PredictorPlan
    weight: Matrix
    bias: Vector
    acceptance: Matrix

    def __post_init__(self) -> None:
        """Check the shapes and values."""
        count = len(self.plan.drafts)
        shapes = {
            "weight": (count, self.plan.input_size),
            "bias": (count,),
            "acceptance": (count, count),
        }
        for name, shape in shapes.items():
            values = getattr(self, name)
            if values.shape != shape:
                raise PredictorError(f"{name} has the shape {values.shape} instead of {shape}.")
            if not np.isfinite(values).all():
                raise PredictorError(f"{name} holds values that are not finite.")

    def after(self, prompt: Vector) -> "RankingHead":
        """Return the head that is left once a prompt [hidden] is known.

        Where this one reads the prompt beside what is recent, that one reads the latter alone: the
        prompt's share, which stays the same for an answer, is in its bias. Raises `PredictorError`
        for a prompt that does not fit.
        """
        if self.plan.inputs != BOTH:
            return self
        size = self.plan.hidden_size
        self._require_size(prompt, size)
        return RankingHead(
            replace(self.plan, inputs=RECENT),
            np.ascontiguousarray(self.weight[:, size:]),
            self.weight[:, :size] @ prompt + self.bias,
            self.acceptance,
        )

    def logits(self, vector: Vector) -> Vector:
        """Return what the softmax is of [d]; raises `PredictorError` for what does not fit."""
        self._require_size(vector, self.plan.input_size)
        values: Vector = self.weight @ vector + self.bias
        return values

    def _require_size(self, vector: Vector, size: int) -> None:
        if vector.shape != (size,):
            raise PredictorError(f"The predictor reads {size} numbers, not {vector.shape}.")

    @cached_property
    def priors(self) -> dict[str, list[float]]:
        """The columns of `acceptance` by draft: what it has right under each topic [d]."""
        return dict(zip(self.plan.drafts, self.acceptance.T.tolist(), strict=True))

    def expected_acceptance(self, probabilities: Sequence[float]) -> dict[str, float]:
        """Return the acceptance that probabilities [d] make one expect of each draft."""
        return {
            draft: sum(map(operator.mul, probabilities, priors))
            for draft, priors in self.priors.items()
        }


def softmax(logits: Vector) -> list[float]:
    """Return probabilities [d] of logits [d]; raises `PredictorError` where one is not finite."""
    # For a few numbers Python is quicker than calls of numpy.
    values = logits.tolist()
    if not all(map(math.isfinite, values)):
        raise PredictorError("The predictor was given values that are not finite.")
    top = max(values)
    raised = [math.exp(value - top) for value in values]
    total = sum(raised)
    return [value / total for value in raised]


def save_head(head: RankingHead, folder: Path) -> None:
    """Write a predictor's folder, whole or not at all."""
    tensors = {"weight": head.weight, "bias": head.bias, "acceptance": head.acceptance}
    weights = save({name: np.ascontiguousarray(value) for name, value in tensors.items()})
    fields = {"format_version": FORMAT_VERSION} | asdict(head.plan)
    fields["weights_sha256"] = sha256(weights).hexdigest()
    with whole_folder(folder) as partial:
        (partial / WEIGHTS).write_bytes(weights)
        (partial / MANIFEST).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def predictor_folder(path: str = DEFAULT) -> Path:
    """Return a predictor's folder; "default" is the one that the project brings along.

    Raises `PredictorError` where it brings none.
    """
    if path != DEFAULT:
        return Path(path).expanduser()
    found = brought_along(PREDICTOR)
    if found is None:
        raise PredictorError("The project brings no predictor along; set predictor.path.")
    return found


def weight_bytes(folder: Path) -> int:
    """Return the bytes that a predictor takes in memory, by its file; 0 where it has none."""
    path = folder / WEIGHTS
    return path.stat().st_size if path.is_file() else 0


def load_head(folder: Path, target_sha256: str) -> RankingHead:
    """Read a predictor for a target; raises `PredictorError`, which names folder and reason."""
    try:
        plan, checksum = _read_plan(folder / MANIFEST)
        weights = (folder / WEIGHTS).read_bytes()
    except OSError as error:
        raise PredictorError(
            f"There is no predictor in {folder} ({error}); make one with memspec train-predictor."
        ) from error
    if plan.target_sha256 != target_sha256:
        raise PredictorError(
            f"The predictor in {folder} was trained for another target (checksum "
            f"{plan.target_sha256[:12]}, not {target_sha256[:12]}); train one for this target."
        )
    if sha256(weights).hexdigest() != checksum:
        raise PredictorError(f"{folder / WEIGHTS} is damaged: its checksum is another.")
    try:
        tensors = load(weights)
        return RankingHead(plan, tensors["weight"], tensors["bias"], tensors["acceptance"])
    except (SafetensorError, KeyError, PredictorError) as error:
        raise PredictorError(f"{folder / WEIGHTS} cannot be used: {error}") from error


def _read_plan(path: Path) -> tuple[PredictorPlan, str]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version, checksum = fields.pop("format_version"), fields.pop("weights_sha256")
        plan = PredictorPlan(**fields | {"drafts": tuple(fields["drafts"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PredictorError(f"{path} is not the record of a predictor: {error!r}.") from error
    if version != FORMAT_VERSION:
        raise PredictorError(f"{path} has format {version}; {FORMAT_VERSION} is supported.")
    if plan.inputs not in FORMS:
        raise PredictorError(f"{path} has inputs '{plan.inputs}'; {', '.join(FORMS)} are known.")
    return plan, checksum
