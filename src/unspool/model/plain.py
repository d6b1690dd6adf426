"""Whether an exported folder is, for plain `transformers`, the model that we have.

In: a model of ours and the folder it was written to. Out: the largest difference of logits, pass by pass.
Promise: compared with the model in memory, not with the folder read back, so that what was written wrongly shows;
the other side is a fresh process without Unspool (plain_process.py).
Price: the folder's weights are loaded once more, in fp32, where rounding hides nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspool.base.errors import UnspoolError
from unspool.model.plain_process import PlainError, PlainProcess, build_request

TEXT = "The river runs past the old mill; 1, 2, 3.\n\nBeyond it, nothing."
SHORT, LONG, FAR = 16, 512, 64
KEEP = 64
# Of the largest logit. Computed in fp32 on both sides, so only the order of sums differs.
TOLERANCE = 2e-4
# For logits in the dtype that is written, against ours in fp32: as far as its rounding goes through many layers.
ROUNDING = {torch.bfloat16: 0.25, torch.float16: 0.1}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Tokens at positions, and our logits of the last `keep` of them."""

    name: str
    ids: list[int]
    positions: list[int]
    logits: Tensor
    tolerance: float = TOLERANCE
    dtype: str = "float32"
    cached: bool = False  # the others are read first, the last `keep` find their keys in a cache

    @property
    def keep(self) -> int:
        return len(self.logits)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One line of the check: the largest difference of logits, as a share of the largest logit."""

    name: str
    tokens: int
    last_position: int
    dtype: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Give the weights the values they will have in a file of `dtype`."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))


@torch.inference_mode()
def our_passes(model: Any, dtype: torch.dtype) -> list[Pass]:
    """Our logits, of a model in fp32 whose weights are rounded to `dtype`."""
    context = int(model.config.max_position_embeddings)
    num_long = min(LONG, context)
    # Distances up to the whole context, at the price of few tokens.
    spread = torch.linspace(0, context - 1, min(FAR, context)).long().tolist()
    short = _computed(model, "short", list(range(min(SHORT, context))))
    long = _computed(model, "long", list(range(num_long)))
    cached = Pass(name="cached", ids=long.ids, positions=long.positions, logits=long.logits[-SHORT // 2 :], cached=True)
    passes = [short, long, cached, _computed(model, "far", spread)]
    if dtype in ROUNDING:
        name, tolerance = str(dtype).removeprefix("torch."), ROUNDING[dtype]
        passes.append(Pass(**vars(short) | {"name": f"in {name}", "dtype": name, "tolerance": tolerance}))
    return passes


def _computed(model: Any, name: str, positions: list[int]) -> Pass:
    # Spread over the vocabulary, by a step that is prime.
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = [7919 * number % vocabulary for number in range(1, len(positions) + 1)]
    tokens, places = (torch.tensor([values], device=model.device) for values in (ids, positions))
    logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits[0, -KEEP:]
    return Pass(name=name, ids=ids, positions=positions, logits=logits.float().cpu())


def check_folder(folder: Path, passes: list[Pass], tokenizer: Any, *, device: torch.device) -> list[Compared]:
    """Compare `passes` with what a fresh process makes of `folder`; UnspoolError if it is another model there."""
    fields = ("name", "ids", "positions", "keep", "dtype", "cached")
    asked = [{name: getattr(one, name) for name in fields} for one in passes]
    try:
        answers = _in_fresh_process(build_request(folder, asked, text=TEXT, device=device))
    except PlainError as error:
        raise UnspoolError(
            f"the export could not be loaded in plain transformers, so nothing was published: {error}"
        ) from error
    if answers["text"].tolist() != tokenizer(TEXT)["input_ids"]:
        raise UnspoolError(f"{folder}: read back by plain transformers, the tokenizer gives other tokens.")
    compared = [
        Compared(
            name=one.name,
            tokens=len(one.ids),
            last_position=one.positions[-1],
            dtype=one.dtype,
            error=float((answers[one.name] - one.logits).abs().max() / one.logits.abs().max()),
            tolerance=one.tolerance,
        )
        for one in passes
    ]
    failed = [one for one in compared if not one.passed]
    if failed:
        errors = ", ".join(f"{one.name} {one.error:.2g} (at most {one.tolerance:g})" for one in failed)
        raise UnspoolError(
            f"the export is not the same model in plain transformers, so nothing was published: largest difference "
            f"of logits as a share of the largest logit: {errors}."
        )
    return compared


def _in_fresh_process(request: dict[str, Any]) -> dict[str, Tensor]:
    with PlainProcess() as process:
        return process.answers(request)
