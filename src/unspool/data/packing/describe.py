"""Describe how a dataset was packed, from its settings in a recipe or manifest."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from unspool.data.packing.config import STRATEGIES
from unspool.data.strategies.base import StrategyConfig

# Modes that matter to viewers: one continues documents in the next row, one pads rows at the end.
CONTINUING_MODE, PADDING_MODE = "concat", "best_fit"


def packing_mode(settings: Mapping[str, Any]) -> str:
    return str(settings.get("packing") or "")


def recorded_strategies(settings: Mapping[str, Any]) -> list[StrategyConfig]:
    """Return the strategies of a dataset; settings that this version rejects are used without validation."""
    found = []
    for name, strategy in STRATEGIES.items():
        given = settings.get(name)
        if not isinstance(given, dict):
            continue
        try:
            found.append(strategy.model_validate(given))
        except ValidationError:
            found.append(strategy.model_construct(**given))
    return found


def strategy_titles(settings: Mapping[str, Any]) -> list[str]:
    titles = [strategy.title for name, strategy in STRATEGIES.items() if settings.get(name)]
    return [*titles, *(["with synthetic tasks"] if settings.get("replace") else [])]


def describe_shares(shares: Mapping[str, Mapping[str, float]]) -> str:
    """Describe the realized and requested shares of trained tokens by source, from a dataset's counts."""
    return ", ".join(f"{name} {of['realized']:.2%} (requested {of['requested']:.2%})" for name, of in shares.items())


def summarize_packing(settings: Mapping[str, Any]) -> list[str]:
    """Describe the packing mode and the strategies of a dataset, one phrase each."""
    phrases = [packing_mode(settings), *(strategy.summary() for strategy in recorded_strategies(settings))]
    replaced = settings.get("replace")
    phrases += [f"a share of {replaced.get('with')}"] if isinstance(replaced, dict) else []
    return [phrase for phrase in phrases if phrase]
