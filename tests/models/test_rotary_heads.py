"""A base per head: every head turns by its own, packed, cached, saved and loaded."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from factory import CPU, build_model, build_tokenizer, packed_inputs, random_tokens
from unspool.core.errors import ConfigError
from unspool.models import modeling_harpe
from unspool.models.attention.interface import NAME
from unspool.models.export import save_model
from unspool.models.load import load_model
from unspool.models.rotary import apply_base, apply_head_bases, apply_rope, head_bases, rope_shape, rotate_heads
from unspool.rope.harpe import HARPE
from unspool.rope.methods import ABF

from .rotary_cases import CLOSE, FAMILIES, decoded, logits, plain_rope


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_bases_per_head_are_one_base_for_all(family):
    ours, reference = build_model(family), build_model(family)
    apply_base(reference, 5e5)

    apply_head_bases(ours, np.full(rope_shape(ours.config).num_kv_heads, 5e5))

    tokens = random_tokens(24)
    torch.testing.assert_close(logits(ours, tokens), logits(reference, tokens), **CLOSE)
    torch.testing.assert_close(decoded(ours, tokens, first=9), logits(reference, tokens), **CLOSE)
    torch.testing.assert_close(decoded(ours, tokens, first=1), logits(reference, tokens), **CLOSE)


@torch.no_grad()
def test_packed_documents_with_a_base_per_head_come_out_as_each_alone():
    model, tokens, doc_lens = build_model(), random_tokens(20), (7, 1, 12)
    apply_head_bases(model, np.array([1e4, 50.0]))

    packed = model.base_model(**packed_inputs(tokens, doc_lens), use_cache=False).last_hidden_state[0]

    alone = [model.base_model(input_ids=part).last_hidden_state[0] for part in torch.split(tokens, list(doc_lens), 1)]
    torch.testing.assert_close(packed, torch.cat(alone), **CLOSE)


@torch.no_grad()
def first_layer_heads(model) -> torch.Tensor:
    """What each query head of the first layer says, [tokens, heads, head_dim]."""
    seen = []
    hook = model.base_model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits(model)
    hook.remove()
    return seen[0][0].reshape(40, 4, -1)


@pytest.mark.parametrize(("family", "bases"), [("llama", [1e6, 50.0]), ("llama-mha", [1e6, 50.0, 1e4, 500.0])])
def test_each_head_turns_by_its_own_base_and_query_heads_by_that_of_their_kv_head(family, bases):
    ours = build_model(family)
    apply_head_bases(ours, np.array(bases))
    found = first_layer_heads(ours)

    for base in bases:
        reference = build_model(family)
        apply_base(reference, base)
        wanted = first_layer_heads(reference)
        for head in range(4):
            own = bases[head * len(bases) // 4] == base
            error = float((found[:, head] - wanted[:, head]).norm() / wanted[:, head].norm())
            assert error < 1e-5 if own else error > 1e-2, (head, base, error)


@pytest.mark.parametrize(("order", "wanted"), [("descending", [1e6, 1e4]), ("ascending", [1e4, 1e6])])
def test_a_stage_gives_heads_the_bases_in_the_order_asked_for(order, wanted):
    model, reference = build_model(), build_model()

    apply_rope(model, HARPE(method="harpe", low=1e4, high=1e6, order=order), 256)

    assert head_bases(model) == wanted
    apply_head_bases(reference, np.array(wanted))
    assert torch.equal(logits(model), logits(reference))


def test_a_second_stage_may_give_heads_new_bases():
    model, reference = build_model(), build_model()
    apply_rope(model, HARPE(method="harpe", low=1e4, high=1e5), 128)

    apply_rope(model, HARPE(method="harpe", low=1e5, high=1e6), 256)

    apply_head_bases(reference, np.array([1e6, 1e5]))
    assert torch.equal(logits(model), logits(reference))


def test_one_base_after_a_base_per_head_is_refused():
    model = build_model()
    apply_rope(model, HARPE(method="harpe", low=1e4, high=1e5), 128)

    with pytest.raises(ConfigError, match="already has a base per head"):
        apply_rope(model, ABF(method="abf", base=8e6), 256)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Cohere", {}),  # turns neighbours, not halves
        ("SmolLM3", {"no_rope_layers": [1, 0], "pad_token_id": 0}),  # leaves layers unturned
        ("GPTNeoX", {}),  # keeps its attention elsewhere
        ("DeepseekV3", {"q_lora_rank": None}),  # turns a part of its own beside the heads
    ],
)
def test_a_base_per_head_is_refused_where_heads_are_turned_otherwise(family, changes):
    with pytest.raises(ConfigError, match="does not rotate its heads as Llama does"):
        apply_rope(build_model(family, **changes), HARPE(method="harpe", low=1e4, high=1e5), 128)


def test_a_base_per_head_is_refused_where_our_attention_is_not_used():
    """Any other attention would leave the heads unturned."""
    with pytest.raises(ConfigError, match='needs attn_implementation="unspool"'):
        apply_rope(build_model(attention="sdpa"), HARPE(method="harpe", low=1e4, high=1e5), 128)


def test_a_base_per_head_is_refused_for_a_wrong_count():
    with pytest.raises(ConfigError, match="3 bases for 2 KV heads"):
        apply_head_bases(build_model(), np.array([1e4, 1e5, 1e6]))
    with pytest.raises(ConfigError, match="bases for 3 layers, and the model has 2"):
        apply_head_bases(build_model(), np.full((3, 2), 1e4))


def test_heads_of_which_only_a_part_turns_keep_the_rest_under_a_base_per_head():
    rope = plain_rope(1e4, partial_rotary_factor=0.5)
    ours, reference = (build_model("Phi", rope_parameters=rope, num_key_value_heads=4) for _ in range(2))
    before = logits(ours)
    apply_base(reference, 5e5)

    apply_head_bases(ours, np.full(4, 5e5))

    assert ours.base_model.layers[0].self_attn.head_inv_freq.shape == (4, 2)
    torch.testing.assert_close(logits(ours), logits(reference), **CLOSE)
    assert (logits(ours) - before).abs().max() > 1e-4, "the old base would have passed"


def test_bases_can_move_on_by_one_head_in_each_layer(tmp_path):
    model, reference, still = build_model(), build_model(), build_model()
    options = {"method": "harpe", "low": 50.0, "high": 1e6}
    apply_rope(model, HARPE(**options, rotate_by_layer=True), 256)
    apply_rope(still, HARPE(**options), 256)

    assert head_bases(model) == [[1e6, 50.0], [50.0, 1e6]]
    assert head_bases(still) == [1e6, 50.0], "equal layers are said once"
    apply_head_bases(reference, head_bases(model))
    assert torch.equal(logits(model), logits(reference))
    assert (logits(model) - logits(still)).abs().max() > 1e-4
    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)
    assert torch.equal(logits(load_model(str(tmp_path), device=CPU, dtype=torch.float32)), logits(model))


def test_the_control_with_one_shared_base_is_plain_rope():
    model = build_model()

    apply_rope(model, HARPE(method="harpe", low=1e4, high=3e4, shared=True), 256)

    assert head_bases(model) is None
    assert model.config.rope_parameters == plain_rope(2e4)


def test_a_base_per_head_reloads_to_the_same_logits_and_only_with_us(tmp_path):
    model = build_model()
    apply_rope(model, HARPE(method="harpe", low=1e4, high=1e6), 256)

    save_model(model, build_tokenizer(), tmp_path, dtype=torch.float32)

    again = load_model(str(tmp_path), device=CPU, dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))
    assert again.config.max_position_embeddings == 256
    assert json.loads((tmp_path / "config.json").read_text())["head_bases"] == [1e6, 1e4]
    for loader in (AutoModelForCausalLM, AutoConfig):
        with pytest.raises(ValueError, match="custom code"):
            loader.from_pretrained(tmp_path, trust_remote_code=False)


def test_heads_with_their_own_base_are_turned_in_fp32():
    query, key = torch.randn(2, 1, 2, 3, 8).bfloat16()
    inv_freq = torch.tensor([[1.0, 0.1, 0.01, 0.001], [1.0, 0.2, 0.04, 0.008]])
    positions = torch.tensor([[0, 1000, 1003]])

    turned = rotate_heads(query, key, inv_freq, positions)

    for found, heads in zip(turned, (query, key), strict=True):
        assert found.dtype == torch.float32
        angles = positions[0][None, :, None].double() * inv_freq[:, None].double()
        first, second = heads[0].double().chunk(2, dim=-1)
        wanted = torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )
        torch.testing.assert_close(found[0].double(), wanted, rtol=0, atol=1e-3)


# Outside of our attention and our loader


@pytest.fixture
def harpe(tmp_path):
    """A model with a base per head, loaded by us, and its folder."""
    model = build_model()
    apply_rope(model, HARPE(method="harpe", low=1e4, high=1e6), 256)
    save_model(model, build_tokenizer(), tmp_path / "exported", dtype=torch.float32)
    return load_model(str(tmp_path / "exported"), device=CPU, dtype=torch.float32), tmp_path / "exported"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_stock_attention_on_a_base_per_head_raises_instead_of_losing_positions(harpe, attention):
    model, _ = harpe
    model.set_attn_implementation(attention)
    with pytest.raises(ConfigError, match=rf"HARPE: attention '{attention}' does not support a base per head"):
        model(random_tokens(8))

    model.set_attn_implementation(NAME)
    assert torch.isfinite(logits(model)).all()


def test_plain_classes_refuse_the_folder_and_the_config_with_the_reason(harpe, tmp_path):
    model, folder = harpe
    model.save_pretrained(tmp_path / "saved")
    reason = r"a base per head \(HARPE\): load it with trust_remote_code=True"
    for plain in (
        lambda: LlamaForCausalLM.from_pretrained(folder),
        lambda: LlamaForCausalLM.from_pretrained(tmp_path / "saved"),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "saved"),
        lambda: AutoModelForCausalLM.from_config(model.config),
        lambda: LlamaForCausalLM(model.config),
    ):
        with pytest.raises(KeyError, match=reason):
            plain()

    config = json.loads((folder / "config.json").read_text())
    # What versions before v5 read.
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == modeling_harpe.ROPE_TYPE


def test_a_folder_that_its_user_saved_keeps_its_bases(harpe, tmp_path):
    model, _ = harpe
    model.save_pretrained(tmp_path / "saved")

    again = load_model(str(tmp_path / "saved"), device=CPU, dtype=torch.float32)

    assert head_bases(again) == head_bases(model)
    assert torch.equal(logits(again), logits(model))


def test_rows_of_a_batch_are_turned_by_their_own_positions():
    model = build_model()
    apply_head_bases(model, np.array([1e6, 50.0]))
    tokens, positions = random_tokens(8), torch.stack([torch.arange(8), 3 * torch.arange(8)])
    with torch.no_grad():
        both = model(tokens.expand(2, -1), position_ids=positions).logits
        for row in (0, 1):
            alone = model(tokens, position_ids=positions[row : row + 1]).logits[0]
            torch.testing.assert_close(both[row], alone)
