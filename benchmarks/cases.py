"""The headline cases of training, as recipes: train.py measures them, gate.py runs them with fewer layers.

Does not import torch, so that parts of the gate that only call `unspool` start quickly.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

ASSETS = Path(__file__).resolve().parents[1] / "src" / "unspool" / "assets"
BOOKS = ASSETS / "demo" / "train.jsonl.zst"
TOKENIZER = ASSETS / "tiny-base"
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMOLLM2_135M = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
LARGE = {
    "optimizer": {"weights": "bf16", "states": "8bit"},
    "activation_checkpointing": "keep-attention",
    "compile": True,
    "lr": 2e-5,  # random weights of this size diverge within three steps at 1e-4
}
SHORT_MEAN = 600  # tokens of a short document; lengths are log-normal, as in real text
NEVER = 1_000_000  # steps between checkpoints
# For tests on a CPU: 1K is 8 tokens.
SMALL_UNIT = 8
SMALL_SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: dict[str, Any]
    length: int
    settings: dict[str, Any]  # of the stage
    rows_per_step: int = 1
    # Rows of one document (`whole`) to rows of short ones (`short`).
    mix: dict[str, int] = field(default_factory=lambda: {"whole": 1})
    timed: int = 2  # steps, after one of each kind of row
    checkpoint_every: int = NEVER
    goal: int = 0  # tokens per second of the product
    # The case whose peer result is used here, because it takes the peer the same time.
    same_peer: str | None = None
    # The case with equal settings whose steps on whole rows are this case's steps, so that both need one run.
    same_steps: str | None = None
    small: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.small else "cuda"

    @property
    def profiled(self) -> int:
        """Steps under the profiler, after the measured steps."""
        return 1 if self.timed < 5 else 2

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.rows_per_step * self.length

    def with_layers(self, layers: int) -> "Case":
        """Keep products in the same share of layers."""
        share = layers / self.shape["num_hidden_layers"]
        keys = ("keep_products", "keep_on_host")
        kept = {key: round(self.settings[key] * share) for key in keys if key in self.settings}
        return replace(self, shape=self.shape | {"num_hidden_layers": layers}, settings=self.settings | kept)

    def as_small(self) -> "Case":
        """The case with shapes for a CPU."""
        few = {key: 2 for key in ("keep_products", "keep_on_host") if key in self.settings}
        return replace(
            self,
            shape=self.shape | SMALL_SHAPE,
            length=self.length // 1024 * SMALL_UNIT,
            settings=self.settings | few | {"compile": False, "lr": 1e-2},
            small=True,
        )


KEPT_64K = {"offload": True, "keep_products": 30, "keep_on_host": 15}
# Most important first.
CASES = {
    "135m-32k": Case(
        shape=SMOLLM2_135M,
        length=32 << 10,
        rows_per_step=4,
        goal=75_000,
        timed=10,
        checkpoint_every=8,
        settings={"compile": True, "lr": 1e-3},
    ),
    "8b-64k": Case(shape=LLAMA_8B, length=64 << 10, goal=5300, same_steps="8b-prolong", settings=LARGE | KEPT_64K),
    "8b-prolong": Case(
        shape=LLAMA_8B,
        length=64 << 10,
        goal=6300,
        mix={"whole": 5, "short": 3},
        timed=3,
        same_peer="8b-64k",
        settings=LARGE | KEPT_64K,
    ),
    "8b-128k": Case(
        shape=LLAMA_8B,
        length=128 << 10,
        goal=3200,
        timed=1,
        settings=LARGE | {"offload": True, "keep_products": 8, "keep_on_host": 5},
    ),
}
# What length costs (docs/results/cost.md): steps of 64K tokens, and one row of 256K. Not measured by default.
LENGTHS = {
    "8b-8x8k": Case(
        shape=LLAMA_8B,
        length=8 << 10,
        rows_per_step=8,
        timed=3,
        settings=LARGE | {"activation_checkpointing": "none"},
    ),
    "8b-4x16k": Case(shape=LLAMA_8B, length=16 << 10, rows_per_step=4, settings=LARGE | {"keep_products": 32}),
    "8b-2x32k": Case(
        shape=LLAMA_8B,
        length=32 << 10,
        rows_per_step=2,
        settings=LARGE | {"offload": True, "keep_products": 30, "keep_on_host": 8},
    ),
    "8b-256k": Case(
        shape=LLAMA_8B, length=256 << 10, timed=1, settings=LARGE | {"offload": True, "mlp_tiles": 64 << 10}
    ),
}
# Only for plan.py: one row of 8K, no recomputation.
PLANNED = {
    "8b-8k": Case(shape=LLAMA_8B, length=8 << 10, settings=LARGE | {"activation_checkpointing": "none"}),
}


def tokens_per_second(case: Case, samples: list[tuple[str, float]]) -> float:
    """Tokens per second, each kind of row weighted by its share of the mix; unmeasured kinds are skipped."""
    means = {kind: float(np.mean([seconds for own, seconds in samples if own == kind])) for kind, _ in samples}
    step = sum(case.mix[kind] * mean for kind, mean in means.items()) / sum(case.mix[kind] for kind in means)
    return case.tokens / step


def plan_steps(case: Case) -> list[tuple[str, bool]]:
    """Kind of row of each step, and whether the step counts: steps count once each kind has occurred."""
    from unspool.data.mixture import Mix

    mix = Mix(case.mix, dict.fromkeys(case.mix, 1), dict.fromkeys(case.mix, case.length), case.length, seed=0)
    steps: list[tuple[str, bool]] = []
    while sum(counts for _, counts in steps) < case.timed:
        [(kind, _)] = mix.slot(len(steps) * case.rows_per_step)
        steps.append((kind, {seen for seen, _ in steps} == set(case.mix)))
    return steps


def write_model_files(case: Case, folder: Path, *, context: int = 8 << 10) -> None:
    """Write config and tokenizer of a model folder, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **case.shape,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for path in TOKENIZER.glob("tokenizer*.json"):
        (folder / path.name).write_bytes(path.read_bytes())


def write_recipe(case: Case, folder: Path, name: str, *, model: Path, steps: int, **settings: Any) -> Path:
    """Write `folder/name.yaml`, a recipe of one stage with the run folder `folder/name`. JSON is valid YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = {"books": {"kind": "jsonl", "path": "asset:demo/train.jsonl.zst"}}
    datasets: dict[str, dict[str, Any]] = {"whole": {"from": "books", "seq_len": case.length, "attention": "full"}}
    if "short" in case.mix:
        sources["pieces"] = {"kind": "jsonl", "path": str(write_pieces(folder / "pieces.jsonl", case))}
        datasets["short"] = {"from": "pieces", "seq_len": case.length}
    stage = {
        "name": "stage",
        "context_length": case.length,
        "rope": {"method": "abf", "base": 8e6},
        "mix": case.mix,
        "tokens": steps * case.tokens,
        "batch_tokens": case.tokens,
        "checkpoint_every": case.checkpoint_every,
        **case.settings,
        **settings,
    }
    recipe = {
        "name": name,
        "model": str(model),
        "out": str(folder / name),
        "device": case.device,
        "sources": sources,
        "datasets": datasets,
        "stages": [stage],
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe))
    return path


def write_pieces(path: Path, case: Case) -> Path:
    """Write short documents: the demo's books, cut into pieces."""
    if path.exists():
        return path
    characters = 3.3 * SHORT_MEAN * case.length / (64 << 10)
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        number = 0
        for text in read_books():
            start = 0
            while start < len(text):
                size = max(8, int(rng.lognormal(np.log(characters) - 0.5, 1.0)))
                file.write(json.dumps({"id": str(number), "text": text[start : start + size]}) + "\n")
                start, number = start + size, number + 1
    return path


def read_books() -> Iterator[str]:
    import pyarrow as pa

    with pa.input_stream(str(BOOKS), compression="zstd") as stream:
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            yield json.loads(line)["text"]
