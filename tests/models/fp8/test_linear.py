"""Linear layers in FP8: their products, which models they refuse, and memory settings, which must not change them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from factory import build_model
from unspool.core.errors import ConfigError
from unspool.models.checks import layers_of
from unspool.models.fp8.linear import products, use_fp8
from unspool.models.fp8.support import refuse_device
from unspool.models.fuse import fuse_parts
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy

SIZE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 128}
# Larger weights would amplify roundings from layer to layer.
WIDE = SIZE | {"initializer_range": 0.05}
IDS = torch.arange(1, 49)[None]  # 0 is padding, whose embedding is 0


def build(family="llama", **changes):
    return build_model(family, **WIDE | changes).train()


def gradients(model, ids=IDS):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def fp8_gradients(policy=None, family="llama", **changes):
    model = build(family, **changes)
    use_fp8(model)
    apply_memory(model, policy or MemoryPolicy())
    return gradients(model)


def largest_error(found, wanted):
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Products


def test_powers_of_two_only_change_the_exponent():
    weights = [random(32, 64, seed=1), random(16, 64, seed=2)]
    hidden = random(1, 48, 64)
    found, scaled = products(hidden, weights), products(hidden * 2**-9, weights)
    assert all(torch.equal(one * 2**-9, other) for one, other in zip(found, scaled, strict=True))


def test_gradients_of_any_layout_are_accepted():
    """The gradient of a sum is one value that is read many times."""
    weight = random(32, 64, seed=1).requires_grad_()
    hidden = random(1, 48, 64).requires_grad_()
    (out,) = products(hidden, [weight])
    out.sum().backward()
    plain = F.linear(hidden.detach().requires_grad_(), weight.detach().requires_grad_())
    assert (out - plain).norm() < 0.1 * plain.norm()
    wanted = hidden.detach()[0].sum(0).expand(32, 64)
    assert (weight.grad - wanted).norm() < 0.2 * wanted.norm()


def test_frozen_weights_get_no_gradient_and_inputs_still_do():
    frozen, trained = random(32, 64, seed=1), random(16, 64, seed=2).requires_grad_()
    hidden = random(1, 48, 64).requires_grad_()
    sum(part.square().sum() for part in products(hidden, [frozen, trained])).backward()
    assert frozen.grad is None and trained.grad is not None and hidden.grad is not None
    hidden.grad = None
    sum(part.square().sum() for part in products(hidden, [frozen])).backward()
    assert hidden.grad is not None


def test_an_input_without_gradient_still_trains_the_weight():
    weight = random(32, 64, seed=1).requires_grad_()
    products(random(1, 48, 64), [weight])[0].square().sum().backward()
    assert weight.grad is not None and weight.grad.any()


# Models


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "Gemma2"])
def test_loss_and_gradients_are_near_those_in_full_precision_and_not_equal(family):
    plain, found = gradients(build(family)), fp8_gradients(family=family)
    assert abs(found["loss"] - plain["loss"]) < 0.1
    names = [name for name in plain if name.endswith("proj.weight")]
    errors = [float((found[name] - plain[name]).norm() / plain[name].norm()) for name in names]
    assert len(errors) == 28 and all(0.01 < error < 0.5 for error in errors), errors


def test_biases_are_added():
    model = build("qwen2")
    plain = copy.deepcopy(model)
    use_fp8(model)
    attention, wanted = layers_of(model)[0].self_attn, layers_of(plain)[0].self_attn
    hidden = random(1, 48, 64)
    difference = attention.q_proj(hidden) - wanted.q_proj(hidden)
    assert wanted.q_proj.bias.norm() > 0.1
    assert difference.mean(dim=(0, 1)).norm() < 0.1 * wanted.q_proj.bias.norm()


def test_first_and_last_layers_can_stay_as_they_are():
    model = build()
    use_fp8(model, bf16_layers=1)
    changed = ["forward" in vars(layer.mlp.down_proj) for layer in layers_of(model)]
    assert changed == [False, True, True, False]
    assert "forward" not in vars(model.lm_head)


def test_eval_mode_and_short_inputs_compute_as_before():
    model = build()
    plain = copy.deepcopy(model)
    use_fp8(model)
    for ids in (IDS, IDS[:, :40]):
        model.eval(), plain.eval()
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    model.train(), plain.train()
    assert torch.equal(model(input_ids=IDS[:, :40]).logits, plain(input_ids=IDS[:, :40]).logits)
    assert not torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_a_copy_has_weights_of_its_own():
    model = build()
    use_fp8(model)
    copied, wanted = copy.deepcopy(model), gradients(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert largest_error(gradients(copied), wanted) == 0


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"intermediate_size": 72}, r"layer 0 of Llama\w+ has mlp.gate_proj of 64 × 72, .* of 16; set"),
        ("Mixtral", {"num_local_experts": 2}, r"no linear layer mlp\.\w+ \(models with experts are not supported\)"),
        ("Phi3", {"pad_token_id": 0}, r"layer 0 of Phi3\w+ has no linear layer self_attn.q_proj .*; set"),
    ],
)
def test_models_that_do_not_fit_are_refused(family, changes, message):
    with pytest.raises(ConfigError, match=message):
        use_fp8(build(family, **changes))


def test_too_many_plain_layers_are_refused():
    with pytest.raises(ConfigError, match=r"leaves none of the model's 4 layers .*; use at most 1"):
        use_fp8(build(), bf16_layers=2)


def test_devices_without_fp8_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"8.9 or newer .* NVIDIA A100 has 8.0; set precision to bf16"):
        refuse_device(torch.device("cuda"))
    with pytest.raises(ConfigError, match="not mps; set precision to bf16"):
        refuse_device(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    refuse_device(torch.device("cuda"))


# Memory settings

KEEP = {"activation_checkpointing": "keep-attention"}
POLICIES = [
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "layers_per_checkpoint": 2, "offload": True},
    {"activation_checkpointing": "full", "layers_per_checkpoint": 3},
    KEEP,
    KEEP | {"layers_per_checkpoint": 2},
    KEEP | {"layers_per_checkpoint": 4, "offload": True, "attention_heads_at_once": 1},
    KEEP | {"keep_products": 2, "keep_on_host": 1},
    KEEP | {"keep_products": 4, "offload": True},
]


@pytest.mark.parametrize("family", ["llama", "qwen2", "Gemma2"])
@pytest.mark.parametrize("settings", POLICIES, ids=str)
def test_recomputation_gives_the_same_gradients(family, settings):
    """Gemma2 has a norm after its last product, which the recomputation therefore needs."""
    found, wanted = fp8_gradients(MemoryPolicy(**settings), family), fp8_gradients(family=family)
    assert largest_error(found, wanted) == 0


@pytest.mark.parametrize("settings", [{}, *POLICIES[:6]], ids=str)
def test_tiles_have_scales_of_their_own_and_nothing_else_changes(settings):
    tiled = fp8_gradients(MemoryPolicy(mlp_tiles=16, **settings))
    assert largest_error(tiled, fp8_gradients(MemoryPolicy(mlp_tiles=16))) < 1e-6
    assert largest_error(tiled, fp8_gradients()) < 0.3


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.aten._scaled_mm.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("family", "settings", "recomputed"),
    [
        ("llama", {}, 0),
        ("llama", {"activation_checkpointing": "full"}, 4 * 3),
        ("llama", {"activation_checkpointing": "full", "layers_per_checkpoint": 2}, 4 * 4 - 2),
        ("Gemma2", {"activation_checkpointing": "full"}, 4 * 4),
        ("llama", KEEP, 4 * 3),
        ("llama", KEEP | {"keep_products": 3}, 3),
        ("Gemma2", KEEP | {"keep_products": 3}, 4 + 3),
    ],
)
def test_kept_products_and_the_last_one_of_a_checkpoint_are_not_computed_again(family, settings, recomputed):
    model = build(family)
    use_fp8(model)
    apply_memory(model, MemoryPolicy(**settings))
    with Count() as count:
        gradients(model)
    assert count.products == 4 * (4 + 4 + 7) + recomputed  # outputs, input gradients, weight gradients


def test_fused_models_train_in_fp8():
    model = build()
    fuse_parts(model)
    use_fp8(model)
    with torch.compiler.set_stance("force_eager"):
        assert largest_error(gradients(model), fp8_gradients()) < 1e-5
