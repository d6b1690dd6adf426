"""Promise 4: an exported folder gives the same logits in plain `transformers`, in a process that never saw us."""

import tempfile
from pathlib import Path

import torch

from unspool.model.export import save_model
from unspool.model.plain_process import PlainError, PlainProcess, build_request
from unspool.model.tokenizer import load_tokenizer
from unspool.verify.case import Case
from unspool.verify.result import Measured
from unspool.verify.tolerance import FP32


def exported(case: Case, plain: PlainProcess) -> list[Measured]:
    """The model in memory against its export, in fp32 on every device."""
    (row,) = case.steps["unequal"].rows
    # One sequence as long as the row, so that positions reach further than in any single document.
    tokens = [int(token) for token in row.tokens]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(case.model, load_tokenizer(case.subject.ref), folder, dtype=torch.float32)
        asked = {
            "name": "row",
            "ids": tokens,
            "positions": list(range(len(tokens))),
            "keep": len(tokens),
            "dtype": "float32",
            "cached": False,
        }
        try:
            theirs = plain.answers(build_request(folder, [asked], text=None, device=case.device))["row"]
        except PlainError as problem:
            raise RuntimeError(f"plain transformers cannot load the export: {problem}") from problem
    with torch.no_grad():
        ids = torch.tensor([tokens], device=case.device)
        ours = case.model_in_fp32()(input_ids=ids, use_cache=False).logits[0].float().cpu()
    error = float((ours - theirs).norm() / theirs.norm())
    agree = float((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).float().mean())
    return [
        Measured(quantity="logits", error=error, tolerance=FP32, detail=f"same best token at {agree:.0%} of positions")
    ]
