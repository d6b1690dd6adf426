"""Promise 4: an exported folder gives the same logits in plain `transformers`, and RoPE tables are exact."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from unspool.models.export import PlainError, PlainProcess, build_request, save_model
from unspool.models.rotary import USES_INPUT_LENGTH, head_bases, rotate_heads
from unspool.models.tokenizer import load_tokenizer
from unspool.rope.tables import global_parameters
from unspool.verification.case import Case, Measured
from unspool.verification.tolerance import FP32, angle_tolerance


def check_export(case: Case, plain: PlainProcess) -> list[Measured]:
    """Compare the model with its export, loaded in a process without Unspool. Uses fp32 on all devices."""
    (row,) = case.steps["unequal"].rows
    # Use the row as one sequence: its positions are higher than those of any document.
    tokens = [int(token) for token in row.tokens]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(case.model, load_tokenizer(case.spec.ref), folder, dtype=torch.float32)
        request = {
            "name": "row",
            "ids": tokens,
            "positions": list(range(len(tokens))),
            "keep": len(tokens),
            "dtype": "float32",
            "cached": False,
        }
        try:
            theirs = plain.answers(build_request(folder, [request], text=None, device=case.device))["row"]
        except PlainError as problem:
            raise RuntimeError(f"plain transformers cannot load the export: {problem}") from problem
    with torch.no_grad():
        ids = torch.tensor([tokens], device=case.device)
        ours = case.model_in_fp32()(input_ids=ids, use_cache=False).logits[0].float().cpu()
    error = float((ours - theirs).norm() / theirs.norm())
    agree = float((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).float().mean())
    return [
        Measured(quantity="logits", error=error, tolerance=FP32, detail=f"same top token at {agree:.0%} of positions")
    ]


NUM_POSITIONS = 257  # number of compared positions, evenly spaced


def check_rope_tables(case: Case) -> list[Measured]:
    """Compare cosines and sines up to the last position with float64. Logits of short rows miss such errors."""
    errors = []
    for last in _last_positions(case.model.config):
        positions = torch.linspace(0, last, NUM_POSITIONS, dtype=torch.float64).round().long()
        tables = zip(_used(case, positions), _wanted(case.model, positions), strict=True)
        errors.append((max(float((used - wanted).abs().max()) for used, wanted in tables), last))
    return [
        Measured(quantity="cos, sin", error=error, tolerance=angle_tolerance(last), detail=f"positions 0 to {last}")
        for error, last in errors
    ]


def _last_positions(config: Any) -> list[int]:
    """Last position of the model. If frequencies depend on length: also the last with original frequencies."""
    last = int(config.max_position_embeddings) - 1
    parameters = global_parameters(config.to_dict())
    if parameters["rope_type"] not in USES_INPUT_LENGTH:
        return [last]
    original = int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)
    return [original - 1, max(last, 2 * original)]


def _used(case: Case, positions: Tensor) -> list[Tensor]:
    """Cosines and sines of the model: [positions, 2, d/2] per layer type, or per head and layer."""
    model, ids = case.model, positions.to(case.device)[None]
    if head_bases(model) is not None:
        return [table for layer in model.base_model.layers for table in _used_by_heads(layer.self_attn, ids)]
    hidden = torch.zeros(1, len(positions), 1, device=case.device)
    found = [model.base_model.rotary_emb(hidden, ids, **layer_type) for layer_type in _layer_types(model.config)]
    return [torch.stack((cos[0], sin[0]), dim=1)[..., : cos.shape[-1] // 2].double().cpu() for cos, sin in found]


def _used_by_heads(attention: Any, ids: Tensor) -> list[Tensor]:
    """Cosines and sines of each KV head, for queries and then for keys."""
    inv_freq: Tensor = attention.head_inv_freq
    num_heads, half = inv_freq.shape
    # Rotating (1, 0) gives cosine and sine.
    unit = torch.cat((inv_freq.new_ones(half), inv_freq.new_zeros(half))).float()
    heads = unit.expand(1, num_heads, ids.shape[1], 2 * half)
    rotated = rotate_heads(heads, heads, inv_freq, ids)
    return [
        torch.stack(each[0, head].chunk(2, dim=-1), dim=1).double().cpu()
        for each in rotated
        for head in range(num_heads)
    ]


def _wanted(model: Any, positions: Tensor) -> list[Tensor]:
    bases = head_bases(model)
    if bases is None:
        length = int(positions[-1]) + 1
        kinds = _layer_types(model.config)
        return [_table(*_frequencies(model.config, layer_type, length), positions) for layer_type in kinds]
    layers = model.base_model.layers
    by_layer = bases if isinstance(bases[0], list) else [bases] * len(layers)
    dim = 2 * layers[0].self_attn.head_inv_freq.shape[-1]
    return [
        table
        for of_layer in by_layer
        for table in [_table(_powers(base, dim), 1.0, positions) for base in of_layer] * 2  # queries, then keys
    ]


def _layer_types(config: Any) -> list[dict[str, str]]:
    """Arguments for the rotary module: one per layer type, if layer types have different frequencies."""
    rope = config.rope_parameters
    return [{}] if "rope_theta" in rope else [{"layer_type": name} for name, own in rope.items() if own]


def _frequencies(config: Any, layer_type: dict[str, str], length: int) -> tuple[Tensor, float]:
    rope = config.rope_parameters[layer_type["layer_type"]] if layer_type else config.rope_parameters
    name = rope.get("rope_type", "default")
    if name != "default":
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=length, **layer_type)
        return inv_freq.double(), float(scaling)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _powers(rope["rope_theta"], int(head_dim * rope.get("partial_rotary_factor", 1.0))), 1.0


def _powers(base: float, dim: int) -> Tensor:
    return torch.tensor(base, dtype=torch.float64) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _table(frequencies: Tensor, scaling: float, positions: Tensor) -> Tensor:
    angles = positions.double()[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1) * scaling
