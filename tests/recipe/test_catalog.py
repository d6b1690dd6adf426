"""The bundled recipes are complete, valid, and agree with the papers."""

import pytest

from unspool.core.errors import ConfigError
from unspool.recipe.load import load_recipe
from unspool.recipe.paths import bundled_recipes, find_bundled
from unspool.recipe.schema import Recipe, dump_recipe
from unspool.training.schedule import learning_rate

NAMES = [
    "harpe-128k",
    "olmo3-64k",
    "prolong",
    "prolong-512k",
    "prolong-64k",
    "prolong-ablation",
    "prolong-released",
    "prolong-sft",
    "prolong-small",
    "prolong-tiny",
    "smollm2-32k",
    "tiny",
    "utk-128k",
]
K, M, B = 1 << 10, 1 << 20, 1 << 30


def load(name: str) -> Recipe:
    return load_recipe(name).recipe


def test_exactly_these_are_bundled_each_with_a_summary():
    assert list(bundled_recipes()) == NAMES
    assert all(len(recipe.summary) > 20 for recipe in bundled_recipes().values())


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_recipe_is_valid_and_named_after_its_file(name):
    assert load(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_recipe_is_the_same_after_writing_and_reading(name, tmp_path):
    recipe = load(name)
    path = tmp_path / "copy.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path).recipe == recipe


@pytest.mark.parametrize("name", NAMES)
def test_shares_of_a_mix_add_up_to_one(name):
    for stage in load(name).stages:
        assert sum(stage.mix.values()) == pytest.approx(1)


def test_prolong_follows_table_9():
    first, second, sft = stages = load("prolong").stages
    assert [load(f"prolong-{stage.name}").stages for stage in stages] == [[stage] for stage in stages]
    assert (first.context_length, first.rope.base, first.tokens, first.batch_tokens, first.lr) == (
        64 * K,
        8e6,
        20 * B,
        4 * M,
        1e-5,
    )
    assert (second.context_length, second.rope.base, second.tokens, second.batch_tokens) == (
        512 * K,
        1.28e8,
        20 * B,
        8 * M,
    )
    assert (sft.tokens, sft.batch_tokens, sft.lr, sft.warmup_ratio, sft.min_lr_ratio) == (B, 4 * M, 2e-5, 0.05, 0.1)
    assert all(stage.attention == "intra_document" for stage in (first, second, sft))
    assert first.mix == {"repos-64k": 0.3, "books-64k": 0.3, "textbooks-64k": 0.03, "short": 0.37}
    assert (second.init, second.optimizer_state, second.warmup_ratio, second.lr) == ("previous", "keep", 0.1, 1e-5)
    assert sft.optimizer_state == "reset", "the paper fine-tunes the finished model"
    assert [round(100 * share) for share in shares_of("prolong").values()] == [27, 27, 11, 11, 8, 8, 8]
    repos, books = (second.mix[f"{name}-512k"] + second.mix[f"{name}-64k"] for name in ("repos", "books"))
    assert (repos, books) == (pytest.approx(0.3), pytest.approx(0.3))


def shares_of(name: str, *overrides: str) -> dict[str, float]:
    """Of the short documents, by source, as parts of 1."""
    found = load_recipe(name, list(overrides)).recipe.datasets["short"].shares
    return {source: share / sum(found.values()) for source, share in found.items()}


def test_prolong_is_scored_as_in_the_paper():
    recipe = load("prolong")
    short, marked, helmet, ruler = recipe.evals
    assert (short.suite, short.after) == ("short", ["base", "512k", "sft"]), "before and after SFT (Table 26)"
    assert short.chosen == ["hellaswag:10", "mmlu:5", "arc_challenge:25", "winogrande:5", "gsm8k:5"]
    assert helmet.lengths == [32 * K, 64 * K, 128 * K] and len(helmet.tasks) == 12
    assert marked.lengths == [512 * K] and set(marked.average_of) == set(helmet.tasks)
    assert ruler.lengths[-1] == 128 * K
    assert marked.after == helmet.after == ruler.after == ["sft"]
    hours = [stage.reported and stage.reported.gpu_hours for stage in recipe.stages]
    assert hours == [2200, 12200, None]


def test_the_published_data_of_prolong_are_trained_on_as_the_released_scripts_do():
    recipe = load("prolong-released")
    assert {source.kind for source in recipe.sources.values()} == {"mds"}
    first, second, sft = recipe.stages
    assert [stage.steps for stage in recipe.stages] == [5000, 2500, 250]
    assert (first.lr, second.lr, sft.lr) == (1e-5, 5e-6, 2e-5)
    shares = {
        source: stage.mix[name] * share / sum(recipe.datasets[name].shares.values())
        for stage in (first, second)
        for name in stage.mix
        for source, share in recipe.datasets[name].shares.items()
    }
    folders = {recipe.sources[name].path.removeprefix("data/prolong-data-"): share for name, share in shares.items()}
    assert folders == pytest.approx(
        {f"64K/{name}": share for name, share in (REPOS_BOOKS | SHORT).items()}
        | {f"512K/{name}": share for name, share in (REPOS_BOOKS_512K | SHORT).items()}
    )


# Domains of the released scripts, train_64K.sh and train_512K.sh.
SHORT = {
    "fineweb-edu": 0.1,
    "fineweb-2023-50": 0.1,
    "stackexchange": 0.04,
    "dolmawiki": 0.04,
    "tuluv2": 0.03,
    "arxiv": 0.03,
    "openwebmath": 0.03,
    "textbooks": 0.03,
}
REPOS_BOOKS = {"thestackv1_concat_by_repo-65536": 0.3, "book-65536": 0.3}
REPOS_BOOKS_512K = {
    "thestackv1_concat_by_repo-524288": 0.15,
    "thestackv1_concat_by_repo-65536": 0.15,
    "book-524288": 0.05,
    "book-65536": 0.25,
}


def test_prolong_on_the_shipped_model_keeps_what_makes_it_prolong():
    paper, tiny = load("prolong"), load("prolong-tiny")
    own = {"context_length", "rope", "tokens", "batch_tokens", "lr", "activation_checkpointing", "reported"}
    assert [stage.model_dump(exclude=own) for stage in paper.stages] == [
        stage.model_dump(exclude=own) for stage in tiny.stages
    ]
    assert all(stage.steps >= 20 for stage in tiny.stages)
    for name, dataset in paper.datasets.items():
        assert tiny.datasets[name] == dataset.model_copy(update={"seq_len": tiny.datasets[name].seq_len})
    scored = {(entry.suite, tuple(entry.after)) for entry in paper.evals}
    assert scored == {(entry.suite, tuple(entry.after)) for entry in tiny.evals}


@pytest.mark.parametrize("name", ["prolong-64k", "prolong-512k"])
def test_shortmix_has_the_shares_of_the_paper_and_the_released_script_is_an_option(name):
    paper = shares_of(name)
    assert (paper["tulu"], paper["wiki"]) == (pytest.approx(0.11), pytest.approx(0.08))
    released = shares_of(name, "datasets.short.from=mix:shortmix-released")
    assert (released["tulu"], released["wiki"]) == (pytest.approx(0.03 / 0.37), pytest.approx(0.04 / 0.37))
    # Apart from these two the script and the table are the same, up to the table's rounding.
    others = set(paper) - {"tulu", "wiki"}
    assert {source: paper[source] for source in others} == pytest.approx(
        {source: released[source] for source in others}, abs=0.005
    )
    ablations = shares_of(name, "datasets.short.from=mix:shortmix-ablations")
    assert (ablations.pop("fineweb"), ablations.pop("fineweb-edu")) == (0.25, 0.25)
    assert set(ablations.values()) == {0.1} and len(ablations) == 5


def test_an_unknown_mix_and_a_mix_without_its_sources_are_refused():
    with pytest.raises(ConfigError, match="mix 'shortmx' is not known; did you mean 'shortmix'"):
        load_recipe("prolong-64k", ["datasets.short.from=mix:shortmx"])
    with pytest.raises(ConfigError, match="source 'fineweb-edu' is not known"):
        load_recipe("tiny", ["datasets.short.from=mix:shortmix"])


def test_prolong_reads_its_sources_as_what_they_are():
    first = load("prolong").sources
    assert (first["repos"].kind, first["textbooks"].kind, first["fineweb"].kind) == ("stack", "textbooks", "hf")


def test_utk_and_harpe_follow_their_papers():
    utk, harpe = load("utk-128k"), load("harpe-128k").stages[0]
    stage = utk.stages[0]
    assert stage.reported.gpu_hours == 15 * 128 and harpe.reported is None
    assert stage.warmup_ratio * stage.steps == 200
    assert utk.datasets["tangled"].utk is not None and utk.datasets["tangled"].utk.probability == 0.8
    assert (stage.rope.base, stage.attention) == (5e6, "full")
    assert (harpe.rope.low, harpe.rope.high, harpe.rope.order) == (1e6, 5e6, "descending")
    assert (harpe.tokens, harpe.lr) == (6 * B, 2e-5)


def test_olmo_3_follows_its_report_and_scripts():
    recipe = load("olmo3-64k")
    (stage,) = recipe.stages
    assert (stage.context_length, stage.batch_tokens, stage.steps) == (64 * K, 65536 * 64, 11_921)
    assert abs(stage.steps * stage.batch_tokens - 50e9) < stage.batch_tokens
    assert (stage.lr, stage.min_lr_ratio, stage.betas, stage.weight_decay) == (
        0.00020712352850360292,
        0,
        (0.9, 0.95),
        0.1,
    )
    assert int(stage.warmup_ratio * stage.steps) == 200
    middle = 200 + (stage.steps - 200) // 3
    down = [learning_rate(stage, step) / stage.lr for step in (200, middle, stage.steps)]
    assert down == pytest.approx([1, 2 / 3, 0], abs=1e-4), "a line, not a cosine"
    rope = stage.rope
    assert (rope.method, rope.factor, rope.beta_fast, rope.beta_slow) == ("yarn", 8, 32, 1)
    assert (stage.attention, stage.optimizer_state, stage.max_grad_norm) == ("intra_document", "keep", 1.0)
    assert stage.mix == {"long": 0.34, "short": 0.66}
    assert {dataset.packing for dataset in recipe.datasets.values()} == {"best_fit"}
    pdfs = recipe.sources["pdfs"]
    assert pdfs.gzip_ratio.middle == 0.6
    assert pdfs.aggregation.share == pytest.approx(8.02 / (8.02 + 8.93), abs=0.01)
    assert (pdfs.aggregation.section, pdfs.aggregation.questions) == ((4 * K, 64 * K), 5)


def test_olmo_3_in_its_larger_size_is_two_changes_away():
    changes = ["stages.0.tokens=95368M", "stages.0.batch_tokens=8M"]
    (stage,) = load_recipe("olmo3-64k", changes).recipe.stages
    assert stage.steps == 11_921 and abs(stage.steps * stage.batch_tokens - 100e9) < stage.batch_tokens


@pytest.mark.parametrize("name", ["smollm2-32k", "tiny"])
def test_the_two_arms_of_a_comparison_differ_in_their_rows_only(name):
    recipe = load(name)
    abf, utk = recipe.stages[:2]
    assert abf.init == utk.init == "base"
    same = {"name", "mix"}
    assert abf.model_dump(exclude=same) == utk.model_dump(exclude=same)
    assert any(recipe.datasets[rows].utk for rows in utk.mix)
    assert not any(recipe.datasets[rows].utk for rows in abf.mix)


def test_the_third_arm_of_the_demo_differs_in_its_positions_only():
    _, utk, both = load("tiny").stages
    same = {"name", "rope"}
    assert utk.model_dump(exclude=same) == both.model_dump(exclude=same)
    assert (utk.rope.method, both.rope.method) == ("abf", "harpe")


def test_smollm2_trains_on_whole_batches_of_held_apart_books():
    recipe = load("smollm2-32k")
    assert [stage.tokens % stage.batch_tokens for stage in recipe.stages] == [0, 0]
    assert [stage.steps for stage in recipe.stages] == [120, 120]
    trained_on = {source.path for source in recipe.sources.values()}
    assert trained_on.isdisjoint({entry.text for entry in recipe.evals if hasattr(entry, "text")})


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'prolong-64k'"):
        find_bundled("prolong64k")
