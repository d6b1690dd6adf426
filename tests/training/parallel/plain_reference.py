"""What a stage must compute, written a second time: plain `transformers`, one document after another, on one process.

Nothing of the package takes part. The rows are read from the files that `unspool pack` wrote, which rows a step has
from the run's ledger. Labels, RoPE settings, HARPE's rotation, clipping and AdamW are written here by hand.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

PER_HEAD = "plain-reference-per-head"


@dataclass(frozen=True)
class Rope:
    """A method as a recipe names it, and what it means: settings of `transformers`, or a base for each head."""

    recipe: dict[str, Any]
    parameters: dict[str, Any] | None = None
    bases: tuple[float, ...] | None = None


@dataclass
class Reference:
    losses: list[float] = field(default_factory=list)  # by step
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # after the last step
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    doc_lens: list[int] = field(default_factory=list)  # of all steps
    labels: list[np.ndarray] = field(default_factory=list)  # of each row of all steps

    def empty_parts(self, ranks: int) -> int:
        """Rows of which one of `ranks` ranks, which share it evenly, has no valid label."""
        return sum(any((part < 0).all() for part in np.array_split(labels, ranks)) for labels in self.labels)


def train_plain(model_dir: Path, rows_dir: Path, stage_dir: Path, rope: Rope, *, lr: float) -> Reference:
    """Train what the ledger of `stage_dir` says was trained. The learning rate is constant."""
    config = AutoConfig.from_pretrained(model_dir)
    if rope.parameters is not None:
        config.rope_parameters = dict(rope.parameters)
    attention = "eager" if rope.bases is None else PER_HEAD
    AttentionInterface.register(PER_HEAD, _attend_per_head)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, config=config, attn_implementation=attention, dtype=torch.float32
    )
    for layer in model.model.layers:
        layer.self_attn.reference_bases = rope.bases
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for weight in named.values() if weight.dim() > 1], "weight_decay": 0.1},
            {"params": [weight for weight in named.values() if weight.dim() == 1], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    rows = list(_rows(rows_dir))
    found = Reference(start={name: weight.detach().clone() for name, weight in named.items()})
    for line in (stage_dir / "ledger.jsonl").read_text().splitlines():
        (indices,) = json.loads(line)["rows"].values()
        documents = [document for index in indices for document in _documents(rows[index])]
        found.labels += [np.concatenate([labels for _, labels in _documents(rows[index])]) for index in indices]
        found.doc_lens += [len(tokens) for tokens, _ in documents]
        num_valid = sum(int((labels >= 0).sum()) for _, labels in documents)
        total = 0.0
        for tokens, labels in documents:
            if rope.bases is None:
                # A new one for each document: `dynamic` in `transformers` remembers longer inputs.
                model.model.rotary_emb = type(model.model.rotary_emb)(config)
            logits = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
            loss = F.cross_entropy(logits.float(), torch.from_numpy(labels), ignore_index=-1, reduction="sum")
            (loss / num_valid).backward()
            total += loss.item()
        found.losses.append(total / num_valid)
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {name: weight.detach() for name, weight in named.items()}
    return found


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("rows-*.arrow")):
        with pa.memory_map(str(path)) as source:
            yield from pa.ipc.open_file(source).read_all().to_pylist()


def _documents(row: dict[str, Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of what attends to itself; −1 where there is no loss.

    A tangled row attends to all of itself, but no label crosses the border of two of its pieces.
    """
    tokens = np.array(row["tokens"], dtype=np.int64)
    labels = np.append(tokens[1:], -1)
    ends = np.cumsum(row["doc_lens"])
    labels[ends - 1] = -1
    if row["loss_mask"] is not None:
        labels[:-1][np.array(row["loss_mask"][1:]) == 0] = -1
    borders = [0, len(tokens)] if row["attention"] == "full" else [0, *ends.tolist()]
    for begin, end in pairwise(borders):
        yield tokens[begin:end], labels[begin:end]


def _attend_per_head(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention on heads that the model has rotated by its own base: turned back, then by each head's."""
    length, dim = key.shape[2:]
    own = _turns(torch.full((1,), 1e4, dtype=torch.float64), length, dim)
    turns = _turns(torch.tensor(module.reference_bases, dtype=torch.float64), length, dim) / own
    groups = query.shape[1] // key.shape[1]
    query, key = _turn(query, turns.repeat_interleave(groups, dim=0)), _turn(key, turns)
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)) * scaling
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None


def _turns(bases: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    angles = torch.arange(length)[:, None] * bases[:, None, None] ** (-torch.arange(0, dim, 2) / dim).double()
    return torch.polar(torch.ones_like(angles), angles)


def _turn(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    turned = torch.complex(*heads.double().chunk(2, dim=-1)) * turns
    return torch.cat((turned.real, turned.imag), dim=-1).float()


def losses_of(stage_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (stage_dir / "metrics.jsonl").read_text().splitlines()]


def weights_of(stage_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(stage_dir / "model" / "model.safetensors")


def update_error(found: dict[str, torch.Tensor], wanted: Reference) -> float:
    """How far the weights are from the reference's, as a share of how far training moved them."""

    def norm(parts: list[torch.Tensor]) -> float:
        return float(torch.cat([part.double().flatten() for part in parts]).norm())

    names = [name for name in wanted.weights if name in found]
    assert len(names) >= len(found) > 0
    off = norm([found[name] - wanted.weights[name] for name in names])
    return off / norm([wanted.weights[name] - wanted.start[name] for name in names])
