"""How the draft is chosen: one small class a strategy, all behind one protocol."""

from collections.abc import Callable

from memspec_core.prediction.head import RankingHead
from memspec_core.prediction.predictor import Predictor
from memspec_core.settings import Settings
from memspec_core.strategies.bandit import MabAsync, MabSync
from memspec_core.strategies.base import Context, Outlook, Ranking, Strategy
from memspec_core.strategies.memspec import MemSpec, PredictionOnly
from memspec_core.strategies.static import GeneralStatic, StaticStrategy

__all__ = [
    "PREDICTING",
    "Context",
    "GeneralStatic",
    "MabAsync",
    "MabSync",
    "MemSpec",
    "Outlook",
    "PredictionOnly",
    "Ranking",
    "StaticStrategy",
    "Strategy",
    "create_strategy",
]

PREDICTING = (MemSpec.name, PredictionOnly.name)
"""The strategies that rank by a predictor."""

USUAL_LENGTH = 3
"""Proposals that drafts are compared with where each iteration's number is chosen by itself."""


def create_strategy(
    settings: Settings,
    head: RankingHead | None = None,
    on_fault: Callable[[str], None] = lambda _: None,
) -> Strategy:
    """Create the strategy that the settings name, for one generation.

    `head`: the trained predictor of those that have one; without it all drafts count alike.
    `on_fault` is told at each use of it why it failed, or nothing where it did not.
    """
    names = settings.draft_names
    if settings.strategy == GeneralStatic.name:
        return GeneralStatic(names)
    bandits = {kind.name: kind for kind in (MabSync, MabAsync)}
    if settings.strategy in bandits:
        return bandits[settings.strategy](names, settings.bandit_exploration)
    predictor = None
    if head is not None:
        length = settings.draft_length or USUAL_LENGTH
        predictor = Predictor(head, observation=settings.observation, length=length)
    of_prediction = {kind.name: kind for kind in (MemSpec, PredictionOnly)}
    return of_prediction[settings.strategy](names, predictor, on_fault)
