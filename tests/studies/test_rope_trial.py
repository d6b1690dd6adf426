"""`unspool rope --trial`: every candidate reads the same windows, and what is measured is kept and ranked with care."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import unspool
from factory import build_model, build_tokenizer, save_folder
from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.evals.backends.transformers import ModelBackend
from unspool.evals.heldout import heldout_documents
from unspool.models.load import load_model
from unspool.models.location import model_path
from unspool.models.rotary import apply_rope
from unspool.models.tokenizer import load_tokenizer
from unspool.rope.tables import RopeShape
from unspool.studies.rope_trial import training, trial
from unspool.studies.rope_trial.candidates import default_candidates, read_candidate
from unspool.studies.rope_trial.windows import draw_windows

MODEL = "asset:tiny-base"
METHODS = ("unchanged", "yarn", "abf:base=2e4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The shipped model and text."""
    methods = ("unchanged", "yarn", "abf:base=2000")
    return unspool.try_rope(MODEL, "512", methods, windows=3, device="cpu", out=tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A random model with a context of 64, whose forward pass takes milliseconds."""
    folder = save_folder(tmp_path_factory.mktemp("small") / "small", build_model(head_dim=16))
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> Path:
    """Six different documents, each long enough for two windows of 512 tokens of the shipped model."""
    text = heldout_documents(None, Path(), tokens=1)[0]
    path = tmp_path_factory.mktemp("books") / "books.jsonl"
    parts = [text[at * 5000 : (at + 1) * 5000] for at in range(6)]
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    return path


@pytest.fixture(scope="module")
def tried(small, books):
    def run(out: Path, methods=METHODS, *, model=None, **options):
        given = {"windows": 3, "device": "cpu", "text": books, "out": out, **options}
        return unspool.try_rope(model or small, 128, methods, **given)

    return run


@pytest.fixture(scope="module")
def expected(tried, tmp_path_factory):
    """The candidates of a trial that nothing disturbed."""
    return tried(tmp_path_factory.mktemp("expected")).to_dict()["candidates"]


def command(*options: object):
    return CliRunner().invoke(build_app(), ["rope", *map(str, options)])


# Measuring


def test_losses_are_those_of_the_plain_model_with_the_method(whole):
    path = Path(model_path(MODEL, Path()))
    windows = draw_windows(None, load_tokenizer(str(path)), length=512, count=3, seed=0)
    for label in ("yarn", "abf:base=2000"):
        model = load_model(str(path), device=torch.device("cpu"), dtype=torch.float32)
        apply_rope(model.eval(), read_candidate(label).method, 512)
        (one,) = (one for one in whole.ranked if one.label == label)
        for name, ids in zip(windows.names, windows.ids, strict=True):
            tokens = torch.from_numpy(ids.astype(np.int64))
            with torch.no_grad():
                logits = model(input_ids=tokens[None]).logits[0, :-1].double()
            losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
            assert one.losses[name] == pytest.approx((float(losses[:255].mean()), float(losses[255:].mean())), rel=1e-5)


def test_the_order_of_the_candidates_and_the_number_of_windows_do_not_matter(tried, expected, tmp_path):
    assert tried(tmp_path / "again", METHODS[::-1]).to_dict()["candidates"] == expected

    before = {one["candidate"]: one["losses"] for one in expected}
    for one in tried(tmp_path / "more", METHODS, windows=5).ranked:
        assert len(one.losses) == 5
        assert before[one.label] == {window: list(one.losses[window]) for window in before[one.label]}


def test_the_model_loses_beyond_its_context_and_methods_cost_within_it(whole, tmp_path):
    assert [one.label for one in whole.ranked] == ["yarn", "abf:base=2000", "unchanged"]
    assert min(one.inside for one in whole.ranked) == whole.ranked[-1].inside
    assert whole.ranked[0].inside_cost.mean > 0
    (row,) = (line for line in whole.save(tmp_path / "trial.md").read_text().splitlines() if "| **yarn** |" in line)
    assert f"| {whole.ranked[0].beyond:.3f} | best |" in row
    assert whole.lines == "context_length: 512\nrope: {method: yarn}"


@pytest.fixture
def calls(monkeypatch):
    """The windows that models read, and after how many of them Ctrl-C comes."""
    found: dict = {"windows": [], "stop_after": None}
    plain = ModelBackend.window_losses

    def losses(self, ids):
        if found["stop_after"] == len(found["windows"]):
            raise KeyboardInterrupt
        found["windows"].append(ids)
        return plain(self, ids)

    monkeypatch.setattr(ModelBackend, "window_losses", losses)
    return found


def test_an_interrupted_trial_continues_with_the_next_window(tried, calls, expected, tmp_path, capsys):
    calls["stop_after"] = 5
    with pytest.raises(KeyboardInterrupt):
        tried(tmp_path / "trial")
    assert "interrupted; 1 of 3 candidates are measured" in capsys.readouterr().err

    calls["stop_after"] = None
    assert tried(tmp_path / "trial").to_dict()["candidates"] == expected
    assert len(calls["windows"]) == 9  # 3 candidates, 3 windows each
    tried(tmp_path / "trial")
    assert len(calls["windows"]) == 9


def test_a_damaged_line_and_another_text_are_measured_again(tried, calls, expected, books, tmp_path):
    out = tmp_path / "trial"
    tried(out)
    (path,) = (out / "losses").glob("yarn-*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = json.dumps({**json.loads(lines[1]), "losses": [0.0, 0.0]}).encode() + b"\n"
    path.write_bytes(b"".join(lines))

    assert tried(out).to_dict()["candidates"] == expected
    assert len(calls["windows"]) == 9 + 2  # the damaged line and the one after it
    other = tmp_path / "other.txt"
    other.write_text("".join(books.read_text()[::-1]))
    assert not set(tried(out, text=other).ranked[0].losses) & set(expected[0]["losses"])
    assert len(calls["windows"]) == 9 + 2 + 9


def test_a_loss_that_is_not_finite_skips_the_candidate_and_keeps_the_others(tried, monkeypatch, tmp_path):
    plain = ModelBackend.window_losses

    def losses(self, ids):
        found = plain(self, ids)
        return np.where(np.arange(len(found)) == 100, np.nan, found) if self.rope.rope.method == "yarn" else found

    monkeypatch.setattr(ModelBackend, "window_losses", losses)
    found = tried(tmp_path)
    assert found.skipped == {"yarn": "its loss is not finite"}
    assert {one.label for one in found.ranked} == {"abf:base=20000", "unchanged"}
    assert "Skipped yarn: its loss is not finite" in found.table()


def test_settings_that_differ_late_in_a_long_label_have_their_own_losses(tried, tmp_path):
    methods = [unspool.LongRoPE(short_factor=[1.0] * 8, long_factor=[1.5] * 7 + [last]) for last in (2.0, 8.0)]
    first, second = tried(tmp_path, methods).ranked
    assert len(list((tmp_path / "losses").glob("longrope-*.jsonl"))) == 2
    assert first.losses != second.losses


# Windows


def test_windows_are_pieces_of_different_documents_that_do_not_overlap(books):
    tokenizer = load_tokenizer(model_path(MODEL, Path()))
    windows = draw_windows(str(books), tokenizer, length=512, count=4, seed=0)
    texts = [json.loads(line)["text"] for line in books.read_text().splitlines()]

    homes = [next(at for at, text in enumerate(texts) if tokenizer.decode(ids)[5:-5] in text) for ids in windows.ids]
    assert sorted(homes) == [0, 0, 1, 1]  # two windows each
    assert all(len(ids) == 512 for ids in windows.ids) and len(set(windows.names)) == 4
    other = draw_windows(str(books), tokenizer, length=512, count=4, seed=1)
    assert set(other.names) != set(windows.names)


# Candidates


@pytest.mark.parametrize("text", ["yarn", "abf:base=8e6", "harpe:low=1e6,high=5e6", "yarn:factor=8,beta_fast=16"])
def test_a_label_and_a_line_are_the_candidate_again(text):
    candidate = read_candidate(text)
    assert read_candidate(candidate.label).method == candidate.method
    line = candidate.line.removeprefix("rope: ")
    from unspool.cli.eval_options import read_rope

    assert read_rope(line) == candidate.method


def test_a_number_keeps_all_its_digits_and_a_list_its_commas():
    assert read_candidate("abf:base=1234567").label == "abf:base=1234567.0"
    scaled = read_candidate("yarn:attention_scale=[1.1, 1.2],factor=4")
    assert scaled.method.attention_scale == (1.1, 1.2) and scaled.method.factor == 4
    assert read_candidate(scaled.label).method == scaled.method


def test_the_default_bases_are_those_of_the_rules():
    rope = RopeShape(rotary_dim=128, num_kv_heads=8, base=5e5, original_len=8192, max_positions=8192)
    labels = [each.label for each in default_candidates(rope, 1 << 16)]
    # Twice the base of the NTK rule, about ProLong's 8e6; and the bound of Men et al.
    assert labels[:4] == ["unchanged", "ntk", "abf:base=8.27e6", "abf:base=2.1e6"]
    assert [label.partition(":")[0] for label in labels[4:]] == ["pi", "yarn", "llama3", "cope", "harpe"]


def test_methods_that_do_not_fit_the_model_are_skipped_with_a_reason(tried, tmp_path):
    model = save_folder(tmp_path / "mqa", build_model("llama-mqa", head_dim=16))
    build_tokenizer().save_pretrained(model)
    found = tried(tmp_path / "out", ("default", "longrope:short_factor=[1.0],long_factor=[2.0]"), model=model)

    assert found.skipped.pop("harpe") == "this model has a single KV head, so only one base"
    ((label, reason),) = found.skipped.items()
    assert label.startswith("longrope") and "this model rotates 8 pairs" in reason
    assert len(found.ranked) == 8


def test_a_model_that_cannot_stay_unchanged_is_skipped_by_the_backend(tried, tmp_path):
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = save_folder(tmp_path / "dynamic", build_model(head_dim=16, rope_parameters=scaled))
    build_tokenizer().save_pretrained(model)
    found = tried(tmp_path / "out", ["unchanged", "ntk"], model=model)
    assert "dynamic scaling depends on max_position_embeddings" in found.skipped["unchanged"]
    with pytest.raises(ConfigError, match="no candidate fits this model: unchanged: rope unchanged: this model's dyn"):
        tried(tmp_path / "out", ["unchanged"], model=model)


# Training


@pytest.fixture
def kept(monkeypatch):
    """Trained models are kept, so that a test can look at them."""
    monkeypatch.setattr(training.TrialTraining, "forget", lambda self, name: None)


@pytest.fixture
def trained(tried):
    settings = {"lr": 1e-3, "batch_tokens": 256}

    def run(out: Path, methods=METHODS[1:]):
        return tried(out, methods, windows=2, tokens=512, stage_settings=settings)

    return run


def test_candidates_train_on_the_same_rows_and_never_on_the_windows(trained, kept, books, tmp_path):
    found = trained(tmp_path / "out")

    stages = sorted((tmp_path / "out/training/run/stages").iterdir())
    rows = [[json.loads(line) for line in (stage / "ledger.jsonl").read_text().splitlines()] for stage in stages]
    assert len(rows) == 2 and rows[0] == rows[1] != []
    rest = [json.loads(line)["text"] for line in (tmp_path / "out/training/text.jsonl").read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in books.read_text().splitlines()]
    assert rest == texts[1:2]  # both windows are from the first document, and the second one is enough
    assert found.stage["lr"] == 1e-3 and found.num_documents == 1
    assert "(Student's t, n = 2 windows of 1 document, too few to cover other documents) hold" in found.table()


def test_the_intervals_know_the_books_of_the_windows(tried, monkeypatch, tmp_path):
    given: list[dict] = []
    plain = trial.rank
    monkeypatch.setattr(trial, "rank", lambda *measured, **more: given.append(more) or plain(*measured, **more))
    found = tried(tmp_path, windows=10)
    windows_of = Counter(given[-1]["documents"].values())
    assert list(windows_of.values()) == [2] * 5 and found.num_documents == 5
    assert given[-1]["documents"].keys() == found.ranked[0].losses.keys()
    note = "n = 10 windows of 5 documents; windows of one document are not counted as independent"
    assert note in found.table()


def test_a_trained_model_is_scored_deleted_and_not_trained_again(trained, tried, monkeypatch, tmp_path):
    first = trained(tmp_path / "out")
    untrained = tried(tmp_path / "out", METHODS[1:], windows=2)
    assert not list((tmp_path / "out/training/run/stages").iterdir())
    losses = {one.label: one.losses for one in untrained.ranked}
    for one in first.ranked:
        assert one.losses.keys() == losses[one.label].keys() and one.losses != losses[one.label]

    monkeypatch.setattr(training, "run", lambda *_, **__: pytest.fail("trained again"))
    assert trained(tmp_path / "out").to_dict() == first.to_dict()


def test_a_training_that_diverges_skips_the_candidate(trained, monkeypatch, tmp_path):
    plain = training.run

    def run(recipe, **options):
        if "yarn" in recipe.name:
            raise unspool.UnspoolError("stage yarn: step 3: the loss is nan (rows rows[1]); no weight changed.")
        return plain(recipe, **options)

    monkeypatch.setattr(training, "run", run)
    found = trained(tmp_path)
    assert found.skipped == {"yarn": "stage yarn: step 3: the loss is nan (rows rows[1])"}
    assert found.best == "abf:base=20000"


# The command

TRIAL = ("--trial", MODEL, "--context", "512", "--windows", "2", "--device", "cpu")


def test_the_command_prints_the_table_the_lines_and_json(books, tmp_path):
    given = (*TRIAL, "--candidate", "yarn", "--candidate", "abf:base=2e3", "--text", books, "--out", tmp_path / "out")
    done = command(*given)
    assert done.exit_code == 0, done.output
    for words in ("from 256 to 512, without training", "2 windows of 512 tokens", "best", "  rope: {method: yarn}"):
        assert words in done.stdout
    assert "\x1b" not in done.output
    found = json.loads(command(*given, "--json").stdout)
    assert found == json.loads((tmp_path / "out/trial.json").read_text())
    assert [one["candidate"] for one in found["candidates"]] == ["yarn", "abf:base=2000"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--candidate", "yarm"), "--candidate: RoPE method 'yarm' is not known. Did you mean 'yarn'?"),
        (("--candidate", "abf"), "--candidate 'abf': base: missing; write a number above 1."),
        (("--candidate", "abf:base=big"), "--candidate 'abf:base=big': base = big: must be a number above 1"),
        (("--candidate", "abf:bass=2"), "--candidate 'abf:bass=2': bass: unknown key; did you mean 'base'?"),
        (("--candidate", "abf:base"), "--candidate 'abf:base': write METHOD:KEY=VALUE,…"),
        (("--context", "256"), "--context 256: the model's context is 256 already; give a longer one."),
        (("--context", "long"), "--context long: write a size"),
        (("--windows", "1"), "--windows 1: write a whole number of at least 2"),
        (("--windows", "900"), "has only 500 windows of 512 tokens, and 900 are wanted; give --windows 500"),
        (("--context", "256K"), "the bundled held-out text has no windows of 256K tokens"),
        (("--text", "none.txt"), "path 'none.txt' does not exist"),
        (("--text", ""), "--text is empty; give a file, a folder or a pattern"),
        (("--set", "lr=1e-3"), "--set works only with --tokens"),
        (("--train-text", "x.txt"), "--train-text works only with --tokens"),
        (("--tokens", "128"), "--tokens 128 do not fill one row of 512"),
        (("--tokens", "2K", "--set", "lr=fast"), "--set: lr = fast: must be a number above 0"),
        (("--tokens", "2K", "--set", "lrr=1"), "--set: a stage has no key 'lrr'; did you mean 'lr'?"),
        (("--tokens", "2K", "--set", "rope=yarn"), "--set: the trial itself sets rope of the stage; remove it."),
        (("--tokens", "2K", "--set", "batch_tokens=700"), "batch_tokens must be a multiple of context_length"),
        (("--tokens", "2K", "--candidate", "self-extend:window=64,group=8"), "for evaluation without training"),
        (("--html", "x.html"), "--html writes the page of --model"),
        (("--model", MODEL), "give either --model MODEL for advice, or --trial MODEL"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(options, wanted, tmp_path):
    done = command(*TRIAL, "--out", tmp_path / "out", *options)
    assert done.exit_code == 2, done.output
    assert wanted in done.stderr and "Traceback" not in done.output
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "losses").mkdir()
    (tmp_path / "thesis.tex").write_text("years of work")
    done = command(*TRIAL, "--out", tmp_path)

    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.split())
    assert said == f"error: {tmp_path} exists and holds other files than a trial's; give a new folder as --out."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["losses", "thesis.tex"]


@pytest.mark.parametrize("present", [["losses"], ["training", "losses", ".DS_Store"], ["trial.json", "notes.txt"], []])
def test_a_trial_continues_in_its_folder(present, tried, tmp_path):
    for name in present:
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).write_text("{}")
    assert tried(tmp_path, METHODS[1:2], windows=2).folder == tmp_path


@pytest.mark.parametrize(
    ("wrong", "wanted"),
    [({"windows": 2.5}, "`windows=2.5`: write a whole number"), ({"seed": -1}, "`seed=-1`: write a whole number")],
)
def test_wrong_numbers_are_refused_in_python(wrong, wanted, tmp_path):
    with pytest.raises(ConfigError, match=wanted):
        unspool.try_rope(MODEL, "512", ["yarn"], **{"windows": 2, **wrong}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_single_candidate_needs_no_list(small, books, tmp_path):
    for given in ("yarn", unspool.YaRN()):
        found = unspool.try_rope(small, 128, given, text=books, windows=2, device="cpu", out=tmp_path / "out")
        assert [one.label for one in found.ranked] == ["yarn"]


def test_options_of_a_trial_are_refused_without_one():
    done = command("--model", MODEL, "--context", "512", "--candidate", "yarn")
    assert done.exit_code == 2
    assert "--candidate works only with --trial;" in done.stderr


def test_text_that_is_trained_on_is_not_scored(books, tmp_path):
    one = tmp_path / "one.jsonl"
    one.write_text(books.read_text().splitlines(keepends=True)[0])
    done = command(*TRIAL, "--tokens", "1K", "--text", one, "--out", tmp_path / "out")
    assert "every document" in done.stderr and "--train-text" in done.stderr
    done = command(*TRIAL, "--tokens", "1K", "--text", books, "--train-text", books, "--out", tmp_path / "out")
    assert "--train-text has a file of --text" in done.stderr
    assert trial.LOSSES not in [path.name for path in (tmp_path / "out").glob("*")]
