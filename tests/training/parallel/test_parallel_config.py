"""What a recipe may ask for: refused before anything is loaded, with the values that would fit."""

import pytest
from pydantic import ValidationError

from unspool.core.errors import ConfigError
from unspool.training.parallel.config import Layout, ParallelConfig, Work, check_layout, settle_layout

# Llama-3-8B at 64K, 16 rows a step.
PLAIN = {
    "num_heads": 32,
    "num_kv_heads": 8,
    "context_length": 1 << 16,
    "batch_tokens": 1 << 20,
    "micro_batch_tokens": 1 << 16,
}


def layout(world_size=8, **changes):
    return settle_layout(ParallelConfig.model_validate(changes), world_size)


def check(world_size=8, work=None, **changes):
    check_layout(layout(world_size, **changes), Work(**PLAIN | {"document_masks": True} | (work or {})))


def test_shard_takes_the_ranks_that_are_left():
    assert layout(32, ulysses=4, replicate=2) == Layout(replicate=2, shard=4, ring=1, ulysses=4)
    assert layout(32, ulysses=4, replicate=2, shard=4) == layout(32, ulysses=4, replicate=2)
    assert (layout(32, ulysses=4, replicate=2).data_ranks, layout(32, ulysses=4, ring=2).sequence_ranks) == (8, 8)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ulysses": 8},
        {"world_size": 32, "ulysses": 32},
        {"world_size": 64, "ulysses": 16},
        {"ulysses": 2, "work": {"kv_heads_at_once": 2}},
        {"ulysses": 4, "work": {"kv_heads_at_once": 1}},
        {"ring": 2, "ulysses": 4, "work": {"document_masks": False}},
    ],
)
def test_what_fits_is_taken(changes):
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ulysses": 3}, "ulysses 3 = 3 ranks do not divide the 8 ranks.*one of 1, 2, 4 or 8"),
        ({"ulysses": 4, "ring": 4}, "ulysses 4 × ring 4 = 16 ranks.*one of 1, 2, 4 or 8"),
        ({"shard": 4}, "shard=4 .* is 4 ranks, but this run has 8; use shard 8 or auto"),
        ({"world_size": 12, "ulysses": 12}, "ulysses=12 .*32 query and 8 KV heads.*use 1, 2, 4, 8, 16 or 32"),
        ({"work": {"num_heads": 28, "num_kv_heads": 4}, "ulysses": 8}, "28 query and 4 KV heads.*use 1, 2, 4 or 28"),
        # Each rank could have two query heads of these, but not of whole groups.
        ({"work": {"num_heads": 12, "num_kv_heads": 4}, "world_size": 6, "ulysses": 6}, "use 1, 2, 4 or 12"),
        (
            {"ulysses": 8, "work": {"kv_heads_at_once": 3}},
            "attention_heads_at_once=3 .*; set attention_heads_at_once to 2, 4 or 8, or ulysses to 1\\.",
        ),
        ({"ring": 2}, "ring=2 does not support document masks.*; use ring 1 and ulysses, or attention: full"),
        (
            {"ring": 2, "work": {"document_masks": False, "micro_batch_tokens": 1 << 17}},
            "micro_batch_tokens 128K holds 2; set micro_batch_tokens to 64K",
        ),
        (
            {"ulysses": 8, "work": {"context_length": 4, "micro_batch_tokens": 4}},
            "ring × ulysses = 8 ranks; use at most 4",
        ),
        (
            {"work": {"batch_tokens": 3 << 17}},
            "6 micro-batches .*replicate × shard = 8 groups of ranks; set batch_tokens to 512K",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check(**changes)


@pytest.mark.parametrize("changes", [{"ulysses": 0}, {"shard": "all"}, {"shard": 0}, {"tensor": 2}])
def test_what_makes_no_sense_is_refused(changes):
    with pytest.raises(ValidationError):
        ParallelConfig.model_validate(changes)
