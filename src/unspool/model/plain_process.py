"""Asking plain `transformers` for logits, in a process that never saw Unspool.

In: requests as plain_logits.py takes them. Out: its answers.
Promise: the process starts with the first question and serves all further ones, since importing `transformers` takes
seconds; it works offline, and code that a folder brings is not left in the user's cache.
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

SCRIPT = Path(__file__).with_name("plain_logits.py")


class PlainError(RuntimeError):
    """What plain `transformers` says instead of an answer."""


class PlainProcess(AbstractContextManager["PlainProcess"]):
    """`with PlainProcess() as plain: plain.answers(build_request(…))`"""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._child: subprocess.Popen[str] | None = None

    def answers(self, request: dict[str, Any]) -> dict[str, Tensor]:
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        out = Path(self._scratch.name) / "answers.safetensors"
        line = ""
        try:
            child.stdin.write(json.dumps(request | {"out": str(out)}) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            pass  # it has ended, and said why
        if not line:
            code, said = child.wait(), self._errors.read_text().strip().splitlines()
            raise PlainError(said[-1] if said else f"exit code {code}")
        error = json.loads(line)["error"]
        if error:
            raise PlainError(error)
        return load_file(out)

    @property
    def _errors(self) -> Path:
        return Path(self._scratch.name) / "errors.txt"

    def _started(self) -> "subprocess.Popen[str]":
        if self._child is None:
            with self._errors.open("w") as errors:
                self._child = subprocess.Popen(
                    # -P: files beside the script are parts of Unspool, and not to be found by their bare names.
                    [sys.executable, "-P", str(SCRIPT)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    cwd=self._scratch.name,
                    env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{self._scratch.name}/modules"},
                )
        return self._child

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            # Closes its input, which ends it.
            self._child.communicate()
        self._scratch.cleanup()


def build_request(
    folder: Path, passes: list[dict[str, Any]], *, text: str | None, device: torch.device
) -> dict[str, Any]:
    """A folder's own code may run, if it has any: we wrote it."""
    config = json.loads((folder / "config.json").read_text())
    return {
        "folder": str(folder.resolve()),
        "remote_code": "auto_map" in config,
        "device": device.type,
        "text": text,
        "passes": passes,
    }
