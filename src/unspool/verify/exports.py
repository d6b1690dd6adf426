"""Promise 4: an exported folder gives the same logits in plain `transformers`, in a process that never saw us.

The process is started at the first question and asked again for every further model, since importing `transformers`
takes seconds. Where a folder brings a modelling file of its own, that process is allowed to run it.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from unspool.model.export import save_model
from unspool.model.tokenizer import load_tokenizer
from unspool.verify import plain_child
from unspool.verify.case import Case
from unspool.verify.result import Measured, SkippedError
from unspool.verify.tolerance import FP32


class PlainProcess(AbstractContextManager["PlainProcess"]):
    """`with PlainProcess() as plain: plain.logits(folder, tokens, device=…)`"""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._child: subprocess.Popen[str] | None = None

    def logits(self, folder: Path, tokens: list[int], *, device: str) -> Tensor:
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        out = Path(self._scratch.name) / "logits.safetensors"
        config = json.loads((folder / "config.json").read_text())
        request = {
            "folder": str(folder),
            "tokens": tokens,
            "device": device,
            "remote_code": "auto_map" in config,
            "out": str(out),
        }
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"plain transformers ended without an answer (exit code {child.wait()})")
        answer = json.loads(line)
        assert not answer["ours"], "the plain process has loaded Unspool, so it proves nothing"
        if answer["error"]:
            raise RuntimeError(f"plain transformers cannot load the export: {answer['error']}")
        return load_file(out)["logits"]

    def _started(self) -> "subprocess.Popen[str]":
        if self._child is None:
            # -P: a program's own folder would come first among those that modules are found in.
            self._child = subprocess.Popen(
                [sys.executable, "-P", plain_child.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=self._scratch.name,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": self._scratch.name},
            )
        return self._child

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            assert self._child.stdin is not None and self._child.stdout is not None
            self._child.stdin.close()
            self._child.wait()
            self._child.stdout.close()
        self._scratch.cleanup()


def exported(case: Case, plain: PlainProcess) -> list[Measured]:
    """The model in memory against its export, in fp32 on every device."""
    (row,) = case.steps["unequal"].rows
    # One sequence as long as the row, so that positions reach further than in any single document.
    tokens = [int(token) for token in row.tokens]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(case.model, load_tokenizer(case.subject.ref), folder, dtype=torch.float32)
        if _only_ours(folder):
            raise SkippedError("a base per head is exported without a modelling file, so only Unspool can load it")
        theirs = plain.logits(folder, tokens, device=case.device.type)
    with torch.no_grad():
        ids = torch.tensor([tokens], device=case.device)
        ours = case.model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    error = float((ours - theirs).norm() / theirs.norm())
    agree = float((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).float().mean())
    return [
        Measured(quantity="logits", error=error, tolerance=FP32, detail=f"same best token at {agree:.0%} of positions")
    ]


def _only_ours(folder: Path) -> bool:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return "head_bases" in config and "auto_map" not in config
