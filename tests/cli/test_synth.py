"""`unspool synth` from a recipe to conversations that a stage can be trained on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from synthesis.toy import MOCK, read_conversations, write_documents, write_recipe
from unspool.cli.main import build_app
from unspool.core.artifacts import read_manifest
from unspool.data.corpus.store import open_corpus
from unspool.models.location import resolve_path
from unspool.models.tokenizer import load_tokenizer

FAULTS = {"garbage": 0.1, "empty": 0.05, "refers": 0.1, "unsupported": 0.1, "copy": 0.05, "error": 0.2}


def invoke(*args: str) -> Result:
    return CliRunner().invoke(build_app(), list(args))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A set of 60K tokens from 120 documents, by a generator with every fault."""
    folder = tmp_path_factory.mktemp("synth")
    write_documents(folder / "docs.jsonl", 120)
    recipe = write_recipe(folder, {"generator": {**MOCK, "faults": FAULTS}, "tokens": 60000, "per_document": 4})
    done = invoke("synth", str(recipe), "--json")
    assert done.exit_code == 0, done.output
    return folder, json.loads(done.stdout)["long"]


def test_shares_are_met_to_a_hundredth_and_so_are_the_tokens(made):
    _, result = made
    assert {kind: entry["share"] for kind, entry in result["kinds"].items()} == pytest.approx(
        {"qa": 0.4, "rag": 0.3, "summary": 0.3}, abs=0.01
    )
    assert result["tokens"] == pytest.approx(60000, rel=0.01)


def test_every_conversation_that_was_asked_for_is_accounted_for(made):
    folder, result = made
    assert result["asked"] == result["kept"] + result["rejected"] + result["failed"]
    for entry in result["kinds"].values():
        assert entry["asked"] == entry["kept"] + sum(entry["rejected"].values()) + sum(entry["failed"].values())
    refused = {reason for entry in result["kinds"].values() for reason in entry["rejected"]}
    assert {"unparsable", "refers", "unsupported", "near_copy"} <= refused
    assert result["requests"]["errors"]["http_500"] > 0
    assert result["failed"] == 0, "each is tried again"
    listed = [json.loads(line) for line in (folder / "run/synth/long/rejected.ndjson").read_text().splitlines()]
    assert len(listed) == result["rejected"]
    assert len(read_conversations(folder / "run/synth/long")) == result["kept"]


def test_all_wording_is_used_about_equally_often(made):
    _, result = made
    assert {kind: set(lists) for kind, lists in result["wording"].items()} == {
        "qa": {"instruction", "placement", "answer"},
        "rag": {"instruction", "placement", "passage", "answer"},
        "summary": {"instruction", "placement", "answer"},
    }
    for lists in result["wording"].values():
        for uses in lists.values():
            assert len(uses) >= 12
            assert min(uses) >= 1
            assert max(uses) - min(uses) <= 1


def test_conversations_say_what_they_are_made_of(made):
    folder, _ = made
    texts = [json.loads(line)["text"] for line in (folder / "docs.jsonl").read_text().splitlines()]
    by_id = {f"docs.jsonl:{number}": text for number, text in enumerate(texts, start=1)}
    records = read_conversations(folder / "run/synth/long")
    assert len({record["id"] for record in records}) == len(records)
    questions, reused = {}, 0
    for record in records:
        asked, answered = (message["content"] for message in record["messages"])
        about = record["provenance"]
        text = by_id[about["document"]]
        assert record["tokens"] <= 512
        assert about["requests"]
        spans = about["passages"] if record["kind"] == "rag" else [about["shown"]]
        assert all(text[start:stop] in asked for start, stop in spans)
        if record["kind"] == "summary":
            continue
        start, stop = about["part"]
        sentences = [one.strip() for one in text[start:stop].replace("\n", " ").split(".") if one.strip()]
        is_copy = "great ledger" in asked  # the first of those that are like each other
        assert is_copy or any(sentence in answered for sentence in sentences)
        assert text[start:stop] in asked
        if record["kind"] == "qa":
            questions[tuple(about["requests"])] = record
        else:
            assert len(spans) >= 2
            known = questions.get(tuple(about["requests"]))
            assert about["pair_reused"] == (known is not None)
            reused += known is not None
    assert reused > 0.8 * sum(record["kind"] == "rag" for record in records)


def test_a_second_run_asks_nothing_and_changes_nothing(made):
    folder, result = made
    before = (folder / "run/synth/long/manifest.json").stat().st_mtime_ns
    done = invoke("synth", str(folder / "recipe.yaml"), "--json")
    again = json.loads(done.stdout)["long"]
    assert (again["made"], again["tokens"]) == (False, result["tokens"])
    assert (folder / "run/synth/long/manifest.json").stat().st_mtime_ns == before


def test_other_wording_needs_no_new_reply(made):
    folder, result = made
    (folder / "own.yaml").write_text("qa: {answer: ['So it is written: {answer}']}\n")
    done = invoke(
        "synth", str(folder / "recipe.yaml"), "--json", "--set", f"synth.long.templates={folder / 'own.yaml'}"
    )
    again = json.loads(done.stdout)["long"]
    assert again["made"]
    # Lengths change with the wording, so the last few may be others.
    assert again["requests"]["sent"] <= 0.1 * result["requests"]["sent"]
    records = read_conversations(folder / "run/synth/long")
    answers = [record["messages"][1]["content"] for record in records if record["kind"] == "qa"]
    assert answers
    assert all(answer.startswith("So it is written: ") for answer in answers)


def test_a_stage_reads_it_and_is_trained_on_answers_only(made):
    folder, _ = made
    recipe = folder / "sft.yaml"
    synth_dir = folder / "run/synth/long"
    recipe.write_text(
        json.dumps(
            {
                "name": "sft",
                "model": {"size": "4M", "tokenizer": "asset:tiny-base", "context_length": 512},
                "out": str(folder / "sft"),
                "engine": {"workers": 1},
                "sources": {"made": {"kind": "chat", "path": str(synth_dir), "template": "plain.jinja"}},
                "datasets": {"made": {"from": "made", "seq_len": 512, "packing": "truncate"}},
                "stages": [],
            }
        )
    )
    done = invoke("pack", str(recipe), "--json")
    assert done.exit_code == 0, done.output
    records = read_conversations(synth_dir)
    corpus = open_corpus(folder / "sft/corpus/made")
    tokenizer = load_tokenizer(resolve_path("asset:tiny-base", Path()))
    assert len(corpus) == len(records)
    for number, record in enumerate(records):
        tokens, mask = corpus[number], corpus.loss_mask(number)
        assert mask is not None
        assert len(tokens) == record["tokens"], "what was counted is what is trained on"
        trained = tokenizer.decode(tokens[mask])
        assert trained == record["messages"][1]["content"] + tokenizer.eos_token
        assert np.flatnonzero(mask)[0] > len(tokens) / 2, "the document is only read"
    manifest = read_manifest(folder / "sft/datasets/made")
    assert manifest is not None
    assert manifest["counts"]["documents"] > 0


def test_the_estimate_asks_nothing_and_is_near(tmp_path):
    write_documents(tmp_path / "docs.jsonl", 40, sentences=(60, 90))
    generator = {"kind": "openai", "url": "http://127.0.0.1:9/v1", "model": "none", "price_in": 2, "price_out": 8}
    generator |= {"requests_per_minute": 30, "reply_tokens": 128}
    sizes = {"length": 2048, "chunk": 128, "min_tokens": 256, "summary_chunk": 256, "summary_group": 4, "ahead": 8}
    recipe = write_recipe(tmp_path, {"generator": generator, "tokens": 60000, "per_document": 2, **sizes})
    done = invoke("synth", str(recipe), "--estimate", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["long"]
    assert told["tokens"] == 60000
    assert told["cost"] == pytest.approx((2 * told["prompt_tokens"] + 8 * told["reply_tokens"]) / 1e6, abs=1e-4)
    assert told["seconds"] >= 2 * told["requests"]
    mocked = invoke("synth", str(recipe), "--json", "--set", "synth.long.generator={kind: mock, reply_tokens: 128}")
    result = json.loads(mocked.stdout)["long"]
    assert told["requests"] == pytest.approx(result["requests"]["sent"], rel=0.25)
    assert sum(told["examples"].values()) == pytest.approx(result["kept"], rel=0.25)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"from": "doc"}, "did you mean 'docs'?"),
        ({"chunk": 400}, "min_tokens (128) must be at least twice chunk (400)"),
        ({"shares": {"qa": 0}}, "at least one share must be above 0"),
        (
            {"generator": {"kind": "openai", "url": "http://me:secret@host/v1", "model": "m"}},
            "Put the key into the env",
        ),
        ({"generator": {"kind": "openai", "url": "localhost:8000", "model": "m"}}, "such as http://localhost:8000/v1"),
        ({"templates": "none.yaml"}, "cannot be read as YAML"),
        ({"min_tokens": "64K"}, "lower min_tokens"),
        ({"decontaminate": {"files": ["nowhere.jsonl"]}}, "does not exist"),
    ],
)
def test_what_cannot_work_is_told_in_a_sentence(change, said, tmp_path):
    write_documents(tmp_path / "docs.jsonl", 3)
    done = invoke("synth", str(write_recipe(tmp_path, change)))
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "run" / "synth").exists()


def test_a_recipe_without_sets_says_so():
    done = invoke("synth", "tiny")
    assert (done.exit_code, "no `synth`" in done.stderr) == (2, True)


def test_the_tables_are_for_people(made):
    folder, _ = made
    done = invoke("synth", str(folder / "recipe.yaml"), "--only", "long")
    assert done.exit_code == 0
    assert "summary" in done.stdout
    assert "read it as {kind: chat, path:" in done.stdout
