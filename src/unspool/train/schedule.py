"""Learning rate by step."""

import math

from unspool.train.config import StageConfig


def learning_rate(stage: StageConfig, step: int) -> float:
    """Rate of step 1 … `stage.steps`: linear warm-up, then a cosine down to the floor."""
    warmup_steps = int(stage.warmup * stage.steps)
    if step <= warmup_steps:
        return stage.lr * step / warmup_steps
    done = (step - warmup_steps) / max(1, stage.steps - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return stage.lr * (stage.lr_floor + (1 - stage.lr_floor) * cosine)
