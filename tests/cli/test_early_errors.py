"""A fault that can be known before the work is reported before it: one sentence, exit code 2, and nothing was built."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from unspool.cli.main import build_app
from unspool.core.artifacts import seal
from unspool.models.location import ASSETS

from .test_faults import run, sentences

RECIPE = """\
name: early
model: model
device: cpu
engine: {workers: 1}
sources:
  books: {kind: text, path: book.txt}
  other: {kind: jsonl, path: other.jsonl}
datasets:
  long: {from: books, seq_len: 128}
  more: {from: other, seq_len: 128}
stages:
  - {name: first, context_length: 128, mix: {long: 1}, tokens: 256, batch_tokens: 256, lr: 1e-3}
  - name: second
    context_length: 512
    rope: {method: abf, base: 2e4}
    mix: {more: 1}
    tokens: 512
    batch_tokens: 512
    lr: 1e-3
evals:
  - {suite: niah, lengths: [256], samples: 2, value: words, text: book.txt}
synth:
  talks: {from: books, generator: {kind: mock}, min_tokens: 100, chunk: 50, length: 4K, chat_template: chat.jinja}
"""
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
STUDY = "name: s\nrecipe: recipe.yaml\nout: out\nseeds: [0, 1]\nbaseline: a\narms:\n  a:\n  b: {set: {%s}}\n"
TEXT = "The ship sailed on, and the sea was calm. " * 60
CONFIG, WEIGHTS, POSITIONS = "model/config.json", "model/model.safetensors", '"max_position_embeddings": 256'
LONGER = ["stages.1.tokens=1K", "stages.1.rope={method: unchanged}"]
PRINTED = "stages.1.rope={method: harpe, bases: printed}"
ABSENT = "synth.talks.generator={kind: transformers, model: ./nowhere}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "chat.jinja").write_text(CHAT)
    (tmp_path / "book.txt").write_text(TEXT)
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    draft = tmp_path / "model.partial"
    shutil.copytree(ASSETS / "tiny-base", draft)
    seal(draft, tmp_path / "model", kind="export", inputs={}, settings={}, counts={})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", None)
    return tmp_path


Plant = Callable[[Path], object]


def edit(name: str, old: str, new: str) -> Plant:
    def plant(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return plant


def cut(name: str) -> Plant:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:5000])


def without_manifest(then: Plant) -> Plant:
    return lambda folder: ((folder / "model" / "manifest.json").unlink(), then(folder))


def flip(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def nothing(folder: Path) -> None: ...


# What is wrong: how it is planted, what is set in the recipe, and a part of the sentence.
FAULTS: dict[str, tuple[Plant, list[str], str]] = {
    "config of another size": (edit(CONFIG, POSITIONS, POSITIONS + "00"), [], "config.json is missing or has another"),
    "config of the same size": (edit(CONFIG, POSITIONS, POSITIONS[:-3] + "512"), [], "config.json has changed since"),
    "no stages, config of the same size": (
        edit(CONFIG, POSITIONS, POSITIONS[:-3] + "512"),
        ["stages=[]", "datasets={}", "sources={}", "synth={}"],
        "config.json has changed since it was written",
    ),
    "a flipped bit": (flip, [], "model.safetensors has changed since it was written"),
    "cut weights": (without_manifest(cut(WEIGHTS)), [], "model.safetensors is damaged"),
    "no weights": (without_manifest(lambda folder: (folder / WEIGHTS).unlink()), [], "holds neither"),
    "adapter": (lambda folder: (folder / "model/adapter_config.json").write_text("{}"), [], "it is an adapter"),
    "more layers than the model has": (
        nothing,
        ["stages.1.activation_checkpointing=keep-attention", "stages.1.keep_products=99"],
        "stage second: keep_products=99 is more layers than the model has; use at most 4",
    ),
    "no such parameter": (nothing, ["stages.1.lr_overrides={q_prj: 0}"], "stage second: lr_overrides has 'q_prj'"),
    "all parameters frozen": (nothing, ["stages.1.lr_overrides={model: 0}"], "sets every parameter to 0"),
    "a factor that is too small": (
        nothing,
        ["stages.1.rope={method: yarn, factor: 1.5}"],
        "stage second: rope yarn: factor 1.5",
    ),
    "factors for another model": (
        nothing,
        ["stages.1.rope={method: longrope, short_factor: [1.0], long_factor: [2.0]}"],
        "stage second: rope longrope: short_factor holds 1 numbers",
    ),
    "one base after a base per head": (
        nothing,
        ["stages.0.rope={method: harpe, low: 1e4, high: 1e5}"],
        "stage second: rope abf: this model already has a base per head",
    ),
    "unchanged after a scaling": (
        nothing,
        ["stages.0.rope={method: yarn, factor: 2}", "stages.1.context_length=1K", "stages.1.batch_tokens=1K", *LONGER],
        "stage second: rope unchanged: this model's yarn scaling depends on max_position_embeddings",
    ),
    "a new model that does not fit": (
        nothing,
        ["model={size: 4M, tokenizer: model, context_length: 128}", "evals=[]", PRINTED],
        "stage second: rope harpe: bases printed is the paper's list for 32 KV heads",
    ),
    "a folder without files": (lambda folder: (folder / "empty").mkdir(), ["sources.other.path=empty"], "holds no"),
    "an empty file": (
        lambda folder: (folder / "other.jsonl").write_text(""),
        [],
        "corpus other: no document contains text",
    ),
    "another field": (nothing, ["sources.other.text=body"], "no field 'body'; it has 'text'"),
    "many broken lines": (
        lambda folder: (folder / "other.jsonl").write_text("{\n" * 2000 + '{"text": "a"}\n'),
        [],
        "corpus other: 1,000 of the first 1,000 records cannot be read",
    ),
    "another format": (nothing, ["sources.other.kind=parquet"], "cannot be read as Parquet"),
    "no chat template": (nothing, ["sources.other.kind=chat"], "source other: tokenizer 'model' has no chat template"),
    "a broken chat template": (
        edit("chat.jinja", "endfor", "endfr"),
        ["sources.other.kind=chat", "sources.other.template=chat.jinja", "synth={}"],
        "sources.other.template: not a Jinja template",
    ),
    "no embedding model": (
        nothing,
        ["datasets.more.nextlong={retriever: embeddings, chunk: 32, model: ./nowhere}"],
        "datasets.more.nextlong.model = ./nowhere: no such file or folder",
    ),
    "a damaged scorer": (
        lambda folder: (shutil.copytree(folder / "model", folder / "scorer"), cut("scorer/model.safetensors")(folder)),
        ["datasets.more.score={model: scorer, long: 128, short: 32, keep: 0.5}"],
        "model.safetensors is damaged",
    ),
    "no generator": (
        nothing,
        ["sources.other={kind: chat, path: 'synth:talks', template: chat.jinja}", ABSENT],
        "synth.talks.generator: model nowhere: not a folder here",
    ),
}
BUILT = ("corpus", "datasets", "document_scores", "stages", "scores", "synth", "shared")


def check_nothing_built(out: Path) -> None:
    assert [kind for kind in BUILT if (out / kind).exists()] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_recipe_is_reported_before_anything_is_built(fault, folder, capsys):
    plant, changes, wanted = FAULTS[fault]
    plant(folder)
    options = [part for change in ["out=out", *changes] for part in ("--set", change)]
    assert run("run", "recipe.yaml", *options) == 2
    (line,) = sentences(capsys)
    assert wanted in line
    check_nothing_built(folder / "out")


def test_without_a_fault_the_data_are_packed_and_the_checks_pass(folder, capsys):
    assert run("train", "recipe.yaml", "--set", "out=out") == 0, sentences(capsys)
    assert sorted(path.name for path in (folder / "out" / "stages").iterdir()) == ["first", "second"]


@pytest.mark.parametrize("harmless", ["stages.1.rope={method: harpe, low: 1e4, high: 1e5}", "sources.other.max_bad=1"])
def test_settings_that_fit_are_not_refused(harmless, folder, capsys):
    """`max_bad` 1 allows any share of bad records, as long as there is a document."""
    (folder / "other.jsonl").write_text("{\n" * 20 + json.dumps({"text": TEXT}) + "\n")
    changes = ["--set", "out=out", "--set", "sources.other.max_bad=1", "--set", harmless]
    assert run("train", "recipe.yaml", *changes) == 0, sentences(capsys)


def test_a_finished_corpus_needs_no_second_look_at_its_source(folder, capsys, monkeypatch):
    assert run("tokenize", "recipe.yaml", "--set", "out=out") == 0
    capsys.readouterr()

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the source is read again")

    monkeypatch.setattr("unspool.recipe.prepare.check_source", refuse)
    assert run("tokenize", "recipe.yaml", "--set", "out=out") == 0


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"stages.1.rope": "{method: yarn, factor: 1.5}"}, "arm b: stage second: rope yarn: factor 1.5"),
        ({"sources.other.text": "body"}, "arm b: corpus other: no document contains text"),
        ({"evals.0.lengths": "[16]"}, "arm b: niah"),
    ],
)
def test_a_fault_of_a_later_arm_is_reported_before_the_first_arm_runs(changes, wanted, folder, capsys):
    values = ", ".join(f"{key}: {value}" for key, value in changes.items())
    (folder / "study.yaml").write_text(STUDY % values + "compare: [niah/256]\n")
    assert run("study", "study.yaml") == 2
    (line,) = sentences(capsys)
    assert wanted in line
    check_nothing_built(folder / "out")


COMMANDS = {
    "eval": ["eval", "model", "--suite", "ruler", "--lengths", "1K", "--samples", "1", "--out", "out/scores"],
    "effective length": ["eval", "model", "--budget", "5s", "--out", "out/scores"],
    "rope trial": ["rope", "--trial", "model", "--context", "1K", "--windows", "2", "--out", "out/scores"],
    "verify": ["verify", "--model", "gemma2", "--model", "model", "--only", "packing"],
    "merge": ["merge", "model", "model", "--out", "out/scores"],
    "export": ["export", "model", "out/scores"],
    "judge": ["judge", "--check", "graded.jsonl", "--model", "model"],
    "generate": ["generate", "model", "--prompt-file", "book.txt", "--beyond-context", "ask"],
    "inspect attention": ["inspect", "attention", "model", "--text", "book.txt", "--beyond", "32"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_changed_model_folder_is_refused_by_every_command_that_reads_its_weights(command, folder, capsys):
    edit(CONFIG, POSITIONS, POSITIONS[:-3] + "512")(folder)
    (folder / "graded.jsonl").write_text('{"question": "q", "references": ["a"], "output": "a", "label": 3}\n')
    assert run(*COMMANDS[command]) == 2
    (line,) = sentences(capsys)
    assert "config.json has changed since it was written" in line
    check_nothing_built(folder / "out")


def test_a_page_that_cannot_be_written_is_refused_before_the_work(folder, capsys):
    for command in (COMMANDS["eval"], COMMANDS["inspect attention"]):
        assert run(*command, "--html", "book.txt/page.html") == 2
        (line,) = sentences(capsys)
        assert "book.txt is a file, not a folder" in line
        check_nothing_built(folder / "out")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            "synth.talks.generator={kind: openai, url: 'http://127.0.0.1:9/v1', model: m}",
            "no server listens at http://",
        ),
        ("synth.talks.judge={kind: transformers, model: ./nowhere}", "synth.talks.judge: model nowhere: not a folder"),
        ("evals.0={suite: perplexity, length: 64K, samples: 2, text: book.txt}", "no document of the held-out text"),
    ],
)
def test_synthesis_that_cannot_end_is_refused_before_documents_are_tokenized(change, wanted, folder, capsys):
    assert run("synth", "recipe.yaml", "--set", "out=out", "--set", change) == 2
    (line,) = sentences(capsys)
    assert wanted in line
    check_nothing_built(folder / "out")


def test_an_absent_server_does_not_stop_an_estimate(folder, capsys):
    server = "synth.talks.generator={kind: openai, url: 'http://127.0.0.1:9/v1', model: m}"
    with pytest.raises(SystemExit) as stop:
        build_app()(["synth", "recipe.yaml", "--estimate", "--set", "out=out", "--set", server])
    assert not stop.value.code, sentences(capsys)
