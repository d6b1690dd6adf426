"""The bundled studies of papers: their arms are the papers', and they run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.recipe.paths import bundled_studies
from unspool.recipe.schema import Recipe
from unspool.rope.tables import RopeShape
from unspool.studies.arm_scores import find_measures
from unspool.studies.load import load_study
from unspool.studies.paper_numbers import list_studies, read_paper
from unspool.studies.run import study_plan

K, M, B = 1 << 10, 1 << 20, 1 << 30


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


@pytest.mark.parametrize("name", list(bundled_studies()))
def test_a_bundled_study_loads_and_plans_and_measures_what_its_paper_prints(name):
    study = load_study(name)
    plan = study_plan(study, study.runs)

    assert plan["to_run"]["runs"] == len(study.runs) > 1
    merged = {run.name for run in study.runs if run.merge}
    assert all((entry["tokens"] > 0) == (entry["run"] not in merged) for entry in plan["runs"])
    if study.paper:
        assert study.paper.numbers and study.paper.source and study.paper.scale
        stages = {stage.name for run in study.runs for stage in run.loaded.recipe.stages}
        for one in (one for wanted in study.paper.columns.values() for one in wanted):
            name, _, stage = one.partition("@")
            assert stage in stages if name.startswith("short") else find_measures(one, study.measures), one


def test_the_papers_averages_are_those_of_the_numbers_written_down():
    """A second check of every typed number: rows of a table add up to the average that the paper prints."""
    checked = 0
    for name, paper in ((study["name"], read_paper(study)) for study in list_studies()):
        for arm, row in (paper.numbers | paper.others).items() if paper else ():
            cells = dict(zip(paper.columns, row, strict=True))
            if name == "utk-128k":  # of 13 tasks 8 are needles
                groups = [cells[f"{group} 128K"] for group in ("NIAH", "VT", "CWE+FWE", "QA")]
                average, parts = cells["128K"], [8 * [groups[0]], [groups[1]], 2 * [groups[2]], 2 * [groups[3]]]
                values = [value for part in parts for value in part]
            else:
                short = ("HellaSwag", "MMLU", "ARC-c", "WinoGrande", "GSM8K")
                is_short = "MMLU" in cells
                average = cells.get("Short avg." if is_short else "Avg.")
                values = [
                    value
                    for key, value in cells.items()
                    if (key in short if is_short else key not in ("Avg.", "Short avg."))
                ]
            if average is not None and None not in values:
                assert average == pytest.approx(sum(values) / len(values), abs=0.1), (name, arm)
                checked += 1
    assert checked == 51


def test_the_prolong_ablations_have_the_papers_setting():
    base = recipes_of("prolong-doc-masks")["masks"]
    long, sft = base.stages
    assert (base.model, long.tokens, long.context_length, long.batch_tokens) == (
        "meta-llama/Meta-Llama-3-8B",
        5 * B,
        64 * K,
        4 * M,
    )
    assert (sft.tokens, sft.lr, sft.min_lr_ratio, sft.warmup_ratio) == (B, 2e-5, 0.1, 0.05)
    assert base.datasets["short"].shares == {
        "fineweb-edu": 25, "fineweb": 25, "tulu": 10, "stackexchange": 10, "wiki": 10, "openwebmath": 10, "arxiv": 10
    }  # fmt: skip
    assert "textbooks" not in base.sources
    short, helmet = base.evals
    assert (short.suite, short.preset, short.after) == ("short", "prolong", ["64k"])
    assert (helmet.preset, helmet.lengths, helmet.after) == ("prolong", [32 * K, 64 * K], ["sft"])


def test_each_prolong_study_changes_what_its_table_changes():
    shares = {arm: recipe.stages[0].mix for arm, recipe in recipes_of("prolong-long-share").items()}
    for arm, mix in shares.items():
        assert 100 * (1 - mix.get("short", 0)) == pytest.approx(int(arm.removeprefix("long-")))
        assert mix.get("repos-64k") == mix.get("books-64k")
    sources = {arm: recipe.stages[0].mix for arm, recipe in recipes_of("prolong-long-sources").items()}
    assert {arm: set(mix) - {"short"} for arm, mix in sources.items()} == {
        "common-crawl": {"common-crawl-64k"},
        "books": {"books-64k"},
        "repos": {"repos-64k"},
        "books-repos": {"books-64k", "repos-64k"},
    }
    assert {mix["short"] for mix in sources.values()} == {0.4}
    short = {arm: list(recipe.datasets["short"].shares) for arm, recipe in recipes_of("prolong-short-sources").items()}
    assert {arm: names for arm, names in short.items() if arm != "shortmix"} == {
        name: [name] for name in ("slimpajama", "fineweb-edu", "dclm")
    }
    length = recipes_of("prolong-train-length")
    assert [stage.name for stage in length["none"].stages] == ["sft"]
    first = {arm: recipe.stages[0] for arm, recipe in length.items() if arm != "none"}
    assert {arm: (stage.context_length, stage.tokens) for arm, stage in first.items()} == {
        "more-64k": (64 * K, 4 * B),
        "more-512k": (512 * K, 4 * B),
    }
    bases = {
        name: [recipe.stages[0].rope.base for recipe in recipes_of(name).values()]
        for name in ("prolong-rope-64k", "prolong-rope-512k")
    }
    assert bases == {"prolong-rope-64k": [5e5, 4e6, 8e6], "prolong-rope-512k": [6.4e7, 1.28e8, 2.56e8]}
    masks = {
        arm: [stage.attention for stage in recipe.stages] for arm, recipe in recipes_of("prolong-doc-masks").items()
    }
    assert masks == {"no-masks": ["full", "intra_document"], "masks": ["intra_document"] * 2}
    starts = {arm: recipe.model for arm, recipe in recipes_of("prolong-init").items()}
    assert starts["instruct"] == f"{starts['base']}-Instruct"
    sets = {arm: list(recipe.datasets["chat"].shares) for arm, recipe in recipes_of("prolong-sft-sets").items()}
    assert sets == {name: [name] for name in ("ultrachat", "tulu", "sharegpt")}
    mixes = {
        arm: (recipe.stages[0].mix.get("long", 0), list(recipe.datasets["long"].shares))
        for arm, recipe in recipes_of("prolong-sft-mix").items()
    }
    by_8b = {f"synth-{percent}": (percent / 100, ["long"]) for percent in (0, 1, 3, 10, 50)}
    by_70b = {f"synth-{percent}-70b": (percent / 100, ["long-70b"]) for percent in (1, 3, 10, 50)}
    assert mixes == by_8b | by_70b


def test_the_list_shows_the_papers_numbers():
    listed = CliRunner().invoke(build_app(), ["study", "list"])
    assert listed.exit_code == 0
    _, _, table = listed.stdout.partition("ProLong, Table 20")
    assert "the paper's numbers in percent, at the paper's scale (Llama-3-8B, 5B tokens" in table
    rows = [line.split() for line in table.splitlines() if "masks" in line][:2]
    assert rows == [
        ["no-masks", "97.4", "53.6", "20.4", "76.6", "37.2", "36.3", "53.6", "64.9"],
        ["masks", "96.0", "54.9", "29.4", "73.9", "35.7", "37.9", "54.6", "65.5"],
    ]
    entries = json.loads(CliRunner().invoke(build_app(), ["study", "list", "--json"]).stdout)
    assert [entry["name"] for entry in entries] == list(bundled_studies())
    shown = CliRunner().invoke(build_app(), ["study", "show", "prolong-init"])
    assert shown.stdout == bundled_studies()["prolong-init"].path.read_text()


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


@pytest.mark.slow
def test_two_arms_of_a_prolong_study_run_on_the_shipped_model_with_the_papers_numbers(tmp_path: Path):
    text = "{kind: jsonl, path: 'asset:demo/train.jsonl.zst', limit: 300K}"
    chat = "{kind: chat, path: 'asset:demo/chat.jsonl.zst', template: 'asset:demo/chat.jinja'}"
    folder = tmp_path / "study"
    result = run_arms(
        folder,
        "prolong-doc-masks",
        ["masks", "no-masks"],
        f"sources={{books: {text}, ultrachat: {chat}}}",
        "datasets={books-64k: {from: books, seq_len: 2K, packing: single_doc}, "
        "short: {from: books, seq_len: 2K}, chat: {from: ultrachat, seq_len: 2K, packing: truncate}}",
        "stages.0.mix={books-64k: 0.6, short: 0.4}",
        "stages.0.rope={method: abf, base: 5e5}",
        "stages.1.context_length=2K",
        "stages.1.tokens=40K",
        "stages.1.batch_tokens=2K",
        "stages.1.activation_checkpointing=none",
        "evals=[{suite: helmet, preset: prolong, lengths: [2K], tasks: [json_kv, trec_coarse], samples: 2}]",
    )
    rows = {row["arm"]: row for row in result["paper"]["rows"]}
    assert rows["no-masks"]["paper"] == [97.4, 53.6, 20.4, 76.6, 37.2, 36.3, 53.6, 64.9]
    columns = [column["name"] for column in result["paper"]["columns"]]
    here = dict(zip(columns, rows["no-masks"]["here"], strict=True))
    scored = {table["measure"]: table["arms"]["no-masks"]["mean"] for table in result["measures"]}
    assert here["Recall"] == 100 * scored["helmet/json_kv/2K"] and here["Avg."] == 100 * scored["helmet/2K"]
    assert here["Short avg."] is None, "no short tasks were scored"
    assert "Beside ProLong, Table 20" in (folder / "study.md").read_text()
    assert "Beside ProLong, Table 20" in (folder / "report.html").read_text()
