"""Attention probabilities in tiles, against a softmax written out by hand and held whole."""

import pytest
import torch

from unspool.inspection.attention.tiles import (
    Layer,
    LongRange,
    Visibility,
    build_visibility,
    draw,
    lowest_keys,
    measure,
)

LENGTH = 203  # no multiple of any block or tile below
TILES = [(16, 16), (32, 48), (64, 16), (7, 11), (512, 512)]
CASES = {
    "plain": {},
    "grouped": {"num_kv": 2},
    "scaled": {"scaling": 0.3},
    "window": {"window": 90},
    "capped": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"num_kv": 1, "scaling": 0.4, "window": 120, "softcap": 1.5, "sinks": True},
}
CLOSE = 1e-5


def build_layer(
    *, num_kv: int = 4, scaling: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: bool = False, length: int = LENGTH,
) -> Layer:  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    return Layer(
        query=2 * torch.randn(4, length, 16, generator=rng),
        key=2 * torch.randn(num_kv, length, 16, generator=rng),
        scale=16**-0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
        sinks=torch.randn(4, generator=rng) + 2 if sinks else None,
    )


def probabilities(layer: Layer, doc_ids: torch.Tensor | None = None) -> torch.Tensor:
    """float64[H, S, S], all at once."""
    key = layer.key.double().repeat_interleave(len(layer.query) // len(layer.key), dim=0)
    scores = layer.query.double() @ key.transpose(1, 2) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    places = torch.arange(scores.shape[-1], device=scores.device)
    behind = places[:, None] - places
    seen = (behind >= 0) & (behind < (layer.window or len(places)))
    if doc_ids is not None:
        seen &= doc_ids[:, None] == doc_ids
    scores = scores.masked_fill(~seen, -torch.inf)
    if layer.sinks is not None:
        column = layer.sinks.double()[:, None, None].expand(-1, len(places), 1)
        return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


def block_maxima(found: torch.Tensor, block: int) -> torch.Tensor:
    """[C, C] of one head, by looking at every block."""
    cells = -(-len(found) // block)
    rows = [
        torch.stack([found[i * block : (i + 1) * block, j * block : (j + 1) * block].max() for j in range(cells)])
        for i in range(cells)
    ]
    return torch.stack(rows)


def far_by_hand(whole: torch.Tensor, beyond: int, first: int, docs: torch.Tensor, starts: torch.Tensor) -> list[float]:
    """The far mass of each head over queries that have a far key that is not one of the first."""
    places = torch.arange(whole.shape[-1])
    is_first = places - starts < first
    far = (places[:, None] - places > beyond) & ~is_first
    possible = far & (places >= starts[:, None])
    counted = possible.any(1)
    assert counted.any() and not counted.all(), "no query is left out, so the mean would not be probed"
    return [float((head * far).sum(1)[counted].mean()) for head in whole]


def all_maps(layer: Layer, visibility: Visibility, found: LongRange, block: int, tile: tuple[int, int]) -> torch.Tensor:
    return torch.stack([draw(layer.head(at), visibility, found.log_sums[at], block, tile=tile) for at in range(4)])


def one_text(*, beyond: int = 40, first: int = 0) -> Visibility:
    return build_visibility([LENGTH], [0], masked=False, beyond=beyond, first=first)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tile", TILES)
def test_block_maxima_and_far_mass_are_those_of_the_whole_softmax(case, tile):
    layer = build_layer(**CASES[case])
    whole = probabilities(layer)
    found = measure(layer, one_text(), tile=tile)
    maps = all_maps(layer, one_text(), found, 16, tile)

    wanted = torch.stack([block_maxima(head, 16) for head in whole]).float()
    torch.testing.assert_close(maps, wanted, rtol=0, atol=CLOSE)
    window = layer.window
    if window is None:
        by_hand = far_by_hand(whole, 40, 0, torch.zeros(LENGTH), torch.zeros(LENGTH))
    else:
        places = torch.arange(LENGTH)
        by_hand = [float((head * (places[:, None] - places > 40)).sum(1)[41:].mean()) for head in whole]
    assert found.far == pytest.approx(by_hand, abs=CLOSE)
    assert max(found.far) > 0.01, "nothing is far, so the mean says nothing"


@pytest.mark.parametrize("block", [1, 5, 16, 64, 300])
def test_any_block_size_is_kept_right_at_the_last_partial_block(block):
    layer = build_layer()
    found = measure(layer, one_text())
    drawn = draw(layer.head(1), one_text(), found.log_sums[1], block, tile=(32, 48))
    torch.testing.assert_close(drawn, block_maxima(probabilities(layer)[1], block).float(), rtol=0, atol=CLOSE)


def test_nothing_is_drawn_above_the_diagonal_and_rows_sum_to_one():
    layer = build_layer()
    found = measure(layer, one_text())
    drawn = draw(layer.head(0), one_text(), found.log_sums[0], 1)
    assert float(drawn.triu(1).abs().max()) == 0
    torch.testing.assert_close(drawn.sum(1), torch.ones(LENGTH), rtol=0, atol=1e-5)


# What the comparison above would catch


def per_tile_softmax(layer: Layer, size: int) -> torch.Tensor:
    """The log of sums over only the keys of a query's last tile: the classic mistake of tiles."""
    whole = probabilities(layer)
    logs = measure(layer, one_text()).log_sums.double()
    mass = torch.stack([whole[:, at, at // size * size : at + 1].sum(-1) for at in range(LENGTH)], dim=1)
    return (logs + mass.log()).float()


def test_a_softmax_normalised_per_tile_is_caught():
    layer = build_layer()
    wrong = draw(layer.head(0), one_text(), per_tile_softmax(layer, 48)[0], 16)
    assert float((wrong - block_maxima(probabilities(layer)[0], 16)).abs().max()) > 1000 * CLOSE


@pytest.mark.parametrize(
    "change", [{"window": 119}, {"window": 121}, {"softcap": 1.6}, {"sinks": False}, {"scaling": 0.41}]
)
def test_a_rule_that_is_a_little_off_is_caught(change):
    wanted = probabilities(build_layer(**CASES["all"]))
    wrong = build_layer(**CASES["all"] | change)
    found = measure(wrong, one_text())
    maps = all_maps(wrong, one_text(), found, 16, (32, 48))
    assert float((maps - torch.stack([block_maxima(head, 16) for head in wanted])).abs().max()) > 10 * CLOSE


def test_query_heads_take_the_keys_they_share():
    layer = build_layer(num_kv=2)
    swapped = Layer(query=layer.query, key=layer.key.flip(0), scale=layer.scale)
    right, wrong = (measure(each, one_text()).far for each in (layer, swapped))
    assert max(abs(a - b) for a, b in zip(right, wrong, strict=True)) > 100 * CLOSE


# Documents


def test_a_piece_that_sees_only_itself_gets_nothing_from_others():
    lens, docs = [61, 80, 62], [0, 1, 0]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    starts = torch.repeat_interleave(torch.tensor([0, 61, 141]), torch.tensor(lens))
    visibility = build_visibility(lens, docs, masked=True, beyond=20, first=3)
    layer = build_layer(num_kv=2)
    whole = probabilities(layer, ids)
    for tile in TILES:
        found = measure(layer, visibility, tile=tile)
        maps = all_maps(layer, visibility, found, 1, tile)
        torch.testing.assert_close(maps, whole.float(), rtol=0, atol=CLOSE)
        assert float(maps[:, ids[:, None] != ids].max()) == 0
        assert found.far == pytest.approx(far_by_hand(whole, 20, 3, ids, starts), abs=CLOSE)
        assert found.same == pytest.approx(found.far, abs=1e-6)


def test_changing_one_masked_document_changes_no_bit_of_another():
    lens = [61, 80, 62]
    visibility = build_visibility(lens, [0, 1, 2], masked=True, beyond=20, first=0)
    layer = build_layer()
    other = Layer(query=layer.query.clone(), key=layer.key.clone(), scale=layer.scale)
    other.query[:, :61] += 1
    other.key[:, :61] -= 1
    before, after = (all_maps(each, visibility, measure(each, visibility), 1, (32, 48)) for each in (layer, other))
    assert not torch.equal(before[:, :61], after[:, :61])
    assert torch.equal(before[:, 61:], after[:, 61:])


@pytest.mark.parametrize("tile", TILES)
def test_far_mass_is_parted_into_own_document_others_and_first_tokens(tile):
    lens, docs = [50, 53, 50, 50], [0, 1, 0, 2]
    visibility = build_visibility(lens, docs, masked=False, beyond=30, first=5)
    layer = build_layer()
    whole, ids = probabilities(layer), torch.repeat_interleave(torch.tensor(docs), torch.tensor(lens))
    places = torch.arange(LENGTH)
    far = places[:, None] - places > 30
    counted = (far & (places >= 5)).any(1)

    def mean(mask: torch.Tensor) -> list[float]:
        return [float((head * (far & mask)).sum(1)[counted].mean()) for head in whole]

    found = measure(layer, visibility, tile=tile)
    assert found.far == pytest.approx(mean(places >= 5), abs=CLOSE)
    assert found.same == pytest.approx(mean((ids[:, None] == ids) & (places >= 5)), abs=CLOSE)
    assert found.first == pytest.approx(mean(places < 5), abs=CLOSE)
    assert all(0.001 < part < 0.9 for part in (*found.far, *found.same, *found.first))


def test_a_window_that_ends_before_anything_is_far_has_no_mean():
    found = measure(build_layer(window=40), one_text(beyond=40))
    assert (found.far, found.same, found.first) == (None, None, None)
    assert measure(build_layer(window=42), one_text(beyond=40)).far is not None


def test_the_first_key_of_each_query_is_that_of_its_window_or_document():
    visibility = build_visibility([3, 4], [0, 1], masked=True, beyond=1, first=0)
    assert lowest_keys(visibility, None).tolist() == [0, 0, 0, 3, 3, 3, 3]
    assert lowest_keys(visibility, 2).tolist() == [0, 0, 1, 3, 3, 4, 5]


def test_scores_beyond_what_exp_can_hold_are_kept_right():
    layer = build_layer()
    steep = Layer(query=50 * layer.query, key=layer.key, scale=layer.scale)
    found = measure(steep, one_text(), tile=(32, 48))
    wanted = far_by_hand(probabilities(steep), 40, 0, torch.zeros(LENGTH), torch.zeros(LENGTH))
    assert found.far == pytest.approx(wanted, abs=1e-4)


def test_the_head_that_looks_far_is_found():
    """Head 2 attends to keys in the first quarter of the text; the others attend to their neighbors."""
    length, far_head = 240, 2
    key = torch.zeros(1, length, 4)
    key[0, :60, 0] = 1
    key[0, :, 1] = torch.arange(length) / length
    query = torch.zeros(4, length, 4)
    query[:, :, 1] = 400
    query[far_head] = torch.tensor([20.0, 0, 0, 0])
    layer = Layer(query=query, key=key, scale=1.0)
    visibility = build_visibility([length], [0], masked=False, beyond=40, first=0)
    found = measure(layer, visibility, tile=(32, 48))
    assert found.far[far_head] > 0.7
    assert max(value for at, value in enumerate(found.far) if at != far_head) < 1e-3
    drawn = draw(layer.head(far_head), visibility, found.log_sums[far_head], 16)
    assert float(drawn[-1, :3].min()) > 10 * float(drawn[-1, 5:].max())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_in_half_precision_the_numbers_are_those_of_fp64(case):
    built = build_layer(**CASES[case], length=2500)
    half = {name: getattr(built, name).to("cuda", torch.bfloat16) for name in ("query", "key")}
    sinks = None if built.sinks is None else built.sinks.to("cuda", torch.bfloat16)
    layer = Layer(**half, scale=built.scale, window=built.window, softcap=built.softcap, sinks=sinks)
    visibility = build_visibility([1200, 1300], [0, 1], masked=False, beyond=60, first=4).to(torch.device("cuda"))
    whole = probabilities(layer)
    places = torch.arange(2500, device="cuda")
    far = (places[:, None] - places > 60) & (places >= 4)
    wanted = (whole * far).sum(-1)[:, far.any(1)].mean(-1)
    for tile in (None, (256, 512)):
        found = measure(layer, visibility, tile=tile)
        assert found.far == pytest.approx(wanted.tolist(), abs=CLOSE)
        drawn = draw(layer.head(3), visibility, found.log_sums[3], 16, tile=tile)
        torch.testing.assert_close(drawn, block_maxima(whole[3].float().cpu(), 16), rtol=0, atol=CLOSE)
