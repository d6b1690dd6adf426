"""Architectures whose numbers training would get wrong without an error are refused, and the usual ones are not."""

import pytest
import torch

from factory import build_model
from unspool.core.errors import ConfigError
from unspool.models import checks
from unspool.models.checks import check_trainable
from unspool.models.loss import Head

NEXT = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-mqa", "qwen2", "qwen3", "mistral", "Olmo2"])
def test_models_with_attention_in_every_layer_pass(family):
    check_trainable(build_model(family))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Granite", {"logits_scaling": 4.0}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Phi", {}),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    ],
)
def test_logits_changed_after_the_head_are_followed_and_refused_where_that_is_wrong(family, changes, monkeypatch):
    """Phi adds a bias."""
    model = build_model(family, **changes)
    check_trainable(model)

    bare = Head(weight=model.get_output_embeddings().weight)
    monkeypatch.setattr(checks, "read_head", lambda model: bare)

    with pytest.raises(ConfigError, match="logits after the head"):
        check_trainable(model)


@pytest.mark.parametrize(
    ("family", "changes"), [("Lfm2", {"layer_types": ["conv", "full_attention"]}), ("Qwen3Next", NEXT)]
)
def test_layers_that_carry_a_state_over_packed_documents_are_refused(family, changes):
    with pytest.raises(ConfigError, match="from one packed document into the next"):
        check_trainable(build_model(family, **changes))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_damaged_weights_are_called_that(value):
    model = build_model()
    model.base_model.norm.weight.data[0] = value

    with pytest.raises(ConfigError, match="weights are damaged"):
        check_trainable(model)
