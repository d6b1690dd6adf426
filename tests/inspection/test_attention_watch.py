"""Attention of whole models, against the probabilities that `transformers` itself gives back."""

from typing import Any

import numpy as np
import pytest
import torch

from factory import CPU, build_model, packed_inputs, random_tokens, save_folder
from models.memory_factory import Largest
from unspool.core.errors import ConfigError
from unspool.inspection.attention import tiles
from unspool.inspection.attention.input_text import Text
from unspool.inspection.attention.measure import (
    LEAST_FAR,
    AttentionSettings,
    HeadStats,
    ModelRef,
    cell_of,
    check_models,
    measure_attention,
    record_attention,
)
from unspool.models.rotary import apply_base, apply_head_bases

LENGTH = 151
BLOCK = 16
PADDED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 60, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 8, "sliding_window": 60, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "GptOss": {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 60},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that a short text takes many of them."""
    monkeypatch.setattr(tiles, "CPU_TILE", (32, 48))


def build(family: str, *, attention: str = "unspool") -> Any:
    return build_model(family, attention=attention, **PADDED | FAMILIES[family])


def text_of(doc_lens: tuple[int, ...] = (LENGTH,), seed: int = 0, docs: tuple[int, ...] | None = None) -> Text:
    docs = docs or tuple(range(len(doc_lens)))
    tokens = random_tokens(sum(doc_lens), seed)[0].numpy().astype(np.uint32)
    names = tuple(f"document {number}" for number in range(max(docs) + 1))
    return Text(tokens=tokens, piece_lens=doc_lens, chunk_ids=docs, doc_names=names, origin="test")


def all_heads(count: int = 8, **changes: Any) -> AttentionSettings:
    return AttentionSettings(**{"attention": "full", "beyond": 40, "first": 0, "cell": BLOCK, "count": count} | changes)


@torch.no_grad()
def eager(model: Any, text: Text) -> list[torch.Tensor]:
    """[H, S, S] of each layer."""
    tokens = torch.from_numpy(text.tokens.astype(np.int64))[None]
    return [found[0] for found in model(input_ids=tokens, output_attentions=True, use_cache=False).attentions]


def maxima(whole: torch.Tensor, block: int) -> np.ndarray:
    """[H, C, C]; the last blocks may be partial."""
    rest = -whole.shape[-1] % block
    padded = torch.nn.functional.pad(whole, (0, rest, 0, rest))
    return torch.nn.functional.max_pool2d(padded[None], block)[0].numpy()


def far(whole: torch.Tensor, beyond: int) -> list[float]:
    places = torch.arange(whole.shape[-1])
    mass = (whole * (places[:, None] - places > beyond)).sum(-1)
    return mass[:, beyond + 1 :].mean(-1).tolist()


def error(seen: HeadStats, wanted: list[torch.Tensor]) -> float:
    """The largest difference of any cell or any mean."""
    worst = 0.0
    for layer, whole in enumerate(wanted):
        for head, each in enumerate(maxima(whole, BLOCK)):
            worst = max(worst, float(np.abs(seen.maps[layer, head] - each).max()))
        found = seen.far[layer]
        assert found is not None
        worst = max(worst, *(abs(a - b) for a, b in zip(found, far(whole, 40), strict=True)))
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_maps_and_far_mass_are_those_of_eager_attention(family):
    wanted = eager(build(family, attention="eager"), text_of())
    seen = record_attention(build(family), text_of(), all_heads())
    assert len(seen.maps) == 8
    assert error(seen, wanted) < 1e-5


@pytest.mark.parametrize("tile", [(16, 16), (64, 32), (7, 500), (1024, 1024)])
def test_tiles_change_nothing(tile, monkeypatch):
    model, text = build("Gemma2"), text_of()
    before = record_attention(model, text, all_heads())
    monkeypatch.setattr(tiles, "CPU_TILE", tile)
    after = record_attention(model, text, all_heads())
    assert before.maps.keys() == after.maps.keys()
    assert max(float(np.abs(before.maps[head] - after.maps[head]).max()) for head in before.maps) < 1e-6
    assert np.abs(np.array(before.far) - np.array(after.far)).max() < 1e-6


def test_queries_before_their_rotation_would_be_caught():
    """The comparison sees positions: another RoPE base is another map."""
    model = build("Llama")
    apply_base(model, 100.0)
    assert (
        error(record_attention(model, text_of(), all_heads()), eager(build("Llama", attention="eager"), text_of()))
        > 1e-3
    )


def test_watching_leaves_the_model_and_its_output_as_they_were():
    model, inputs = build("Llama"), packed_inputs(random_tokens(LENGTH), (LENGTH,))
    with torch.no_grad():
        before = model.base_model(**inputs, use_cache=False).last_hidden_state
        record_attention(model, text_of(), all_heads())
        assert torch.equal(model.base_model(**inputs, use_cache=False).last_hidden_state, before)
    assert not any(hasattr(module, "exchange") for module in model.modules())


def test_each_document_alone_gives_its_part_of_a_masked_map():
    lens = (48, 64, 39)
    model, text = build("Llama"), text_of(lens)
    masked = record_attention(model, text, all_heads(attention="intra_document", cell=1, beyond=20))
    stock = build("Llama", attention="eager")
    start = 0
    for size in lens:
        part = Text(
            tokens=text.tokens[start : start + size], piece_lens=(size,), chunk_ids=(0,), doc_names=("",), origin=""
        )
        for layer, whole in enumerate(eager(stock, part)):
            for head in range(4):
                rows = masked.maps[layer, head][start : start + size]
                np.testing.assert_allclose(rows[:, start : start + size], whole[head].numpy(), atol=1e-5)
                assert rows[:, :start].max(initial=0) == rows[:, start + size :].max(initial=0) == 0
        start += size


def test_a_base_per_head_is_drawn_as_a_model_with_that_base():
    harpe, text = build("Llama"), text_of()
    apply_head_bases(harpe, np.array([1e3, 1e6]))
    found = record_attention(harpe, text, all_heads())
    for base, heads in ((1e3, (0, 1)), (1e6, (2, 3))):
        plain = build("Llama")
        apply_base(plain, base)
        wanted = record_attention(plain, text, all_heads())
        for head in heads:  # of the first layer, whose input is the same
            np.testing.assert_allclose(found.maps[0, head], wanted.maps[0, head], atol=1e-5)
        assert not np.allclose(found.maps[0, 3 - heads[0]], wanted.maps[0, 3 - heads[0]], atol=1e-3)


def test_the_heads_drawn_in_one_pass_are_those_that_rank_highest_in_the_end():
    model = build_model("Llama", **PADDED | {"num_hidden_layers": 6})
    everything = record_attention(model, text_of(), all_heads(count=24))
    few = record_attention(model, text_of(), all_heads(count=5))
    assert list(few.maps) == everything.ranked()[:5] == list(everything.maps)[:5]
    assert len({layer for layer, _ in few.maps}) > 1
    values = [everything.far_of(head) for head in everything.ranked()]
    assert values == sorted(values, reverse=True)
    assert all(np.array_equal(few.maps[head], everything.maps[head]) for head in few.maps)


def test_heads_can_be_ranked_by_attention_within_their_document():
    text = text_of((50, 51, 50), docs=(0, 1, 0))
    seen = record_attention(build("Llama"), text, all_heads(count=2, by="same"))
    flat = {(layer, head): value for layer, row in enumerate(seen.same) for head, value in enumerate(row)}
    assert list(seen.maps) == sorted(flat, key=lambda head: -flat[head])[:2]


def test_heads_are_ranked_by_the_share_of_their_document_but_for_those_that_hardly_look_back():
    text = text_of((50, 51, 50), docs=(0, 1, 0))
    seen = record_attention(build("Llama"), text, all_heads(count=2, by="share"))
    flat = {
        (layer, head): same / far
        for layer, (fars, sames) in enumerate(zip(seen.far, seen.same, strict=True))
        for head, (far, same) in enumerate(zip(fars, sames, strict=True))
    }
    order = sorted(flat, key=lambda head: -flat[head])
    assert list(seen.maps) == order[:2]
    layer, head = order[0]
    # A hundredth of the value: the share is as high as before, but meaningless now.
    seen.far[layer][head] /= 100 * seen.far[layer][head] / LEAST_FAR
    seen.same[layer][head] = flat[order[0]] * seen.far[layer][head]
    assert seen.ranked() == [*order[1:], order[0]]


def test_named_heads_and_layers_are_all_that_is_looked_at():
    seen = record_attention(build("Llama"), text_of(), all_heads(layers=(1,), heads=((1, 3), (1, 0))))
    assert list(seen.maps) == [(1, 3), (1, 0)]
    assert seen.far[0] is None and seen.far[1] is not None
    assert {layer for layer, _ in seen.ranked()} == {1}
    # A head that is named outside of these layers is looked at all the same.
    assert list(record_attention(build("Llama"), text_of(), all_heads(layers=(1,), heads=((0, 2),))).maps) == [(0, 2)]


def test_no_tensor_of_all_pairs_is_made(monkeypatch):
    monkeypatch.setattr(tiles, "CPU_TILE", (64, 128))
    lens = (500, 700)
    pairs = sum(lens) ** 2
    with Largest() as ours:
        record_attention(build("Llama"), text_of(lens), all_heads(count=1, cell=32))
    with Largest() as theirs:
        eager(build("Llama", attention="eager"), text_of(lens))
    assert ours.elements < pairs // 10
    assert theirs.elements >= pairs, "the probe does not see what it should"


def test_points_are_whole_blocks_within_the_limit():
    assert cell_of(8192, 16, 512) == 16
    assert cell_of(8193, 16, 512) == 32
    assert cell_of(1 << 17, 16, 512) == 256
    assert cell_of(100, 16, 512) == 16


def ref_of(name: str, folder: Any, **values: Any) -> ModelRef:
    known = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 256}
    return ModelRef(name=name, ref=str(folder), values=known | values)


def test_two_models_show_the_same_heads_and_what_the_second_has_more(tmp_path):
    refs = [
        ref_of(str(seed), save_folder(tmp_path / str(seed), build_model("llama", seed=seed, **PADDED)))
        for seed in (1, 2)
    ]
    both = measure_attention(refs, text_of(), all_heads(count=3), BLOCK, device=CPU, dtype=torch.float32)
    assert both.heads == both.stats[1].ranked()[:3]
    for head in both.heads:
        whole = [
            maxima(eager(build_model("llama", attention="eager", seed=seed, **PADDED), text_of())[head[0]], BLOCK)
            for seed in (1, 2)
        ]
        np.testing.assert_allclose(both.difference(head), whole[1][head[1]] - whole[0][head[1]], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "look", "says"),
    [
        ({"num_hidden_layers": 3}, {}, "cannot be compared"),
        ({"vocab_size": 200}, {}, "not in the vocabulary"),
        ({}, {"heads": ((2, 0),)}, "has layers 0 to 1"),
        ({}, {"heads": ((0, 4),)}, "heads 0 to 3"),
        ({}, {"layers": (5,)}, "layer 5"),
        ({}, {"beyond": 150}, "smaller `beyond`"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_weights_are_read(changes, look, says):
    models = [ref_of("a", "nowhere"), ref_of("b", "nowhere", **changes)]
    with pytest.raises(ConfigError, match=says):
        check_models(models, text_of(), all_heads(**look), BLOCK)


def test_a_text_of_less_than_two_blocks_is_refused():
    with pytest.raises(ConfigError, match="at least 200"):
        check_models([ref_of("a", "nowhere")], text_of(), all_heads(), 100)


@pytest.mark.gpu
def test_on_a_gpu_a_pass_in_half_precision_is_close_to_one_on_the_cpu():
    text = text_of((1200, 1300))
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "initializer_range": 0.05}
    model = build_model("Llama", **PADDED | config | {"max_position_embeddings": 4096})
    wanted = record_attention(model, text, all_heads(beyond=1000, first=4, cell=32))
    found = record_attention(model.to("cuda", torch.bfloat16), text, all_heads(beyond=1000, first=4, cell=32))
    assert np.abs(np.array(found.far) - np.array(wanted.far)).max() < 0.01
    heads = found.maps.keys() & wanted.maps.keys()
    assert heads
    for head in heads:
        assert np.abs(found.maps[head] - wanted.maps[head]).max() < 0.05
        assert np.abs(found.maps[head]).sum() > 1
