"""Who does what together, what goes over the wire, and weights read part by part."""

import pytest
import torch

from factory import build_model

from .jobs import LOADED_VOCAB


def test_neighbours_share_a_row_and_rows_go_by_the_other_axes(answers):
    found = answers[4]["places"]

    assert [coords.sequence_rank for coords, _ in found] == [0, 1, 0, 1]
    assert [coords.data_rank for coords, _ in found] == [0, 0, 1, 1]
    assert [groups["ulysses"] for _, groups in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [groups["shard"] for _, groups in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.parametrize("world", [2, 4])
def test_llama_3_8b_exchanges_80_head_slices_per_token_and_not_128(answers, world):
    found = answers[world]["slices"]

    assert found["forward"] == 32 + 8 + 8 + 32
    assert found["backward"] == 80
    assert found["messages"] == 4, "one before the kernel, one after it, and both ways"


@pytest.mark.parametrize("world", [2, 4])
def test_sinks_go_with_their_heads(answers, world):
    found = answers[world]["sinks"]

    torch.testing.assert_close(found["found"], found["wanted"])
    torch.testing.assert_close(found["found_grad"], found["wanted_grad"])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_weights_read_part_by_part_are_those_of_the_files(answers, world, family):
    found = answers[world][f"load {family}"]
    model = build_model(family, seed=3, vocab_size=LOADED_VOCAB)
    wanted = dict(model.named_parameters())

    assert found["empty"], "the model had memory for its weights before they were divided"
    assert found["files"] > 1
    assert found["weights"].keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found["weights"][name], weight), name
    with torch.no_grad():
        logits = model(input_ids=torch.arange(12)[None], use_cache=False).logits
    torch.testing.assert_close(found["logits"], logits)


@pytest.mark.parametrize("world", [2, 4])
def test_no_rank_reads_more_than_its_parts(answers, world):
    found = answers[world]["load llama"]
    shapes = [parameter.shape for parameter in build_model("llama", vocab_size=LOADED_VOCAB).parameters()]

    parts = [-(-shape[0] // world) * shape[1:].numel() for shape in shapes]
    assert (found["largest"], found["all"]) == (max(parts), sum(parts))


def test_files_without_a_weight_are_refused(answers):
    assert answers[2]["load refused"].startswith("ConfigError: model ")
    assert "its files have no model.embed_tokens.weight" in answers[2]["load refused"]
