"""Number of tokens that a recipe can use of each source, so that no more is streamed from the Hub."""

import math

from unspool.recipe.schema import Recipe

# Rows are cut and shares are met only approximately, so this much more is read.
MARGIN = 1.05


def tokens_needed(recipe: Recipe, source: str) -> int | None:
    """Return the tokens of a source that all stages together train on; None if that depends on its documents.

    `packing: single_doc` and `truncate` drop an unknown part of the text, and `score` chooses among all
    documents. A dataset that is in no mix (held-out text,
    attention distillation) is read completely unless it has a `limit`.
    """
    total = 0.0
    for name, config in recipe.datasets.items():
        if source not in config.shares:
            continue
        drawn = [
            stage.tokens * stage.mix[name] / sum(stage.mix.values()) for stage in recipe.stages if name in stage.mix
        ]
        wanted = config.limit or (math.ceil(sum(drawn)) if drawn else None)
        if config.score or wanted is None or config.packing in ("single_doc", "truncate"):
            return None
        total += (wanted + config.seq_len) * config.shares[source] / sum(config.shares.values())
    return math.ceil(MARGIN * total) or None
