"""AdamW with 8-bit moments on ranks that shard them: blocks are those of the full parameter, on any number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from factory import build_model, random_row, save_folder, save_rows
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.loader import LEDGER
from unspool.training.metrics.logger import METRICS
from unspool.training.optim.adamw8bit import BLOCK, group_shape, is_quantized
from unspool.training.stage import StageInputs

from .ranks import run_ranks
from .stages import copied, cut_off, lines, train, weights

SHAPE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
SETTINGS: dict[str, Any] = {
    "optimizer": {"states": "8bit"},
    "mix": {"long": 1.0},
    "batch_tokens": 192,
    "tokens": 6 * 192,
    "validation": None,
}
# Codes at the edge of two levels may turn with the order of fp32 sums; an update is some 1e-3.
LOSS, UPDATE = 1e-4, 2e-2


@pytest.fixture(scope="module")
def materials(tmp_path_factory) -> StageInputs:
    folder = tmp_path_factory.mktemp("8bit")
    rows = [random_row((20, 12), seed, mask=0.3) for seed in range(9)]
    model = build_model(**SHAPE)
    return StageInputs(
        model=str(save_folder(folder / "model", model)), datasets={"long": save_rows(folder / "rows" / "long", rows)}
    )


@pytest.fixture(scope="module")
def made(materials, tmp_path_factory) -> Path:
    """The stage as 1 and as 2 ranks train it."""
    folder = tmp_path_factory.mktemp("8bit-stages")
    train(materials, folder / "whole-1" / "one", {}, **SETTINGS)
    on_ranks(folder, "whole-2", 2, lambda: train(materials, folder / "whole-2" / "one", {}, **SETTINGS))
    return folder


@pytest.fixture(scope="module")
def cut(made, materials) -> Path:
    """What 2 ranks leave that are cut off, in the same folder."""
    on_ranks(made, "cut-2", 2, lambda: cut_off(materials, made / "cut-2" / "one", {}, **SETTINGS))
    return made


def on_ranks(folder: Path, name: str, world_size: int, work: Callable[[], None]) -> None:
    run_ranks(lambda rank: work(), world_size=world_size, store=folder / f"store-{name}")


def resumed(materials: StageInputs, made: Path, start: str, name: str, world_size: int) -> Path:
    out = made / name / "one"
    on_ranks(made, name, world_size, lambda: train(materials, copied(made / start / "one", out), {}, **SETTINGS))
    return out


def assert_as_one_rank(made: Path, out: Path) -> None:
    wanted = made / "whole-1" / "one"
    losses = [[line["loss"] for line in lines(each, METRICS)] for each in (out, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=LOSS)
    found, right = weights(out), weights(wanted)
    start = dict(build_model(**SHAPE).named_parameters())
    for name, weight in right.items():
        moved = (weight - start[name].detach()).norm()
        assert (found[name] - weight).norm() < UPDATE * moved, name
    assert (out / LEDGER).read_bytes() == (wanted / LEDGER).read_bytes()


def quantized(out: Path) -> set[str]:
    return {name for name in load_file(out / OPTIMIZER) if name.endswith(".codes")}


@pytest.mark.slow
def test_two_ranks_train_as_one_does(made):
    assert_as_one_rank(made, made / "whole-2" / "one")

    assert quantized(made / "whole-2" / "one") == quantized(made / "whole-1" / "one")
    assert any("embed_tokens" in name for name in quantized(made / "whole-2" / "one"))


@pytest.mark.slow
def test_blocks_are_those_of_one_rank(made):
    """Most codes are the same number: all but those next to the edge of two levels."""
    found, wanted = (load_file(made / name / "one" / OPTIMIZER) for name in ("whole-2", "whole-1"))
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in wanted.items()
    }
    for name in quantized(made / "whole-1" / "one"):
        assert (found[name] == wanted[name]).float().mean() > 0.95, name
        scales = name.replace(".codes", ".scales")
        torch.testing.assert_close(found[scales], wanted[scales], rtol=2e-2, atol=1e-12)


@pytest.mark.slow
def test_resuming_on_as_many_ranks_changes_no_bit(cut, materials):
    out = resumed(materials, cut, "cut-2", "2-on-2", 2)

    for file in ("model/model.safetensors", OPTIMIZER, LEDGER):
        assert (out / file).read_bytes() == (cut / "whole-2" / "one" / file).read_bytes(), file


@pytest.mark.slow
def test_one_rank_resumes_from_what_two_have_saved(cut, materials):
    out = cut / "2-on-1" / "one"

    train(materials, copied(cut / "cut-2" / "one", out), {}, **SETTINGS)

    assert_as_one_rank(cut, out)


@pytest.mark.slow
def test_three_ranks_whose_shards_would_cut_blocks_keep_those_moments_in_fp32(cut, materials):
    assert_as_one_rank(cut, resumed(materials, cut, "cut-2", "2-on-3", 3))

    assert not any("embed_tokens" in name for name in quantized(cut / "2-on-3" / "one"))


@pytest.mark.slow
def test_two_ranks_resume_from_moments_that_three_kept_in_fp32(made, materials):
    on_ranks(made, "cut-3", 3, lambda: cut_off(materials, made / "cut-3" / "one", {}, **SETTINGS))

    assert_as_one_rank(made, resumed(materials, made, "cut-3", "3-on-2", 2))


@pytest.mark.parametrize(
    ("shape", "group"),
    [((512, 64), (4, 1)), ((100, 256), (1, 1)), ((100, 1024), (1, 4)), ((8192,), (256, 1)), ((64, 576), (4, 9))],
)
def test_scales_are_grouped_by_rows_that_are_whole_blocks(shape, group):
    rows, blocks = group_shape(shape)

    assert (rows, blocks) == group
    assert rows * torch.Size(shape[1:]).numel() == blocks * BLOCK


@pytest.mark.parametrize(("rows_per_rank", "expected"), [(512, True), (256, True), (171, False), (172, True)])
def test_moments_are_quantized_only_if_no_shard_ends_inside_of_a_block(rows_per_rank, expected):
    assert is_quantized((512, 64), rows_per_rank) is expected
