"""How the draft is chosen: one small class a strategy, all behind one protocol."""

from memspec_core.settings import Settings
from memspec_core.strategies.base import Context, Ranking, Strategy
from memspec_core.strategies.static import GeneralStatic, StaticStrategy

__all__ = ["Context", "GeneralStatic", "Ranking", "StaticStrategy", "Strategy", "create_strategy"]


def create_strategy(settings: Settings) -> Strategy:
    """Create the strategy that the settings name."""
    strategies = {GeneralStatic.name: GeneralStatic}
    return strategies[settings.strategy](settings.draft_names)
