"""The extension of docs/how-to/add-an-extension.md works as printed, registered and built in."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

import unspool
from factory import save_folder
from unspool.training.optim.base import ParamState
from unspool.training.optim.config import OPTIMIZERS

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "add-an-extension.md"
FENCES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
EXTENSION, REGISTRATION = FENCES
RECIPE = """
name: my
model: {model}
device: cpu
sources:
  recall: {{kind: recall, tokens: 8K, length: [64, 120], prose: asset:demo/train.jsonl.zst}}
datasets:
  packed: {{from: recall, seq_len: 128}}
stages:
  - {{name: short, context_length: 128, mix: {{packed: 1}}, tokens: 512, batch_tokens: 256, lr: 1e-4}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my.yaml").write_text(RECIPE.format(model=save_folder(tmp_path / "model")))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    OPTIMIZERS.pop("lion", None)


def test_the_optimizer_of_the_page_trains_saves_and_loads_its_state(folder):
    names = {"__name__": "lion"}
    exec(EXTENSION, names)
    exec(REGISTRATION, names)

    saved = safe_open(folder / "runs/my/stages/short/optimizer.safetensors", "pt")
    momenta = [key for key in saved.keys() if key.endswith("/momentum")]  # noqa: SIM118
    assert momenta and any(saved.get_tensor(key).abs().max() > 0 for key in momenta)
    again = names["LionConfig"]().build()
    assert unspool.plan("my.yaml", {"stages.0.optimizer": {"name": "lion"}}, gpu="h100").fits
    momentum = saved.get_tensor(momenta[0])
    param = ParamState(name="w", weight=momentum.clone(), shape=tuple(momentum.shape))
    param.state = again.init_state(param)
    again.load_state(param, {"momentum": momentum})
    assert param.state.equal(momentum)


def test_the_optimizer_of_the_page_needs_one_file_and_one_line_to_be_built_in(folder):
    source = Path(unspool.__file__).parent
    copied = folder / "src" / "unspool"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
    optim = copied / "training" / "optim"
    (optim / "lion.py").write_text(EXTENSION)
    registry = (optim / "config.py").read_text()
    listed = registry.replace('{"adamw": AdamWConfig}', '{"adamw": AdamWConfig, "lion": LionConfig}')
    assert listed != registry
    imported = "from unspool.training.optim.base import "
    (optim / "config.py").write_text(
        listed.replace(imported, f"from unspool.training.optim.lion import LionConfig\n{imported}", 1)
    )
    command = [sys.executable, "-m", "unspool", "recipes", "check", "my.yaml", "--set", "stages.0.optimizer.name=lion"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(folder / "src")}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no problems" in done.stdout
