"""`unspool inspect` from the command line: what it prints, what it writes, and one sentence for every mistake."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import zstandard
from typer.testing import CliRunner

from unspool.cli.main import build_app

# tests/inspect has no __init__.py, because a package of that name would hide Python's own `inspect`.
sys.path.insert(0, str(Path(__file__).parents[1] / "inspection"))

from inspection_factory import save_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "small")


def look(*args: object) -> str:
    done = CliRunner().invoke(build_app(), ["inspect", *map(str, args)])
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*args: object) -> str:
    done = CliRunner().invoke(build_app(), ["inspect", *map(str, args)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_run_lists_what_it_holds_and_the_commands_work(run_dir):
    shown = look(run_dir)
    assert "3 documents" in shown
    commands = [line.split()[2] for line in shown.splitlines() if line.startswith("  unspool inspect ")]
    assert [Path(path).name for path in commands] == ["books", "short", "tangled"]
    for path in commands:
        assert look(path, "--count", 1)


def test_a_run_is_listed_by_source_and_as_json(run_dir):
    entries = json.loads(look(run_dir, "--json", "--source", "books"))
    assert [(entry["kind"], entry["count"]) for entry in entries] == [
        ("corpus", 3),
        ("dataset", entries[1]["count"]),
        ("dataset", 1),
    ]
    assert "sources are books" in refused(run_dir, "--source", "wiki")


def test_rows_are_shown_with_borders_and_the_number_of_rows(run_dir):
    shown = look(run_dir / "datasets" / "short", "--count", 2)
    assert "── document 1 of " in shown
    assert shown.count("━━ row ") == 2
    assert "━━ row 0 of 0–" in shown
    assert "\x1b" not in shown


def test_a_single_file_and_chosen_indices(run_dir):
    shown = look(run_dir / "corpus" / "books" / "docs-00000.arrow", "--index", 2, "--index", 0)
    assert shown.index("━━ document 2 of 0–2") < shown.index("━━ document 0 of 0–2")
    assert "a bridge⇥   and␍\n␛[31mred ⟨U+202E⟩turned<|end|>" in shown


def test_tokens_are_shown_with_ids(run_dir):
    assert "⟨<|end|>⟩" in look(run_dir / "corpus" / "books", "--tokens", "--index", 0)


def test_json_holds_texts_as_they_are(run_dir):
    values = json.loads(look(run_dir / "corpus" / "books", "--json", "--index", 2))
    (item,) = values["items"]
    assert (
        "".join(span["text"] for span in item["parts"][0]["spans"])
        == "a bridge\tand\r\n\x1b[31mred \u202eturned<|end|>"
    )
    assert values["facts"]["documents"] == "3"
    assert sum(values["lengths"]["documents"]) == 3


def test_a_page_is_written_and_named(run_dir, tmp_path):
    shown = look(run_dir / "datasets" / "tangled", "--html", tmp_path / "look.html")
    assert shown == f"page: {tmp_path / 'look.html'}\n"
    assert "Ab12Cd" in (tmp_path / "look.html").read_text()


def test_an_input_file_is_shown_as_a_source_would_read_it(tmp_path):
    path = tmp_path / "books.jsonl"
    path.write_text('{"text": "the old mill"}\n{"text": 1}\n')
    shown = look(path)
    assert "the old mill" in shown
    assert "not_text" in shown


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["datasets/short", "--index", "99"], "--index 99: there are "),
        (["datasets/short", "--source", "bookz"], "did you mean 'books'?"),
        (["datasets/short", "--text", "body"], "text is for JSONL and Parquet files"),
        (["datasets/short", "--tokenizer", "corpus"], "the folder holds no model (config.json)"),
        (["corpus/books", "--source", "books"], "--source is for datasets"),
        (["corpus/books", "--html", "."], "is a folder; name the file to write"),
        ([".", "--html", "page.html"], "a page needs one folder"),
        (["recipe.yaml", "--text", "body"], "is read as kind: text, which has no fields"),
    ],
)
def test_every_mistake_is_one_sentence(args, wanted, run_dir, monkeypatch):
    monkeypatch.chdir(run_dir)
    assert wanted in refused(*args)


def test_an_empty_folder_and_a_broken_file_are_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "the folder is empty" in refused(tmp_path / "empty")
    (tmp_path / "rows-00000.arrow").write_bytes(b"ARROW1")
    assert "not a complete Arrow file" in refused(tmp_path / "rows-00000.arrow")


@pytest.fixture
def conversations(tmp_path) -> Path:
    """As `unspool synth` leaves them, in two files."""
    folder = tmp_path / "run/synth/long"
    folder.mkdir(parents=True)
    for number, word in enumerate(("Ahab", "Ishmael")):
        turns = [{"role": "user", "content": f"Who is {word}?"}, {"role": "assistant", "content": f"{word} sails."}]
        record = json.dumps({"messages": turns, "kind": "qa"}).encode()
        (folder / f"conversations-{number:05}.jsonl.zst").write_bytes(zstandard.compress(record))
    return folder


def test_conversations_are_shown_turn_by_turn(conversations):
    shown = look(conversations)
    assert "kind: chat" in shown and "2 records" in shown
    assert re.search(r"user · 12 characters.*Who is Ahab\?.*assistant · 11 characters.*Ahab sails", shown, re.DOTALL)
    assert "Who is Ishmael?" in shown
    only = look(conversations / "conversations-00001.jsonl.zst", "--json")
    assert "Ishmael sails." in only and "Ahab" not in only


def test_a_folder_of_conversations_is_no_text_to_attend_to(conversations):
    done = CliRunner().invoke(build_app(), ["inspect", "attention", "asset:tiny-base", "--text", str(conversations)])
    assert done.exit_code == 2
    assert "give a file such as book.txt" in " ".join(done.stderr.split())


def test_rows_of_a_run_are_shown_together_or_by_name(run_dir):
    shown = look("rows", run_dir)
    assert (shown.count("━━ row "), shown.count("tokenizer: ")) == (2, 2)
    only = look("rows", run_dir, "--name", "tangled")
    assert "part 1 of 2 of document 1" in only
    assert "datasets/short" not in only
    values = json.loads(look("rows", run_dir, "--json", "--count", 1))
    assert [Path(each["path"]).name for each in values] == ["short", "tangled"]
    assert "did you mean 'tangled'?" in refused("rows", run_dir, "--name", "tangeld")


def test_several_sets_go_on_one_page(run_dir, tmp_path):
    sets = [run_dir / "datasets" / name for name in ("short", "tangled")]
    assert look("rows", *sets, "--html", tmp_path / "look.html") == f"page: {tmp_path / 'look.html'}\n"
    page = (tmp_path / "look.html").read_text()
    assert "<h1>short</h1>" in page
    assert "<h1>tangled</h1>" in page


def test_a_folder_called_as_a_command_is_reached_by_its_path(run_dir, tmp_path, monkeypatch):
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run" / "datasets").rename(tmp_path / "run" / "rows")
    monkeypatch.chdir(tmp_path / "run")
    assert "Inspect one with" in look("./rows")
    monkeypatch.chdir(run_dir)
    assert look("rows").count("━━ row ") == 2
    assert "share of pairs" in look("distances")


def test_options_may_stand_before_the_path(run_dir):
    assert look("--count", 1, run_dir / "datasets" / "short").count("━━ row ") == 1


def test_distances_are_printed_as_a_table_with_both_kinds_of_numbers(run_dir):
    shown = look("distances", run_dir, "--beyond", 6)
    assert re.search(r"^share of pairs +short +tangled *$", shown, re.MULTILINE)
    assert re.search(r"^6 and more +\S+% +\S+% *$", shown, re.MULTILINE)
    assert re.search(r"^half a row and more +\S+% +\S+% *$", shown, re.MULTILINE)
    assert re.search(r"^all +\d\S+ +\d\S+ *$", shown, re.MULTILINE)


def test_distances_as_json_and_as_a_page(run_dir, tmp_path):
    printed = look("distances", run_dir, "--json", "--bins", "4,16", "--html", tmp_path / "far.html")
    short, tangled = json.loads(printed)
    assert [each["at_least"] for each in short["bins"]] == [1, 4, 16]
    assert sum(each["share"] for each in tangled["bins"]) == pytest.approx(1)
    assert "Distances within documents" in (tmp_path / "far.html").read_text()


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["rows", "corpus/books"], "corpus/books contains no dataset"),
        (["rows", "nowhere"], "nowhere: no such file or folder"),
        (["rows", ".", "--source", "bookz"], "did you mean 'books'?"),
        (["distances", "corpus"], "no datasets have been built here yet"),
        (["distances", ".", "--bins", "4K,1K"], "--bins 4K,1K: edges must increase"),
        (["distances", ".", "--bins", "1,many"], "--bins many: write a size such as 64K"),
        (["distances", ".", "--beyond", "0"], "--beyond 0: a size must be between 1 and"),
        (["distances", ".", "--html", "."], "is a folder; name the file to write"),
    ],
)
def test_mistakes_of_the_commands_are_one_sentence(args, wanted, run_dir, monkeypatch):
    monkeypatch.chdir(run_dir)
    assert wanted in refused(*args)


def test_help_of_each_command_teaches():
    for command, example in (("rows", "--name utk-2k --index 7"), ("distances", "--beyond 16K")):
        done = CliRunner().invoke(build_app(), ["inspect", command, "--help"])
        assert example in done.stdout
    done = CliRunner().invoke(build_app(), ["inspect", "-h"])
    assert "distances" in done.stdout
    assert "--tokenizer" in done.stdout


def test_help_teaches_with_examples():
    done = CliRunner().invoke(build_app(), ["inspect", "--help"])
    assert done.exit_code == 0
    assert "unspool inspect runs/tiny/datasets/utk-2k --index 7 --full" in done.stdout
