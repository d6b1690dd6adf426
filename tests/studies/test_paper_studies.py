"""The bundled studies of papers: their arms are the papers', and they run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.recipe.schema import Recipe
from unspool.rope.tables import RopeShape
from unspool.studies.load import load_study

K, B = 1 << 10, 1 << 30


def recipes_of(name: str) -> dict[str, Recipe]:
    return {run.arm: run.loaded.recipe for run in load_study(name).runs}


def test_the_utk_study_has_the_arms_of_tables_1_and_4_and_figures_5_and_6():
    recipes = recipes_of("utk-128k")
    rows = {arm: recipe.datasets["tangled"] for arm, recipe in recipes.items()}
    stages = {arm: recipe.stages[0] for arm, recipe in recipes.items()}

    # Table 1
    assert [arm for arm, stage in stages.items() if stage.rope.method == "unchanged"] == ["ct"]
    assert {stage.rope.base for arm, stage in stages.items() if arm != "ct"} == {5e6}
    assert not rows["ct"].strategies and not rows["abf"].strategies
    assert [arm for arm, stage in stages.items() if stage.attention == "intra_document"] == ["attn-mask"]
    upsample, replaced, cip = rows["upsampling"].upsample, rows["synthetic"].replace, rows["cip-2"].cip
    assert upsample and (upsample.above, upsample.times, upsample.keep) == (32 * K, 5, 1)
    assert replaced and (replaced.with_, replaced.share) == ("tasks", 0.3)
    assert recipes["synthetic"].sources["tasks"].kind == "synthetic"
    assert cip and (cip.pieces, cip.split) == (2, "random")
    # Table 4 and Figure 5
    found = {
        arm: (utk.probability, utk.preserve_order, utk.backtrace, utk.chunk or utk.hops)
        for arm, dataset in rows.items()
        if (utk := dataset.utk) and "192k" not in arm and "1b" not in arm
    }
    mixed = {2: 0.5, 3: 0.5}
    assert found == {
        "utk-80": (0.8, True, True, mixed),
        "utk-80-disrupted": (0.8, False, True, mixed),
        "utk-80-no-backtrace": (0.8, True, False, mixed),
        "utk-30": (0.3, True, True, mixed),
        "utk-30-disrupted": (0.3, False, True, mixed),
        "utk-30-no-backtrace": (0.3, True, False, mixed),
        "chunks-2": (0.8, True, True, {2: 1}),
        "chunks-3": (0.8, True, True, {3: 1}),
        "chunks-4": (0.8, True, True, {4: 1}),
        "chunks-1k": (0.8, True, True, K),
    }
    assert all(dataset.utk.mask == "paper" for dataset in rows.values() if dataset.utk)
    # Figure 6
    longer = stages["utk-192k"]
    assert (longer.context_length, longer.export_context_length, rows["utk-192k"].seq_len) == (
        192 * K,
        128 * K,
        192 * K,
    )
    assert {arm: stage.tokens for arm, stage in stages.items() if arm.endswith("-1b")} == dict.fromkeys(
        ["abf-1b", "utk-1b", "utk-192k-1b"], B
    )
    assert {stage.tokens for arm, stage in stages.items() if not arm.endswith("-1b")} == {20 * B}


def test_the_harpe_study_has_the_base_sets_baselines_and_the_missing_control():
    study = load_study("harpe-128k")
    stages = {run.arm: run.loaded.recipe.stages for run in study.runs}
    ropes = {arm: found[-1].rope for arm, found in stages.items()}

    assert {sum(stage.tokens for stage in found) for found in stages.values()} == {6 * B}, "equal tokens"
    assert [(stage.rope.base, stage.context_length) for stage in stages["abf-3"]] == [
        (1e6, 32 * K),
        (2e6, 64 * K),
        (5e6, 128 * K),
    ]
    assert ropes["abf-1"].base == 5e6 and (ropes["pi"].factor, ropes["yarn"].factor) == (32, 32)
    searched = {arm: rope.step for arm, rope in ropes.items() if getattr(rope, "bases", "") == "search"}
    assert searched == {f"search-{step}k": 1000 * step for step in (10, 20, 30, 40, 50)}
    llama_2 = RopeShape(rotary_dim=128, num_kv_heads=32, base=1e4, original_len=4096, max_positions=4096)
    up, down = (ropes[f"uniform-{order}"].head_bases(llama_2, 128 * K) for order in ("ascending", "descending"))
    assert up[0] == down[-1] == 1e6 and up[-1] == down[0] == 5e6
    assert ropes["printed"].head_bases(llama_2, 128 * K)[[0, -1]].tolist() == [1e6, 4.54e6]
    shared = ropes["shared"].resolve(llama_2, 128 * K).parameters
    assert shared["rope_theta"] == pytest.approx(ropes["printed"].head_bases(llama_2, 128 * K).mean())
    assert "shared" in study.against["printed"], "without it a gain of HARPE means nothing"


# From paper scale to the shipped model: lengths, batch, tokens and data; each arm keeps what makes it an arm.
TINY = [
    "model=asset:tiny-base",
    "device=cpu",
    "stages.0.context_length=2K",
    "stages.0.tokens=40K",
    "stages.0.batch_tokens=2K",
    "stages.0.activation_checkpointing=none",
    "evals=[{suite: niah, lengths: [256, 2K], samples: 2, value: words}]",
]


def run_arms(folder: Path, study: str, arms: list[str], *changes: str) -> dict:
    sets = [part for change in [*TINY, *changes] for part in ("--set", change)]
    only = [part for arm in arms for part in ("--only", arm)]
    done = CliRunner().invoke(build_app(), ["study", study, *only, *sets, "--out", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    for arm in arms:
        for stage in (folder / f"{arm}-s0" / "stages").iterdir():
            steps = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
            assert len([line for line in steps if "loss" in line]) >= 20, (arm, stage.name)
    assert (folder / "study.md").is_file()
    return json.loads(done.stdout)


@pytest.mark.slow
def test_two_arms_of_the_utk_study_run_on_the_shipped_model(tmp_path: Path):
    books = "{kind: jsonl, path: 'asset:demo/train.jsonl.zst', limit: 300K}"
    result = run_arms(
        tmp_path / "study",
        "utk-128k",
        ["abf", "utk-80"],
        f"sources={{web: {books}, tasks: {{kind: synthetic, tokens: 20K, length: [1K, 2K]}}}}",
        "datasets.tangled.from=web",
        "datasets.tangled.seq_len=2K",
        "stages.0.export_context_length=null",
    )
    assert {entry["arm"] for entry in result["ranking"][:2]} == {"abf", "utk-80"}
    counts = json.loads((tmp_path / "study/utk-80-s0/datasets/tangled/manifest.json").read_text())["counts"]
    assert counts["strategy"]["masks_differ"] > 0


@pytest.mark.slow
def test_two_arms_of_the_harpe_study_run_on_the_shipped_model(tmp_path: Path):
    result = run_arms(
        tmp_path / "study",
        "harpe-128k",
        ["abf-1", "uniform-descending"],
        "sources.slimpajama={kind: jsonl, path: 'asset:demo/train.jsonl.zst', limit: 300K}",
        "datasets={long: {from: slimpajama, seq_len: 2K}, long-32k: {from: slimpajama, seq_len: 2K}, "
        "long-64k: {from: slimpajama, seq_len: 2K}}",
    )
    assert {entry["arm"] for entry in result["ranking"][:2]} == {"abf-1", "uniform-descending"}
