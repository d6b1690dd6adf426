"""A few steps of training that can be watched, small enough to compare bit by bit."""

from typing import Any

import numpy as np
import torch

from factory import build_model, random_row
from unspool.training.batch import Batch, build_batch
from unspool.training.step import batch_loss

STEPS = 3


def batch_of(seed: int) -> Batch:
    return build_batch([random_row((20, 12), seed)], attention="intra_document")


def train_once(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    total, _ = batch_loss(model, batch)
    total.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total.detach())


def trained_weights(look: Any = None) -> dict[str, np.ndarray]:
    """Weights after a few steps of a model with dropout; `look` is called before each step and after the last."""
    model = build_model()
    drop = torch.nn.Dropout(0.1)
    model.base_model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: drop(out) if module.training else out
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    for step in range(STEPS):
        if look is not None:
            look(model)
        train_once(model, optimizer, batch_of(step))
    if look is not None:
        look(model)
        assert model.training
        assert all(weight.grad is None for weight in model.parameters())
    weights = {name: weight.detach().numpy().copy() for name, weight in model.named_parameters()}
    return weights | {f"buffer {name}": buffer.numpy().copy() for name, buffer in model.named_buffers()}


def assert_equal_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not np.array_equal(left[name], right[name])]
    assert not different, different[:3]
