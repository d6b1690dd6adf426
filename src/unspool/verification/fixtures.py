"""Models and rows for the checks: small random models of many families, or a user's model, with random rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.data.packing.row import Row
from unspool.models.fuse import compute_in_bf16
from unspool.models.load import load_model
from unspool.models.location import first_line, location, short_name
from unspool.models.rotary import USES_INPUT_LENGTH, apply_rope
from unspool.models.tokenizer import silence_transformers
from unspool.rope import cope, harpe, methods
from unspool.rope.tables import GLOBAL_LAYERS, RopeMethod, global_parameters, is_nested

CONTEXT = 512
WINDOW = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Larger than usual, so that the context visibly changes each position's output.
    "initializer_range": 0.1,
}
# Some GPU kernels need larger heads.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}
# One sliding-window layer and one full-attention layer.
MIXED_LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# LongRoPE settings with one factor per pair of dimensions. `_build` repeats the factors for wider heads.
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": CONTEXT // 4,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
        "original_max_position_embeddings": CONTEXT // 4,
    },
}


@dataclass(frozen=True, kw_only=True)
class RopeCase:
    """A RoPE method and its expected result, written by hand."""

    method: RopeMethod
    parameters: dict[str, Any] | None = None  # `rope_parameters` for plain `transformers`
    multipliers: tuple[float, ...] = ()  # of the last frequencies that follow from `parameters`
    bases: tuple[tuple[float, ...], ...] | None = None  # of the KV heads of each layer


@dataclass(frozen=True, kw_only=True)
class Family:
    config: str  # config class in `transformers`, without the suffix "Config"
    model: str | None = None  # model class, if its name does not follow from `config`
    changes: dict[str, Any] = field(default_factory=dict)
    rope: RopeCase | None = None


ABF = RopeCase(method=methods.ABF(base=5e5), parameters={"rope_type": "default", "rope_theta": 5e5})
# Suits the longest context of these models, which is the GPU variant's.
YARN_FACTOR = 32.0
YARN = RopeCase(
    method=methods.YaRN(factor=YARN_FACTOR, original=CONTEXT),
    parameters={
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": YARN_FACTOR,
        "original_max_position_embeddings": CONTEXT,
        "attention_factor": 0.1 * math.log(YARN_FACTOR) + 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
)
DYNAMIC = RopeCase(
    method=methods.Dynamic(method="dynamic", factor=4.0),
    parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
)
COPE = RopeCase(
    method=cope.CoPE(base=5e5, tapered=5),
    parameters=ABF.parameters,
    multipliers=(1.0, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0.0),
)
HARPE = RopeCase(method=harpe.HARPE(low=1e3, high=1e6), bases=((1e6, 1e3), (1e6, 1e3)))
HARPE_BY_LAYER = RopeCase(
    method=harpe.HARPE(low=1e3, high=1e6, rotate_by_layer=True),
    bases=((1e6, 667e3, 334e3, 1e3), (1e3, 1e6, 667e3, 334e3)),
)
FAMILIES: dict[str, Family] = {
    "llama": Family(config="Llama"),
    "llama-mha": Family(config="Llama", changes={"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2": Family(config="Qwen2"),
    "qwen3": Family(config="Qwen3", changes={"head_dim": 24}),
    "mistral": Family(config="Mistral", changes={"sliding_window": WINDOW}),
    "gemma2": Family(
        config="Gemma2",
        changes=MIXED_LAYERS
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": Family(
        config="Gemma3Text", model="Gemma3ForCausalLM", changes=MIXED_LAYERS | {"query_pre_attn_scalar": 24}
    ),
    "olmo2": Family(config="Olmo2"),
    "phi3": Family(config="Phi3", changes=LONGROPE),
    "llama+abf": Family(config="Llama", rope=ABF),
    "llama+yarn": Family(config="Llama", rope=YARN),
    "llama+dynamic": Family(config="Llama", rope=DYNAMIC),
    "llama+cope": Family(config="Llama", rope=COPE),
    "llama+harpe": Family(config="Llama", rope=HARPE),
    "qwen3+harpe": Family(config="Qwen3", changes={"num_key_value_heads": 4}, rope=HARPE_BY_LAYER),
}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model to check: its name in the table, its location, and a RoPE method to apply after loading."""

    name: str
    ref: str
    rope: RopeCase | None = None

    def load_ours(self, device: torch.device, *, bf16: bool) -> Any:
        """Load the model as in training."""
        model = load_model(self.ref, device=device, dtype=torch.float32)
        if self.rope is not None:
            apply_rope(model, self.rope.method, model.config.max_position_embeddings)
        lower_original_len(model, device)
        if bf16:
            compute_in_bf16(model)
        # Some memory policies apply only in training mode. None of these models has dropout.
        return model.train()

    def load_plain(self, device: torch.device) -> Any:
        """Load the model in plain `transformers` with eager attention. Does not apply `rope`."""
        silence_transformers()
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                **location(self.ref), dtype=torch.float32, attn_implementation="eager", use_safetensors=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"model {self.ref}: cannot be loaded ({first_line(error)}).") from error
        return model.to(device).eval()


def lower_original_len(model: Any, device: torch.device) -> None:
    """Lower the length at which `longrope` and `dynamic` switch frequencies, so that rows cover both cases.

    Rows as long as the model's real threshold would take hours. Weights do not change, and the reference gets the same
    change, so the length-dependent code runs as at the real length.
    """
    config = model.config
    parameters = global_parameters(config.to_dict())
    if parameters["rope_type"] not in USES_INPUT_LENGTH:
        return
    lowered = documents_around(row_len(model.num_parameters(), device))
    if parameters["rope_type"] == "dynamic":
        config.max_position_embeddings = lowered
    else:
        own = config.rope_parameters
        (own[GLOBAL_LAYERS] if is_nested(own) else own)["original_max_position_embeddings"] = lowered
        if hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = lowered
    backbone = model.base_model
    backbone.rotary_emb = type(backbone.rotary_emb)(config).to(device)


def documents_around(length: int) -> int:
    """A length between the shortest and the longest document of every step of `build_steps`."""
    return length // 8


def user_model(ref: str) -> ModelSpec:
    return ModelSpec(name=short_name(ref), ref=ref)


def build_small_models(folder: Path, *, seed: int, wide: bool, names: Sequence[str]) -> list[ModelSpec]:
    """Save small models with random weights in `folder`. `wide` builds the GPU variant. Weights depend on the seed."""
    silence_transformers()
    specs = []
    for name in names:
        family = lookup(FAMILIES, name, kind="model")
        _build(family, seed, WIDE if wide else {}).save_pretrained(folder / name)
        _tokenizer().save_pretrained(folder / name)
        specs.append(ModelSpec(name=name, ref=str(folder / name), rope=family.rope))
    return specs


def _build(family: Family, seed: int, size: dict[str, Any]) -> Any:
    settings = SHAPE | size | family.changes
    rope = dict(settings.get("rope_parameters") or {})
    for key in ("short_factor", "long_factor"):
        if key in rope:
            repeats = settings["head_dim"] // 2 // len(rope[key])
            settings["rope_parameters"] = rope = rope | {key: [one for one in rope[key] for _ in range(repeats)]}
    config = getattr(transformers, f"{family.config}Config")(**settings)
    generator = torch.Generator().manual_seed(seed)
    # devices=[]: reading CUDA state would initialize CUDA, and forked processes could then not use it.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, family.model or f"{family.config}ForCausalLM")(config)
    with torch.no_grad():
        # Biases of 0 and norms of 1 would hide code that omits them, so randomize them.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def _tokenizer() -> Any:
    """A tokenizer for the export. It never tokenizes text."""
    vocabulary = {f"<{number}>": number for number in range(SHAPE["vocab_size"])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<0>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<2>")


# Rows

# Document of a packed row whose gradient is also compared alone. It is neither first nor last.
GRADIENT_DOCUMENT = 2
NUM_ROWS = 8  # rows of the step that is split into micro-batches


@dataclass(frozen=True)
class Step:
    """The rows of one optimizer step, all of equal length."""

    name: str
    rows: tuple[Row, ...]

    @property
    def row_len(self) -> int:
        return len(self.rows[0].tokens)


def row_len(num_parameters: int, device: torch.device) -> int:
    """Tokens per packed row, chosen so that all checks of a model take about a minute on a laptop CPU."""
    if device.type == "cuda":
        # Small models: long enough for every attention kernel. The reference keeps all attention scores in memory.
        return 12288 if num_parameters < 2 * 10**7 else 8192 if num_parameters < 10**9 else 1024
    return min(192, max(64, 10**10 // num_parameters // 32 * 32))


def build_steps(length: int, *, vocabulary: int, seed: int) -> dict[str, Step]:
    """Steps by name: `unequal` (one row of unequal documents), `equal` (one row of equal ones), `several` (rows)."""
    quarter = length // 4
    # The third document fills most of the row, so that a GPU uses the kernel for long documents.
    first, third = length // 16, length * 13 // 16
    unequal = (first, 1, third, length - first - third - 1)
    made = [
        Step("unequal", (_row(unequal, vocabulary, seed, 0),)),
        Step("equal", (_row((quarter,) * 4, vocabulary, seed, 1),)),
        # Every second row has a loss on 10% of its tokens, so that a mean of means would differ.
        Step(
            "several",
            tuple(
                _row(
                    (quarter // 2 + index % 4, quarter // 2 - index % 4),
                    vocabulary,
                    seed,
                    2 + index,
                    kept=0.1 + 0.9 * (index % 2),
                )
                for index in range(NUM_ROWS)
            ),
        ),
    ]
    return {step.name: step for step in made}


def build_row_sets(seq_len: int, *, vocabulary: int, seed: int) -> dict[str, list[Row]]:
    """Two datasets to mix: `long` rows, and `short` rows of half the length. Few rows make short epochs."""
    long, short = (seq_len // 4 * 3, seq_len // 4), (seq_len // 2,)
    return {
        "long": [_row(long, vocabulary, seed, 100 + number, kept=0.7) for number in range(5)],
        "short": [_row(short, vocabulary, seed, 200 + number, kept=0.7) for number in range(3)],
    }


def only_document(row: Row, number: int) -> Row:
    """The same row with a loss on one document only."""
    begin = int(row.doc_lens[:number].sum())
    mask = np.zeros(len(row.tokens), dtype=bool)
    # Include the first token: if labels crossed documents, it would be a target of the previous document.
    mask[begin : begin + int(row.doc_lens[number])] = True
    return replace(row, loss_mask=mask)


def with_tokens(row: Row, number: int, tokens: np.ndarray) -> Row:
    """The same row with one document's tokens replaced."""
    begin = int(row.doc_lens[:number].sum())
    changed = row.tokens.copy()
    changed[begin : begin + int(row.doc_lens[number])] = tokens
    return replace(row, tokens=changed)


def _row(doc_lens: Sequence[int], vocabulary: int, seed: int, number: int, *, kept: float = 1.0) -> Row:
    rng = rng_for(seed, "verify", number)
    length = sum(doc_lens)
    return Row(
        tokens=rng.integers(vocabulary, size=length).astype(np.uint32),
        doc_lens=np.array(doc_lens, dtype=np.int32),
        loss_mask=None if kept >= 1 else rng.random(length) < kept,
        source="random",
        attention="intra_document",
    )
