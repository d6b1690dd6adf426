"""The models that are put to the test: small random ones of many families, or the user's own.

In: nothing, or a Hub id, folder or GGUF file. Out: `Subject`s, each a model that can be loaded both by us
and by plain `transformers`. Promise: the same weights for the same seed.
Small ones have what families differ in: grouped and full heads, biases, norms on queries and keys, windows shorter
than a document, capped scores and logits, several RoPE bases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.models.fuse import compute_in_bf16
from unspool.models.load import load_model
from unspool.models.rotary import apply_rope
from unspool.models.tokenizer import first_line, location, quiet
from unspool.rope.harpe import Harpe
from unspool.rope.methods import Abf, RopeMethod, Yarn

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
    # Larger than usual, so that what a position sees shows in what it says.
    "initializer_range": 0.1,
}
# On a GPU there are kernels that only pay for larger heads.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}
# Both kinds of layers in two of them.
MIXED_LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A position method, and what it has to come to, written down by hand."""

    position: RopeMethod
    rope: dict[str, Any] | None = None  # `rope_parameters` for plain `transformers`
    bases: tuple[tuple[float, ...], ...] | None = None  # of each layer's KV heads


@dataclass(frozen=True, kw_only=True)
class Family:
    config: str  # the class in `transformers`, without its last word
    model: str | None = None  # the class of the model where it is called otherwise
    changes: dict[str, Any] = field(default_factory=dict)
    placed: Placed | None = None


ABF = Placed(position=Abf(method="abf", base=5e5), rope={"rope_type": "default", "rope_theta": 5e5})
# For the longest context that these models claim, a GPU's.
YARN_FACTOR = 32.0
YARN = Placed(
    position=Yarn(method="yarn", factor=YARN_FACTOR, original=CONTEXT),
    rope={
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": YARN_FACTOR,
        "original_max_position_embeddings": CONTEXT,
        "attention_factor": 0.1 * math.log(YARN_FACTOR) + 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
)
HARPE = Placed(position=Harpe(method="harpe", low=1e3, high=1e6), bases=((1e6, 1e3), (1e6, 1e3)))
HARPE_BY_LAYER = Placed(
    position=Harpe(method="harpe", low=1e3, high=1e6, rotate_by_layer=True),
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
    "llama+abf": Family(config="Llama", placed=ABF),
    "llama+yarn": Family(config="Llama", placed=YARN),
    "llama+harpe": Family(config="Llama", placed=HARPE),
    "qwen3+harpe": Family(config="Qwen3", changes={"num_key_value_heads": 4}, placed=HARPE_BY_LAYER),
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model by its name in the table and the place it is loaded from; `placed` is applied after loading."""

    name: str
    ref: str
    placed: Placed | None = None

    def ours(self, device: torch.device, *, bf16: bool) -> Any:
        """As training has it."""
        model = load_model(self.ref, device=device, dtype=torch.float32)
        if self.placed is not None:
            apply_rope(model, self.placed.position, model.config.max_position_embeddings)
        if bf16:
            compute_in_bf16(model)
        # Some memory policies are only at work then. None of these models drops anything out.
        return model.train()

    def plain(self, device: torch.device) -> Any:
        """As anybody loads it, with the attention that `transformers` writes out; positions are not applied."""
        quiet()
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                **location(self.ref), dtype=torch.float32, attn_implementation="eager", use_safetensors=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"model {self.ref}: could not be loaded ({first_line(error)}).") from error
        return model.to(device).eval()


def given_subject(ref: str) -> Subject:
    return Subject(name=Path(ref).name or ref, ref=ref)


def small_subjects(folder: Path, *, seed: int, wide: bool, names: Sequence[str]) -> list[Subject]:
    """Write the small models to `folder`, as plain `transformers` saves them; `wide` for a GPU."""
    quiet()
    subjects = []
    for name in names:
        family = lookup(FAMILIES, name, kind="model")
        place = folder / name
        _build(family, seed, WIDE if wide else {}).save_pretrained(place)
        _tokenizer().save_pretrained(place)
        subjects.append(Subject(name=name, ref=str(place), placed=family.placed))
    return subjects


def _build(family: Family, seed: int, size: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{family.config}Config")(**SHAPE | size | family.changes)
    generator = torch.Generator().manual_seed(seed)
    # No device's: asking for theirs would wake CUDA, and processes forked from this one could not use it.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, family.model or f"{family.config}ForCausalLM")(config)
    with torch.no_grad():
        # Biases and norms start at 0 and 1, where leaving them out would not be noticed.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def _tokenizer() -> Any:
    """One that can be saved; nothing is ever tokenised."""
    vocabulary = {f"<{number}>": number for number in range(SHAPE["vocab_size"])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<0>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<2>")
