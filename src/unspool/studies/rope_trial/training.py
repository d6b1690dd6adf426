"""Train the candidates of a trial for a few tokens: one recipe of one stage each, with the same rows in the same order.

The recipes and the packed rows stay in the trial's folder. A trained model is deleted when its losses are known.
"""

import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from unspool.core.artifacts import remove, write_atomic
from unspool.core.config import did_you_mean
from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.evals.heldout import heldout_source
from unspool.models.location import resolve_path
from unspool.recipe.part_of_recipe import check_stage
from unspool.recipe.run_recipe import run
from unspool.recipe.yaml_lines import CoreDumper
from unspool.studies.rope_trial.candidates import Candidate
from unspool.training.config import StageConfig

# The bundled books that no held-out text is from.
BUNDLED = "asset:demo/train.jsonl.zst"
# Steps of the default batch size, if the tokens are enough for so many rows.
STEPS = 32
LR = 2e-5
# Keys of the stage that the trial sets itself.
FIXED = ("name", "init", "context_length", "export_context_length", "rope", "mix", "tokens")
DATASET = "rows"


@dataclass(frozen=True, kw_only=True)
class TrialTraining:
    """What the training of every candidate has in common."""

    model: str
    context_len: int
    tokens: int
    text: str
    """Files to train on."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the stage that replace the trial's own."""
    seed: int = 0
    device: str = "auto"
    folder: Path

    def stage(self) -> dict[str, Any]:
        """The settings of the stage, without its name and RoPE method."""
        rows = max(1, self.tokens // (STEPS * self.context_len))
        return {
            "init": "base",
            "context_length": self.context_len,
            "mix": {DATASET: 1.0},
            "tokens": self.tokens,
            "batch_tokens": rows * self.context_len,
            "lr": LR,
            "activation_checkpointing": "keep-attention",
            # None before the last step: in a short training, checkpoints would take longer than a repetition.
            "checkpoint_every": self.tokens,
            **self.settings,
        }

    def recipe(self, candidate: Candidate, name: str) -> dict[str, Any]:
        source = heldout_source(self.text)
        return {
            "name": "rope-trial",
            "seed": self.seed,
            "model": self.model,
            "out": str(self.folder / "run"),
            "device": self.device,
            "sources": {"text": {"kind": source.kind, "path": self.text}},
            "datasets": {DATASET: {"from": "text", "seq_len": self.context_len}},
            "stages": [{"name": name, "rope": candidate.method.model_dump(mode="json"), **self.stage()}],
        }

    def check(self, candidate: Candidate) -> StageConfig:
        """Check the recipe of a candidate before any work; ConfigError with the wrong key."""
        if self.tokens < self.context_len:
            raise ConfigError(
                f"`tokens` {format_size(self.tokens)} do not fill one row of {format_size(self.context_len)} tokens; "
                "give more."
            )
        allowed = [key for key in StageConfig.model_fields if key not in FIXED]
        for key in self.settings:
            if key in FIXED:
                raise ConfigError(f"`stage_settings`: the trial itself sets {key} of the stage; remove it.")
            if key not in allowed:
                raise ConfigError(f"`stage_settings`: a stage has no key {key!r}{did_you_mean(key, allowed)}")
        return check_stage(self.recipe(candidate, "trial")["stages"][0], "`stage_settings`")

    def write(self, candidate: Candidate, name: str) -> Path:
        """Write the recipe that trains a candidate."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.yaml"
        plain = self.recipe(candidate, name)
        write_atomic(path, yaml.dump(plain, Dumper=CoreDumper, sort_keys=False, allow_unicode=True))
        return path

    def train(self, candidate: Candidate, name: str) -> Path:
        """Train a candidate and return the folder of its model; a finished one is not trained again."""
        found = run(self.write(candidate, name), until="train")
        _free_memory()
        return found.models[name]

    def forget(self, name: str) -> None:
        """Delete the trained model, its optimizer state and unfinished work."""
        for folder in (self.folder / "run" / "stages" / each for each in (name, f"{name}.work")):
            if folder.exists():
                remove(folder)


def _free_memory() -> None:
    """Free the optimizer's memory before the model is scored, and what torch.compile cached for other candidates."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def bundled_text() -> str:
    return resolve_path(BUNDLED, Path())
