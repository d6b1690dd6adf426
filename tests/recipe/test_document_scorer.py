"""`score` from recipe to rows, with the shipped model as the scorer, and what it refuses."""

import io
import json
import math
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
import zstandard
from typer.testing import CliRunner

import unspool
from unspool.cli.main import build_app
from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError, DataError
from unspool.data.corpus.store import open_corpus
from unspool.data.document_scores import read_scores
from unspool.recipe.document_scorer import ModelScorer
from unspool.recipe.load import load_recipe
from unspool.studies.shared_work import dataset_key, shared_folders

SCORE = {"method": "long_context_gain", "model": "asset:tiny-base", "long": 256, "short": 64, "keep": 0.5}


def texts() -> list[str]:
    """Eight pieces of a book, longer than the short context, and four short ones."""
    book = files("unspool") / "assets/demo/heldout.jsonl.zst"
    with book.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as lines:
        text = json.loads(io.TextIOWrapper(lines, encoding="utf-8").readline())["text"]
    return [*(text[start : start + 650] for start in range(0, 8000, 1000)), *(text[at : at + 80] for at in range(4))]


def plain_gain(model, ids: list[int], short: int) -> float:
    """The definition, with a forward pass of the model for every token's own short context."""

    def losses(begin: int, end: int) -> list[float]:
        with torch.inference_mode():
            scores = model(torch.tensor([ids[begin:end]])).logits[0, :-1].double().log_softmax(-1)
        return [-float(scores[at, ids[begin + at + 1]]) for at in range(end - begin - 1)]

    total, with_long = 0.0, losses(0, len(ids))
    for at in range(short, len(ids)):
        stop = min(at - (at - short) % (short // 4) + short // 4, len(ids))
        with_short = losses(stop - short - 1, at + 1)[-1]
        total += math.exp(-with_long[at - 1]) * (with_short - with_long[at - 1])
    return total / (len(ids) - 1)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    lines = [json.dumps({"text": text}) for text in texts()]
    (folder / "books.jsonl").write_text("\n".join(lines), encoding="utf-8")
    plain = {
        "name": "score",
        "model": "asset:tiny-base",
        "out": str(folder / "out"),
        "device": "cpu",
        "sources": {"books": {"kind": "jsonl", "path": "books.jsonl"}},
        "datasets": {
            "top": {"from": "books", "seq_len": 128, "score": SCORE},
            "weighted": {"from": "books", "seq_len": 128, "score": SCORE | {"use": "weight"}},
            "all": {"from": "books", "seq_len": 128},
        },
        "stages": [
            {"name": "a", "context_length": 256, "mix": {"top": 1}, "tokens": 1024, "batch_tokens": 512, "lr": 1e-4}
        ],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    return folder / "recipe.yaml"


def command(*args: object):
    return CliRunner().invoke(build_app(), [*map(str, args)])


@pytest.fixture(scope="module")
def out(recipe) -> Path:
    done = command("pack", recipe)
    assert done.exit_code == 0, done.output
    return recipe.parent / "out"


def test_pack_scores_each_source_once_and_chooses_the_best_documents(out):
    scores = read_scores(out / "document_scores/books")
    assert (scores.gains == 0).tolist() == (scores.lens <= 64).tolist() == [False] * 8 + [True] * 4

    counts = {name: read_manifest(out / "datasets" / name)["counts"] for name in ("top", "weighted", "all")}
    about = counts["top"]["sources"]["books"]["score"]
    assert (about["documents"], about["documents_up_to_short"]) == (12, 4)
    assert about["mean_gain_used"] > about["mean_gain"] > 0
    assert about["documents_used"] < 8
    assert counts["weighted"]["sources"]["books"]["score"]["documents_used"] <= 8
    assert counts["top"]["dropped"]["low_gain"] > 0 and "low_gain" not in counts["all"]["dropped"]


def test_gains_equal_the_definition_computed_token_by_token(out):
    model, _ = unspool.load("asset:tiny-base", device="cpu")
    ids = open_corpus(out / "corpus/books")[0].tolist()
    found = float(read_scores(out / "document_scores/books").gains[0])
    assert 64 < len(ids) <= 256 and abs(found) > 1e-4
    assert found == pytest.approx(plain_gain(model, ids, 64), abs=1e-6)


def test_a_second_pack_does_not_load_the_model(out, recipe, monkeypatch):
    before = (out / "document_scores/books/scores-00000.arrow").stat().st_mtime_ns
    monkeypatch.setattr(ModelScorer, "losses", None)
    assert command("pack", recipe).exit_code == 0
    assert (out / "document_scores/books/scores-00000.arrow").stat().st_mtime_ns == before


def test_inspect_shows_a_histogram_and_the_best_and_worst_documents(out):
    shown = command("inspect", out / "document_scores/books", "--count", 2)
    assert shown.exit_code == 0, shown.output
    assert "12 scored documents" in shown.stdout and "4 documents of at most 64 tokens" in shown.stdout
    assert shown.stdout.count("\ngain ") == 8 + 1 and "█" in shown.stdout  # and the line of gain 0
    gains = read_scores(out / "document_scores/books").gains
    values = json.loads(command("inspect", out / "document_scores/books", "--count", 2, "--json").stdout)
    assert [item["index"] for item in values["items"]] == [int(gains.argmax()), int(gains[:8].argmin())]
    assert values["items"][0]["facts"][0] == f"gain {gains.max():.4f}, rank 1 of 12"
    assert "document_scores/books" in command("inspect", out).stdout


def test_python_scores_texts_as_a_recipe_does(out):
    gains = unspool.long_context_gains(texts(), "asset:tiny-base", long=256, short=64, device="cpu")
    assert gains.tolist() == read_scores(out / "document_scores/books").gains.tolist()
    best = [texts()[at] for at in np.argsort(-gains)[:4]]
    _, tokenizer = unspool.load("asset:tiny-base")
    assert len(unspool.pack(best, tokenizer, seq_len=64)) > 4


@pytest.mark.parametrize("use", ["top", "weight"])
def test_python_packs_the_rows_of_a_recipe_with_the_same_settings(recipe, tmp_path, use):
    plain = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    plain |= {"sources": {"data": plain["sources"]["books"]}, "out": str(tmp_path / "out"), "device": "auto"}
    plain["datasets"] = {"rows": {"from": "data", "seq_len": 128, "score": SCORE | {"use": use}}}
    plain["stages"][0]["mix"] = {"rows": 1}
    (recipe.parent / f"{use}.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    done = command("pack", recipe.parent / f"{use}.yaml")
    assert done.exit_code == 0, done.output
    wanted = unspool.PackedDataset(tmp_path / "out/datasets/rows")

    _, tokenizer = unspool.load("asset:tiny-base", device="cpu")
    score = unspool.LongContextGain.model_validate(SCORE | {"use": use})
    found = unspool.pack(texts(), tokenizer, seq_len=128, strategy=score, out=tmp_path / "rows")

    assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() for row in wanted]
    assert [row.doc_lens.tolist() for row in found] == [row.doc_lens.tolist() for row in wanted]
    assert found.stats() == wanted.stats() and 0 < found.stats()["sources"]["data"]["score"]["documents_used"] < 8
    assert len(unspool.pack(texts(), tokenizer, seq_len=128)) > len(found)


def test_python_scores_only_the_sources_that_are_named(tmp_path):
    _, tokenizer = unspool.load("asset:tiny-base", device="cpu")
    score = unspool.LongContextGain.model_validate(SCORE | {"sources": ("scores",)})
    parts = {"corpus": texts(), "scores": texts()[::-1]}  # names of folders that packing uses itself
    rows = unspool.pack(parts, tokenizer, seq_len=128, shares={"corpus": 0.5, "scores": 0.5}, strategy=score)

    assert {name: "score" in about for name, about in rows.stats()["sources"].items()} == {
        "corpus": False,
        "scores": True,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, r"pack: score\.model is missing; name the model that scores: LongContextGain\(model=…\)\."),
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"long": 512}, r"pack: score\.long is 512, but asset:tiny-base reads at most 256"),
        ({"short": 129}, r"pack: score\.long 256 is less than twice score\.short 129"),
        ({"sources": ("books",)}, r"pack: score\.sources names 'books', which the dataset does not read"),
    ],
)
def test_python_refuses_scores_that_do_not_fit_before_it_reads_a_text(tmp_path, change, message):
    _, tokenizer = unspool.load("asset:tiny-base", device="cpu")
    score = unspool.LongContextGain.model_validate(SCORE | change)
    unread = iter(texts())
    with pytest.raises(ConfigError, match=message):
        unspool.pack(unread, tokenizer, seq_len=128, strategy=score, out=tmp_path / "rows")
    assert next(unread) == texts()[0] and not (tmp_path / "rows").exists()


def test_python_refuses_what_it_cannot_score():
    with pytest.raises(ConfigError, match=r"score\.long 64 is less than twice score.short 64"):
        unspool.long_context_gains(["a"], "asset:tiny-base", long=64, short=64)
    with pytest.raises(ConfigError, match=r"long_context_gains: long .*"):
        unspool.long_context_gains(["a"], "asset:tiny-base", long="many", short=64)
    with pytest.raises(DataError, match="1 texts are empty"):
        unspool.long_context_gains(["a", ""], "asset:tiny-base", long=128, short=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("datasets.top.score.long=512", "datasets.top.score.long is 512, but asset:tiny-base reads at most 256"),
        ("datasets.top.score.short=129", "score.long 256 is less than twice"),
        ("datasets.weighted.score.short=32", "datasets.top scores source 'books' with other settings"),
        ("datasets.top.score.model=no/such/folder", "no/such/folder"),
        ("datasets.top.score.keep=2", "above 0 and of at most 1"),
    ],
)
def test_mistakes_end_with_a_message_before_any_work(recipe, tmp_path, change, message):
    sets = ["--set", change, "--set", f"out={tmp_path / 'out'}"]
    if change.startswith("datasets.top.score.s"):
        sets += ["--set", "datasets.weighted.score.short=129"]
    elif "long" in change or "model" in change:
        sets += ["--set", change.replace("top", "weighted")]
    done = command("pack", recipe, *sets)
    assert (done.exit_code, "Traceback" in done.output) == (2, False), done.output
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_a_model_with_another_vocabulary_is_refused(recipe, tmp_path):
    source = Path(unspool.__file__).parent / "assets/tiny-base"
    other = tmp_path / "other"
    other.mkdir()
    for file in source.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokens = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokens["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    with pytest.raises(ConfigError, match="has another vocabulary than the text's tokenizer"):
        unspool.long_context_gains(
            ["a"], str(other), long=256, short=64, tokenizer=unspool.load("asset:tiny-base")[1], device="cpu"
        )


def test_arms_of_a_study_share_scores_and_keys_without_score_stay(recipe):
    loaded, other = load_recipe(recipe), load_recipe(recipe, ["datasets.top.score.keep=0.2"])
    assert shared_folders(loaded)["document_scores/books"] == shared_folders(other)["document_scores/books"]
    assert dataset_key(loaded, "top") != dataset_key(other, "top")
    assert dataset_key(loaded, "all") == dataset_key(other, "all")
    longer = load_recipe(recipe, ["datasets.top.score.short=32", "datasets.weighted.score.short=32"])
    assert shared_folders(loaded)["document_scores/books"] != shared_folders(longer)["document_scores/books"]


def test_without_a_model_the_recipes_model_scores(recipe, tmp_path):
    def load(model: str):
        data = yaml.safe_load(recipe.read_text(encoding="utf-8")) | {"model": model}
        for name in ("top", "weighted"):
            data["datasets"][name]["score"].pop("model")
        file = recipe.parent / "without.yaml"
        file.write_text(yaml.safe_dump(data), encoding="utf-8")
        return load_recipe(file)

    named, default, other = load_recipe(recipe), load("asset:tiny-base"), load("org/other")
    folder = "document_scores/books"
    assert shared_folders(default)[folder] == shared_folders(named)[folder]
    assert shared_folders(other)[folder] != shared_folders(default)[folder]
    assert dataset_key(other, "top") != dataset_key(default, "top")


def test_a_new_model_cannot_score(recipe):
    new = {"size": "10M", "tokenizer": "asset:tiny-base", "context_length": 256}
    changes = {"model": new, "datasets.top.score": {"long": 256, "short": 64}, "datasets.weighted.score": None}
    with pytest.raises(ConfigError, match=r"score\.model: missing; the recipe's model is new"):
        load_recipe(recipe, changes)
