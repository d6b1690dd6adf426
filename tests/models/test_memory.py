"""Memory settings change what is held and not what comes out."""

import pytest
import torch
from torch import nn

from factory import build_model, packed_inputs, random_tokens
from models.memory_factory import DOC_LENS, LAYERS, Watch, apart, build, forward, kept_bytes, trained
from unspool.core.errors import ConfigError
from unspool.models import fuse
from unspool.models.attention import interface
from unspool.models.generation.greedy import answer
from unspool.models.memory import checkpointing, offload, tiling
from unspool.models.memory import kept as keep
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy
from unspool.models.rotary import apply_rope
from unspool.rope.harpe import HARPE

# The same kernels on the same numbers: the same bits.
EXACT = {
    "full": MemoryPolicy(activation_checkpointing="full"),
    "keep-attention": MemoryPolicy(activation_checkpointing="keep-attention"),
    "groups": MemoryPolicy(activation_checkpointing="full", layers_per_checkpoint=2),
    "groups that keep": MemoryPolicy(activation_checkpointing="keep-attention", layers_per_checkpoint=3),
    "one group": MemoryPolicy(activation_checkpointing="full", layers_per_checkpoint=99),
    "offload": MemoryPolicy(activation_checkpointing="full", offload=True),
    "offload groups": MemoryPolicy(activation_checkpointing="keep-attention", layers_per_checkpoint=2, offload=True),
    "heads": MemoryPolicy(attention_heads_at_once=1),
    "products": MemoryPolicy(activation_checkpointing="keep-attention", keep_products=LAYERS),
    "some products": MemoryPolicy(
        activation_checkpointing="keep-attention", keep_products=3, attention_heads_at_once=1
    ),
    "products on the host": MemoryPolicy(
        activation_checkpointing="keep-attention", keep_products=4, keep_on_host=2, offload=True
    ),
}
ALL = MemoryPolicy(
    activation_checkpointing="keep-attention",
    layers_per_checkpoint=2,
    offload=True,
    mlp_tiles=10,
    attention_heads_at_once=1,
)
# Sums over tiles are made in another order.
ROUNDED = {
    "tiles": MemoryPolicy(mlp_tiles=10),
    "tiles, recomputed": MemoryPolicy(activation_checkpointing="full", mlp_tiles=10),
    "all": ALL,
    "all, full": MemoryPolicy(
        activation_checkpointing="full", layers_per_checkpoint=2, offload=True, mlp_tiles=10, attention_heads_at_once=1
    ),
}
ROUNDING = 1e-5
FAMILIES = {
    "llama-mqa": {},
    "llama-tied": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "Olmo2": {},
    "Mixtral": {},
    "Gemma2": {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": None},
}


@pytest.fixture(scope="module")
def plain():
    return trained(build())


# Equal results


@pytest.mark.parametrize("name", EXACT)
def test_recomputing_offloading_and_heads_in_turn_give_the_same_bits(name, plain):
    assert apart(trained(build(policy=EXACT[name])), plain) == 0


@pytest.mark.parametrize("name", ROUNDED)
def test_tiles_give_the_same_up_to_rounding(name, plain):
    assert apart(trained(build(policy=ROUNDED[name])), plain) < ROUNDING


@pytest.mark.parametrize("family", FAMILIES)
def test_all_settings_together_give_the_same_in_every_family(family):
    changes = FAMILIES[family]

    assert apart(trained(build(family, ALL, **changes)), trained(build(family, **changes))) < ROUNDING


@pytest.mark.parametrize("policy", [EXACT["heads"], ALL], ids=["heads", "all"])
def test_heads_with_bases_of_their_own_keep_them_when_computed_in_turn(policy):
    wanted, found = build(), build()
    for model in (wanted, found):
        apply_rope(model, HARPE(method="harpe", low=1e3, high=1e6), 64)
    apply_memory(found, policy)

    assert apart(trained(found), trained(wanted)) < ROUNDING


@pytest.mark.parametrize("policy", [EXACT["offload groups"], ALL], ids=["exact", "all"])
def test_gradients_of_several_micro_batches_add_up_to_the_same(policy):
    batches = [DOC_LENS, (7, 30), (64,), DOC_LENS]

    assert apart(trained(build(policy=policy), *batches), trained(build(), *batches)) < ROUNDING


def test_a_pass_twice_gives_the_same_bits():
    assert apart(trained(build(policy=ALL)), trained(build(policy=ALL))) == 0


def test_a_pass_without_gradients_and_generating_are_as_before():
    wanted, found = build(), build(policy=ALL)
    context, question = (random_tokens(count)[0].numpy() for count in (40, 5))

    with torch.no_grad():
        torch.testing.assert_close(forward(found), forward(wanted))
    answers = [answer(model.eval(), context, [question], max_new_tokens=8, stop_ids=()) for model in (found, wanted)]
    assert answers[0] == answers[1]


def test_names_of_weights_and_the_config_stay_as_they_are():
    model, plain = build(policy=ALL), build()

    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.config._attn_implementation == plain.config._attn_implementation


# What is broken is noticed


def _other_bytes(tensor):
    return torch.zeros_like(tensor).view(-1).view(torch.uint8)


def _last_tile_only(total, more):
    return more


def _all_heads(self, name):
    found = getattr(self._module, name)
    return found[: self._slice.stop - self._slice.start] if name == "head_inv_freq" else found


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [(offload, "_as_bytes", _other_bytes), (tiling, "_add", _last_tile_only)],
    ids=["offload loses bytes", "tiles forget"],
)
def test_a_setting_that_changes_results_is_noticed(owner, name, broken, plain, monkeypatch):
    monkeypatch.setattr(owner, name, broken)

    assert apart(trained(build(policy=ALL)), plain) > 100 * ROUNDING


def test_heads_that_take_the_bases_of_others_are_noticed(monkeypatch):
    monkeypatch.setattr(interface._HeadsView, "__getattr__", _all_heads)

    with pytest.raises(AssertionError):
        test_heads_with_bases_of_their_own_keep_them_when_computed_in_turn(EXACT["heads"])


# Less is held


LONG = (200, 56)


def test_recomputing_keeps_a_fraction_of_what_is_kept_without():
    none = kept_bytes(build(), LONG)
    full = kept_bytes(build(policy=EXACT["full"]), LONG)
    keeping = kept_bytes(build(policy=EXACT["keep-attention"]), LONG)
    groups = kept_bytes(build(policy=EXACT["one group"]), LONG)

    hidden_bytes = sum(LONG) * 32 * 4
    assert full < none / 5
    # Attention's output of each layer, and its log-sum-exp (a number for each of 4 heads of 8).
    assert full + LAYERS * hidden_bytes <= keeping < full + 1.5 * LAYERS * hidden_bytes
    assert groups < full - 3 * hidden_bytes


def test_kept_attention_is_not_computed_again():
    calls = {}
    names = ("full", "groups", "keep-attention", "groups that keep")
    for name, policy in ({"none": MemoryPolicy(), "all": ALL} | {name: EXACT[name] for name in names}).items():
        model = build(policy=policy)
        with Watch() as watch:
            forward(model).backward()
        calls[name] = watch.attention_calls

    assert calls["none"] == LAYERS * len(DOC_LENS)
    assert calls["full"] == calls["groups"] == 2 * calls["none"]
    assert calls["keep-attention"] == calls["groups that keep"] == calls["none"]
    assert calls["all"] == 2 * calls["none"], "two KV heads, each in turn, once"


def test_tiles_bound_what_an_mlp_computes_inside():
    wide = {"intermediate_size": 640, "num_hidden_layers": 2}
    largest = {}
    for tile in (None, 16):
        policy = MemoryPolicy(activation_checkpointing="full", mlp_tiles=tile)
        model = build(policy=policy, **wide)
        for weight in model.parameters():
            weight.requires_grad_(weight.shape[0] == 300)  # gradients of weights would be the largest otherwise
        with Watch() as watch:
            backward_of_states(model)
        largest[tile] = watch.largest

    assert largest[None] == sum(LONG) * 640 * 4
    assert largest[16] <= max(16 * 640 * 4, sum(LONG) * 300 * 4)


def backward_of_states(model):
    inputs = packed_inputs(random_tokens(sum(LONG)), LONG)
    model.base_model(**inputs, use_cache=False).last_hidden_state.sum().backward()


def test_tiles_lower_the_peak_of_a_whole_pass():
    peaks = {}
    for tile in (None, 16):
        model = build(
            policy=MemoryPolicy(activation_checkpointing="full", mlp_tiles=tile),
            intermediate_size=640,
            num_hidden_layers=2,
        )
        with Watch(with_peak=True) as watch:
            backward_of_states(model)
        peaks[tile] = watch.peak

    assert peaks[16] < peaks[None] / 2


def test_tiles_let_go_of_their_input_when_they_are_done_with_it():
    model = build(policy=MemoryPolicy(mlp_tiles=16))
    weights = sum(weight.nbytes for weight in model.parameters())
    with Watch() as watch:
        loss = forward(model, LONG)  # as long as it is there, so is the graph
        loss.backward()

    assert watch.live - weights < 2 * sum(LONG) * 32 * 4


def test_an_mlp_in_tiles_is_computed_twice_and_not_three_times():
    model = build(policy=MemoryPolicy(activation_checkpointing="full", mlp_tiles=16))
    counted = []
    for layer in model.base_model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda *_: counted.append(1))

    trained(model)

    assert len(counted) == 2 * LAYERS * 4


def test_attention_sees_only_some_heads_at_a_time(monkeypatch):
    model = build("llama-mha", MemoryPolicy(attention_heads_at_once=3))
    seen = []
    attend = interface.ALL_ATTENTION_FUNCTIONS["unspool"]

    def watching(module, query, key, value, mask, **kwargs):
        seen.append((query.shape[1], key.shape[1]))
        return attend(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(interface.ALL_ATTENTION_FUNCTIONS._global_mapping, "unspool", watching)
    trained(model)

    assert seen == [(3, 3), (1, 1)] * LAYERS


def test_heads_that_lie_too_far_apart_are_moved_together(plain, monkeypatch):
    monkeypatch.setattr(interface, "MAX_ELEMENTS", 100)
    attend = interface._call_inner
    together = []

    def watching(function, module, query, key, value, *rest, **kwargs):
        together.extend(tensor.transpose(1, 2).is_contiguous() for tensor in (query, key, value))
        return attend(function, module, query, key, value, *rest, **kwargs)

    monkeypatch.setattr(interface, "_call_inner", watching)

    assert apart(trained(build(policy=EXACT["heads"])), plain) < ROUNDING
    assert together == [True] * (3 * 2 * LAYERS)
    heads = torch.randn(1, 64, 4, 8).transpose(1, 2)[:, :2]
    moved = interface._compact(heads)
    assert torch.equal(moved, heads)
    assert moved.transpose(1, 2).is_contiguous()


# Kept products


def products(policy: MemoryPolicy) -> int:
    """Matrix products of a forward and backward pass without the head's."""
    model = build(policy=policy)
    with Watch() as watch:
        model.base_model(
            **packed_inputs(random_tokens(64), DOC_LENS), use_cache=False
        ).last_hidden_state.sum().backward()
    return watch.calls["aten.mm.default"]


def test_a_layer_that_keeps_its_products_computes_none_again():
    """Seven products a layer: none is computed again but the last, for which the recomputation is not run so far."""
    nothing, kept = MemoryPolicy(), MemoryPolicy(activation_checkpointing="keep-attention", keep_products=2)

    assert products(MemoryPolicy(activation_checkpointing="keep-attention")) == products(nothing) + 6 * LAYERS
    assert products(kept) == products(nothing) + 6 * (LAYERS - 2)


def test_results_wait_in_host_memory_and_come_back_a_layer_ahead(monkeypatch):
    events = []
    fetch, take = offload.Offloader.fetch, offload.Offloader.take
    monkeypatch.setattr(offload.Offloader, "fetch", lambda *args: events.append("fetch") or fetch(*args))
    monkeypatch.setattr(offload.Offloader, "take", lambda *args: events.append("take") or take(*args))
    policy = MemoryPolicy(activation_checkpointing="keep-attention", keep_products=LAYERS, keep_on_host=LAYERS)

    trained(build(policy=policy))

    first_take = events.index("take")
    # Of six products and the kernel's output: those of the last layer and of the one before, first of all.
    assert events[:first_take].count("fetch") >= 2 * 7
    assert events.count("take") >= 7 * LAYERS


def test_results_given_back_in_another_order_are_noticed(plain, monkeypatch):
    take = keep.Kept.take

    def wrong(self, key):
        if len(self._entries) > 1:
            self._entries.rotate(1)
        return take(self, key)

    monkeypatch.setattr(keep.Kept, "take", wrong)
    try:
        found = trained(build(policy=EXACT["products"]))
    except RuntimeError:  # of another shape, or there is none left
        return
    assert apart(found, plain) > ROUNDING


def test_host_layers_are_spread_over_those_that_keep():
    assert checkpointing.host_layers(32, keep=24, on_host=8) == {8, 11, 14, 17, 20, 23, 26, 29}
    assert checkpointing.host_layers(4, keep=4, on_host=0) == set()
    assert checkpointing.host_layers(4, keep=4, on_host=4) == {0, 1, 2, 3}


# Compiling


def test_compiled_parts_work_under_tiles_recompute_and_offload(plain, monkeypatch):
    compile_whole = torch.compile
    monkeypatch.setattr(fuse.torch, "compile", lambda forward: compile_whole(forward, backend="aot_eager"))
    torch._dynamo.reset()
    model = build(num_hidden_layers=2)
    wanted = trained(build(num_hidden_layers=2))

    fuse.fuse_parts(model)
    apply_memory(model, ALL)

    assert apart(trained(model), wanted) < ROUNDING
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
    assert not torch._dynamo.utils.counters["graph_break"]


# Refusals


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"offload": True}, "offload needs checkpoints of recomputed layers.*set activation_checkpointing to full"),
        ({"layers_per_checkpoint": 2}, "layers_per_checkpoint=2 .*set activation_checkpointing to full"),
        (
            {"activation_checkpointing": "full", "layers_per_checkpoint": 0},
            "layers_per_checkpoint=0 must be at least 1",
        ),
        ({"mlp_tiles": 0}, "mlp_tiles=0"),
        ({"attention_heads_at_once": -1}, "attention_heads_at_once=-1"),
        ({"keep_products": 1}, "keep_products=1 .*needs activation_checkpointing keep-attention"),
        ({"activation_checkpointing": "keep-attention", "keep_products": 1, "mlp_tiles": 8}, "no mlp_tiles"),
        ({"activation_checkpointing": "keep-attention", "keep_products": 1, "keep_on_host": 2}, "between 0 and 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        MemoryPolicy(**settings)


class Mixing(nn.Module):
    """Looks at the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden):
        return hidden + self.weight * hidden.roll(1, dims=1)


def test_a_module_that_looks_at_other_tokens_is_not_tiled():
    model = build()
    model.base_model.layers[1].mlp = Mixing()

    with pytest.raises(ConfigError, match="mlp_tiles: Mixing does not compute each token separately"):
        apply_memory(model, MemoryPolicy(mlp_tiles=8))


def test_dropout_is_not_tiled():
    model = build()
    model.base_model.layers[0].mlp = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1))

    with pytest.raises(ConfigError, match="mlp_tiles: Sequential has dropout"):
        apply_memory(model, MemoryPolicy(mlp_tiles=8))


def test_a_model_that_does_something_between_layers_cannot_share_checkpoints():
    model = build(policy=EXACT["groups"])
    model.base_model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))

    with pytest.raises(
        ConfigError,
        match=r"layers_per_checkpoint: this model changes .*set layers_per_checkpoint to 1",
    ):
        forward(model)


def test_attention_that_is_not_registered_is_refused():
    model = build_model(attention="eager")

    with pytest.raises(ConfigError, match="attention 'eager' is not a registered function"):
        apply_memory(model, MemoryPolicy(attention_heads_at_once=1))


def test_layers_that_are_not_found_are_refused():
    model = build_model()
    model.base_model.layers = nn.Sequential(*model.base_model.layers)

    with pytest.raises(ConfigError, match="LlamaForCausalLM does not keep its layers"):
        apply_memory(model, MemoryPolicy(activation_checkpointing="full"))
