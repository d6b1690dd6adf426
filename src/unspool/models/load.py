"""Load models from a Hub id, a folder or a GGUF file, build new models, and embed texts.

Only safetensors are read, and no remote code runs. A model that we would compute wrongly is refused.
"""

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError, UnspoolError
from unspool.data.strategies.utk.special_tokens import ALL_KNOTS, add_knots, trained_ids
from unspool.models.attention.interface import NAME, register
from unspool.models.attention.padding import skip_masks
from unspool.models.checks import check_attention, check_finite
from unspool.models.config import SIZES, NewModel, build_plain_config, check_values, read_config_file
from unspool.models.fuse import require_exact_fp32
from unspool.models.location import first_line, location
from unspool.models.rotary import apply_head_bases, decide_by_document, rope_shape
from unspool.models.tokenizer import load_tokenizer, silence_transformers
from unspool.models.weight_files import check_weights, model_digest

_SAFE: dict[str, Any] = {
    "trust_remote_code": False,
    "use_safetensors": True,
    "output_loading_info": True,
    # Reported instead of raised, so that `_check_complete` can name the tensor.
    "ignore_mismatched_sizes": True,
}
# Names of the language model's weights in multimodal models, and in a language model alone.
_TEXT_WEIGHT_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def load_model(ref: str, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a model with our attention, in evaluation mode."""
    register()
    require_exact_fp32()
    check_values(ref, read_config_file(ref))
    with (
        _check_files(ref),
        _hide_gguf_progress() if ref.endswith(".gguf") else nullcontext(),
        _explain_errors(ref, "model"),
    ):
        bases, config = _read_harpe(ref)
        options = {"config": config} if config else _text_model_options(ref)
        model, loading = AutoModelForCausalLM.from_pretrained(
            **location(ref), **_SAFE, dtype=dtype, attn_implementation=NAME, **options
        )
    _check_complete(model, loading, ref, "model")
    if ref.endswith(".gguf"):
        _forget_quantization(model)
    model = model.to(device).eval()
    check_finite(model, f"model {ref}")
    _check_supported(model)
    decide_by_document(model)
    check_attention(model, NAME)
    if bases is not None:
        apply_head_bases(model, bases)
    skip_masks(model)
    return model


@contextmanager
def _check_files(ref: str) -> Iterator[None]:
    """Check headers before the weights are loaded, and digests during loading; a wrong digest replaces other errors."""
    check_weights(ref, digests=False)
    with ThreadPoolExecutor(1, "unspool-digests") as pool:
        digests = pool.submit(check_weights, ref)
        try:
            yield
        finally:
            digests.result()


@contextmanager
def _explain_errors(ref: str, what: str) -> Iterator[None]:
    """Turn errors of `from_pretrained` into a ConfigError that begins with `what`."""
    silence_transformers()
    try:
        yield
    except UnspoolError:
        raise
    except Exception as error:  # of any type: `transformers` does not check values before it computes with them
        if isinstance(error, KeyError) and error.args[:1] == (NAME,):
            # Architectures that do not use the attention registry.
            raise ConfigError(
                f"model {ref}: its architecture has its own attention code, which is not supported; "
                "use a model such as Llama, Qwen or Mistral."
            ) from error
        needs = " pip install 'unspool[gguf]'." if ref.endswith(".gguf") and isinstance(error, ImportError) else ""
        raise ConfigError(f"{what} {ref}: could not be loaded ({first_line(error)}).{needs}") from error


def _check_complete(model: Any, loading: dict[str, Any], ref: str, what: str) -> None:
    """Refuse weights that do not fit the config: `transformers` would only warn and compute something else."""
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ConfigError(f"{what} {ref}: weights are missing from its files ({missing}, …); download it again.")
    for name, stored, wanted in sorted(loading["mismatched_keys"]):
        raise ConfigError(
            f"{what} {ref}: {name} has shape {tuple(stored)} in its file, but the config requires {tuple(wanted)}; "
            "download it again."
        )
    layers = (f"{model.base_model_prefix}.layers.", "layers.")
    # Old files also store the RoPE table, which is computed from the config.
    unused = sorted(
        name for name in loading["unexpected_keys"] if name.startswith(layers) and not name.endswith(".inv_freq")
    )
    if unused:
        raise ConfigError(
            f"{what} {ref}: its config does not use {len(unused)} of its weights ({', '.join(unused[:3])}, …), so the "
            "two do not belong together; download it again."
        )


def _text_model_options(ref: str) -> dict[str, Any]:
    """Return options that load only the language model of a multimodal model; empty for other models."""
    if Path(ref).suffix == ".gguf":
        return {}
    config = AutoConfig.from_pretrained(**location(ref), trust_remote_code=False)
    text = config.get_text_config()
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    return {"config": text, "key_mapping": _TEXT_WEIGHT_NAMES}


@contextmanager
def _hide_gguf_progress() -> Iterator[None]:
    """Show the progress bar of GGUF conversion only on terminals; `transformers` has no setting for this."""
    from transformers import modeling_gguf_pytorch_utils as gguf_conversion  # import late: it takes half a second

    bar = gguf_conversion.tqdm
    gguf_conversion.tqdm = partial(bar, disable=None)
    try:
        yield
    finally:
        gguf_conversion.tqdm = bar


def _forget_quantization(model: Any) -> None:
    """Remove the quantization mark of a dequantized GGUF model, which `transformers` would refuse to save."""
    for holder, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)


def build_new(new: NewModel, tokenizer: Any, *, seed: int) -> Any:
    """Build a Llama-architecture model with random weights."""
    register()
    require_exact_fp32()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=new.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": new.base},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation=NAME,
        **SIZES[new.size],
    )
    model = LlamaForCausalLM(config)
    decide_by_document(model)
    skip_masks(model)
    return model


def add_special_tokens(model: Any, tokenizer: Any, rows: dict[str, Path]) -> None:
    """Add the special tokens (UTK) of datasets `rows` to model and tokenizer; existing ones do not change."""
    counts = {name: (read_manifest(folder) or {}).get("counts", {}) for name, folder in rows.items()}
    recorded = {name: count["added_tokens"] for name, count in counts.items() if count.get("added_tokens")}
    trained = trained_ids(tokenizer) if recorded else np.zeros(0, dtype=np.int64)
    knots = add_knots(tokenizer, [knot for knot in ALL_KNOTS if any(knot in ids for ids in recorded.values())])
    for name, ids in recorded.items():
        for knot, number in knots.items():
            if ids.get(knot, number) != number:
                raise ConfigError(
                    f"dataset {name}: {knot} is token {ids[knot]} there, but token {number} of this stage's model; "
                    "pack the dataset with this model's tokenizer."
                )
    fit_vocabulary(model, set(knots.values()) - set(trained.tolist()), trained)


def fit_vocabulary(model: Any, new: Collection[int], trained: np.ndarray) -> None:
    """Initialize the embeddings of tokens `new` to the mean embedding of `trained`; add rows if there are too few.

    Models often have unused tokens, and more embeddings than tokens. Those embeddings were never trained.
    """
    if not new:
        return
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    if max(new) >= num_embeddings:
        model.resize_token_embeddings(max(new) + 1, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for parameter in layer.parameters(recurse=False):
            is_trained = torch.zeros(len(parameter), dtype=parameter.dtype, device=parameter.device)
            is_trained[torch.from_numpy(trained[trained < num_embeddings])] = 1
            # A matrix product, because selecting the rows could copy gigabytes.
            parameter.data[sorted(new)] = (is_trained @ parameter.data) / is_trained.sum()


def _read_harpe(ref: str) -> tuple[Any, Any]:
    """Return the bases and the plain config of a folder exported with a base per head; None twice for others."""
    content = read_config_file(ref)
    bases = content.pop("head_bases", None)
    return bases, None if bases is None else build_plain_config(content)


def _check_supported(model: Any) -> None:
    rope_shape(model.config)
    if not hasattr(model.base_model, "rotary_emb") or not hasattr(model.base_model, "layers"):
        raise ConfigError(
            f"model_type {model.config.model_type!r} does not keep its layers in `model.layers`; use another model."
        )


# Embeddings of texts

# Texts per forward pass.
EMBEDDING_BATCH = 16


class Embedder:
    """A callable that returns text embeddings [n, d]: the mean of a model's last hidden states.

    A text's embedding does not depend on the other texts, up to rounding. If the model has another vocabulary, its own
    tokenizer tokenizes the decoded text. Texts are truncated to the model's context length. The model is loaded at the
    first call, because datasets that are up to date do not need it.
    """

    def __init__(self, ref: str, *, tokenizer: Any, device: torch.device) -> None:
        """`tokenizer` produced the token arrays."""
        self._ref = ref
        self._tokenizer = tokenizer
        self._device = device

    def __call__(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        starts = range(0, len(texts), EMBEDDING_BATCH)
        return np.concatenate([self._mean_states(texts[start : start + EMBEDDING_BATCH]) for start in starts])

    @cached_property
    def digest(self) -> str:
        return model_digest(self._ref)

    @torch.inference_mode()
    def _mean_states(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        rows = self._token_ids(texts)
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        sums = (states * mask[:, :, None]).sum(dim=1)
        vectors: np.ndarray = (sums / mask.sum(dim=1, keepdim=True)).cpu().numpy()
        return vectors

    def _token_ids(self, texts: Sequence[np.ndarray]) -> list[list[int]]:
        max_len = getattr(self._model.config, "max_position_embeddings", None)
        if self._own_tokenizer is None:
            return [text[:max_len].tolist() for text in texts]
        plain = [self._tokenizer.decode(text.tolist(), skip_special_tokens=True) for text in texts]
        encoded = self._own_tokenizer(plain, truncation=max_len is not None, max_length=max_len)
        # A text of special tokens only would leave nothing to average.
        return [row or [0] for row in encoded["input_ids"]]

    @cached_property
    def _own_tokenizer(self) -> Any:
        """The model's own tokenizer; None if it has the vocabulary of the token arrays."""
        own = load_tokenizer(self._ref)
        return None if own.get_vocab() == self._tokenizer.get_vocab() else own

    @cached_property
    def _model(self) -> Any:
        what = "nextlong.model"
        with _check_files(self._ref), _explain_errors(self._ref, what):
            model, loading = AutoModel.from_pretrained(**location(self._ref), **_SAFE, dtype=torch.float32)
        _check_complete(model, loading, self._ref, what)
        model = model.to(self._device).eval()
        check_finite(model, f"{what} {self._ref}")
        return model
