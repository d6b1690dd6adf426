"""The state of every global random generator, as JSON can hold it.

Nothing here draws from them: rows come in an order that is a function of the step. Models may (dropout), and so may
rounding; their numbers must go on where they were.
"""

import base64
import random
from typing import Any

import numpy as np
import torch

from unspool.base.rng import rng_for


def seed_all(seed: int, purpose: str) -> None:
    """The same start for every generator, whatever ran before in this process."""
    first, second, third = rng_for(seed, "generators", purpose).integers(2**32, size=3).tolist()
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)


def read_random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    assert isinstance(of_numpy, dict)
    return {
        "python": [version, list(words), gauss],
        "numpy": of_numpy | {"state": of_numpy["state"] | {"key": of_numpy["state"]["key"].tolist()}},
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if _has_used_cuda() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_tensor(state["torch"]))
    # Another number of GPUs: those that are there get theirs.
    if torch.cuda.is_available():
        for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(text), device)


def _has_used_cuda() -> bool:
    # Asking for its state would start a device that this run does not use.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
