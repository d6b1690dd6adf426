"""Ranks that disagree are refused before the first step: the rank and the difference are named, once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from factory import random_row, save_mini, save_rows

from .command_ranks import run_command

ULYSSES = [word for stage in range(3) for word in ("--set", f"stages.{stage}.parallel.ulysses=2")]


@pytest.fixture
def agreement() -> Any:
    from unspool.training.parallel import agreement

    return agreement


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return save_mini(tmp_path_factory.mktemp("mini"))


def job(recipe: Path, folder: Path, *other: str, before: Any = lambda rank: None) -> list[tuple[int, str]]:
    """Two ranks, of which the second has other settings."""
    words = ["train", str(recipe), "--set", "device=cpu", "--set", f"out={folder / 'out'}", *ULYSSES]
    return run_command(lambda rank: [*words, *(other if rank == 1 else ())], world_size=2, folder=folder, before=before)


def assert_refused(ended: list[tuple[int, str]], *words: str) -> None:
    output = "\n".join(text for _, text in ended)
    assert [code for code, _ in ended] == [2, 2], output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert errors[0].startswith("error: rank 1 disagrees with rank 0: ")
    assert all(word in errors[0] for word in words), errors[0]
    assert "Traceback" not in output
    assert "failed" not in output, "one sentence"


def test_a_rank_with_another_recipe_is_named_with_the_difference(recipe, tmp_path):
    ended = job(recipe, tmp_path, "--set", "stages.0.lr=2e-3")

    assert_refused(ended, "stages.0.lr is 0.002 there and 0.001 on rank 0")

    assert not (tmp_path / "out").exists(), "nothing was built"


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    ["seed=7", "sources.books.path=held-out.jsonl", "stages.1.max_grad_norm=0.5", "stages.2.micro_batch_tokens=256"],
)
def test_any_other_setting_is_noticed_too(recipe, tmp_path, setting):
    assert_refused(job(recipe, tmp_path, "--set", setting), setting.partition("=")[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"), [("_source_digest", "unspool source"), ("transformers", "transformers version is '0.1'")]
)
def test_a_rank_with_other_code_or_libraries_is_refused(recipe, tmp_path, agreement, name, words):
    def other(rank: int) -> None:
        if rank == 1:
            changed = type("Other", (), {"__version__": "0.1"}) if name == "transformers" else lambda: "other"
            setattr(agreement, name, changed)

    assert_refused(job(recipe, tmp_path, before=other), words)


@pytest.mark.slow
def test_a_rank_that_finds_other_data_under_the_same_name_is_refused(recipe, tmp_path, agreement):
    other = save_rows(tmp_path / "other", [random_row((128,), seed) for seed in range(4)])

    def change(rank: int) -> None:
        read = agreement.read_manifest
        if rank == 1:
            agreement.read_manifest = lambda folder: read(other if folder.name == "long" else folder)

    assert_refused(job(recipe, tmp_path, before=change), "dataset long is ")
    assert not list((tmp_path / "out" / "stages").glob("*")), "no step was taken"


def test_a_model_folder_is_compared_by_its_files(tmp_path, agreement):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(agreement.MAX_HASHED + 1))
    before = agreement.model_facts(str(folder))
    assert agreement.model_facts(str(folder)) == before

    (folder / "config.json").write_text('{"rope_theta": 1}')
    changed = agreement.model_facts(str(folder))

    assert {key for key in before if before[key] != changed[key]} == {"model file config.json"}
    (folder / "model.safetensors").write_bytes(bytes(agreement.MAX_HASHED + 2))
    assert agreement.model_facts(str(folder))["model file model.safetensors"] != before["model file model.safetensors"]


def test_ranks_that_agree_pass_and_only_differences_count(agreement):
    same = {"lr": 1e-3, "model": agreement.UNKNOWN, "extra": torch.float32}
    leaves = dict(agreement._leaves({"stages": [same], "out": None}))

    assert leaves["stages.0.lr"] == 1e-3
    assert agreement._difference([leaves, leaves | {"stages.0.model": "a1b2"}]) is None
    assert "rank 2 disagrees" in agreement._difference([leaves, leaves, leaves | {"out": "elsewhere"}])
