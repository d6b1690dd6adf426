"""tools/prepare_corpus.py: what overlaps with an evaluation is dropped, and nothing else; the parts are disjoint."""

import importlib.util
import io
import json
import re
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard

from unspool.core.artifacts import file_digest
from unspool.core.errors import ConfigError
from unspool.evals.suites.needle_wordings import WORDINGS
from unspool.synthesis.decontamination import NgramIndex

PATH = Path(__file__).parents[1] / "tools" / "prepare_corpus.py"
SPEC = importlib.util.spec_from_file_location("prepare_corpus", PATH)
assert SPEC and SPEC.loader
tool = importlib.util.module_from_spec(SPEC)
sys.modules["prepare_corpus"] = tool
SPEC.loader.exec_module(tool)


def words(start: int, count: int) -> str:
    return " ".join(f"word{number}" for number in range(start, start + count))


def grams(text: str) -> set[tuple[str, ...]]:
    """Plain reference: all runs of 13 words."""
    found = re.findall(r"\w+", text.lower())
    return {tuple(found[at : at + 13]) for at in range(len(found) - 12)}


def write(path: Path, records) -> None:
    path.write_bytes(zstandard.compress("".join(json.dumps(record) + "\n" for record in records).encode()))


def read(path: Path) -> list[dict]:
    with zstandard.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_a_document_with_thirteen_words_of_an_evaluation_is_dropped_and_one_with_twelve_is_kept():
    index = NgramIndex(tool.NGRAM)
    index.add([words(0, 40)])
    texts = {
        "thirteen": f"{words(900, 20)} {words(7, 13)} {words(950, 20)}",
        "twelve": f"{words(900, 20)} {words(7, 12)} {words(950, 20)}",
        "punctuation": f"{words(900, 5)}, {words(7, 13).upper().replace(' ', ', ')}!",
    }
    overlap = tool.Overlap({"helmet": index})
    kept = list(overlap.clean("web", texts.items(), lambda item: item[1]))
    assert [name for name, _ in kept] == ["twelve"]
    assert {name for name, text in texts.items() if grams(text) & grams(words(0, 40))} == {"thirteen", "punctuation"}
    assert overlap.summary()["sources"]["web"] == {
        "documents": 3,
        "dropped": 2,
        "characters_dropped": len(texts["thirteen"]) + len(texts["punctuation"]),
        "by_suite": {"helmet": 2},
    }


def test_a_cut_text_loses_nothing_and_is_cut_between_paragraphs():
    text = "\n\n".join("x" * length for length in (10, 30, 5, 80, 1, 1))
    parts = list(tool.cut(text, 40))
    assert "\n\n".join(parts) == text
    assert [len(part) for part in parts] == [10, 37, 80, 4]


def test_books_are_held_out_once_and_for_all():
    books = [f"{at} " + "x" * (700_000 if at % 2 else 10) for at in range(60)]
    train, heldout = tool.hold_out(books)
    assert len(heldout) == 12 and all(len(book) >= tool.HELDOUT_CHARS for book in heldout)
    assert sorted(train + heldout) == sorted(books), "no book is lost or in both parts"
    assert tool.hold_out(books) == (train, heldout)
    with pytest.raises(ConfigError, match="give at least 24"):
        tool.hold_out(books[:40])


def test_chapters_are_joined_by_number():
    records = [{"book": "b", "chapter": number, "text": f"b{number}"} for number in ("10", "2", "1")]
    assert list(tool.join_chapters([*records, {"book": "a", "chapter": "1", "text": "a1"}])) in (
        ["b1\n\nb2\n\nb10", "a1"],
        ["a1", "b1\n\nb2\n\nb10"],
    )


def test_long_conversations_have_the_right_answers_and_share_no_abstract():
    abstracts = [f"Title {at}\nSentence {at} begins. It ends {at}." for at in range(40)]
    found = list(tool.long_conversations(abstracts, chars=(200, 300), count=3))
    seen: list[str] = []
    for messages in found:
        texts = [message["content"] for message in messages]
        context = texts[0].split("\n\nWhich of")[0]
        titles = context.split("\n\n")
        first = re.search("begins with: “(.*)”", texts[0])[1]
        assert next(one for one in titles if first in one).startswith(f"{texts[1]}\n")
        asked = re.search("“(.*)”", texts[2])[1]
        assert next(one for one in titles if one.startswith(f"{asked}\n")).split("\n")[1].startswith(texts[3])
        assert texts[5].split("\n") == [one.split("\n")[0] for one in titles[:10]]
        seen += titles
    assert len(found) == 3 and len(seen) == len(set(seen))


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "HELDOUT_BOOKS", 1)
    monkeypatch.setattr(tool, "HELDOUT_CHARS", 1_000)
    monkeypatch.setattr(tool, "long_conversations", lambda *_, **__: [[{"role": "user", "content": "x"}]])
    folder = tmp_path / "given"
    folder.mkdir()
    write(folder / "books.jsonl.zst", [{"text": words(10_000 * at, 300)} for at in range(1, 6)])
    chapters = [{"book": "b", "chapter": str(at), "text": words(60_000 + 100 * at, 50)} for at in range(3)]
    write(folder / "textbooks.jsonl.zst", [*chapters, {"book": "b", "chapter": "9", "text": words(0, 60)}])
    for name in tool.SHORT:
        write(folder / f"{name}.jsonl.zst", [{"text": f"{name} {at}"} for at in range(4)] + [{"text": words(3, 30)}])
    chats = [
        [{"role": "user", "content": f"ask {at}"}, {"role": "assistant", "content": f"answer {at}"}] for at in range(8)
    ]
    write(folder / "chats.jsonl.zst", [{"messages": messages} for messages in chats])
    write(folder / "nq.jsonl.zst", [{"question": words(0, 20), "gold": [{"text": words(20, 40)}]}])
    write(folder / "hellaswag.jsonl.zst", [{"ctx": "a short text of six words"}])
    (folder / "sdists").mkdir()
    with tarfile.open(folder / "sdists" / "code-1.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("code-1/a.py")
        member.size = 12
        archive.addfile(member, io.BytesIO(b"print('hi')\n"))
    inputs = {
        "books": "books.jsonl.zst",
        "textbooks": "textbooks.jsonl.zst",
        "repos": "sdists",
        "short": {name: f"{name}.jsonl.zst" for name in tool.SHORT},
        "conversations": "chats.jsonl.zst",
        "helmet": {"nq": "nq.jsonl.zst"},
        "short_tasks": ["hellaswag.jsonl.zst"],
    }
    (folder / "inputs.yaml").write_text(json.dumps(inputs))
    return folder


def run(monkeypatch, *args) -> int:
    monkeypatch.setattr(sys, "argv", ["prepare_corpus.py", *map(str, args), "--tokenizer", "asset:tiny-base"])
    return tool.main()


def test_all_files_are_written_without_overlap_and_with_digests(given, tmp_path, monkeypatch):
    out = tmp_path / "data"
    assert run(monkeypatch, given / "inputs.yaml", "--out", out, "--files-only") == 0
    found = json.loads((out / "files.json").read_text())
    assert {name: file_digest(out / f"{name}.jsonl.zst") for name in found["written"]} == {
        name: entry["sha256"] for name, entry in found["written"].items()
    }
    assert found["read"]["books.jsonl.zst"] == file_digest(given / "books.jsonl.zst")
    assert {"sdists/code-1.tar.gz", "nq.jsonl.zst", "hellaswag.jsonl.zst", "chats.jsonl.zst"} <= set(found["read"])
    books, heldout = read(out / "books.jsonl.zst"), read(out / "heldout.jsonl.zst")
    assert len(books) == 4 and len(heldout) == 1 and heldout[0] not in books
    (textbook,) = read(out / "textbooks.jsonl.zst")
    assert grams(textbook["text"]).isdisjoint(grams(words(0, 60)))
    assert all(len(read(out / f"{name}.jsonl.zst")) == (2 if name == "papers" else 4) for name in tool.SHORT)
    talks, chats = read(out / "talks.jsonl.zst"), read(out / "chat.jsonl.zst")
    asked = [record["messages"][0]["content"] for record in chats]
    assert len(talks) == len(asked) == 4
    assert not any(f"User: {question}\n" in record["text"] for record in talks for question in asked)
    dropped = {name: one["dropped"] for name, one in json.loads((out / "overlap.json").read_text())["sources"].items()}
    assert dropped == {"books": 0, "textbooks": 1, "repos": 0, "conversations": 0, **dict.fromkeys(tool.SHORT, 1)}


def test_the_same_inputs_give_the_same_bytes(given, tmp_path, monkeypatch):
    for name in ("one", "two"):
        assert run(monkeypatch, given / "inputs.yaml", "--out", tmp_path / name / "data", "--files-only") == 0
    one, two = (json.loads((tmp_path / name / "data/files.json").read_text()) for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"book": "x"}, "'book' is not known; did you mean 'books'"),
        ({"books": None}, "books missing"),
        ({"short": {"web": "web.jsonl.zst"}}, "short.wiki"),
        ({"books": "none/*.jsonl.zst"}, "none"),
    ],
)
def test_a_mistake_ends_with_one_sentence(given, tmp_path, monkeypatch, capsys, change, message):
    path = given / "inputs.yaml"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert run(monkeypatch, path, "--out", tmp_path / "data", "--files-only") == 2
    assert message in capsys.readouterr().err


def test_the_evaluations_of_the_recipe_and_of_all_studies_are_compared():
    evals = tool.all_evals()
    assert {entry.suite for entry, _ in evals} == {"niah", "ruler", "helmet", "mrcr", "perplexity"}
    assert {seed for _, seed in evals} == set(range(6)), "the replication's too"
    needles = [entry for entry, _ in evals if entry.suite == "niah"]
    assert {name for entry in needles for name in entry.wordings} == set(WORDINGS), "also the wordings held back"
    tasks = {task for entry, _ in evals if entry.suite == "helmet" for task in entry.tasks}
    assert {"nq", "trec_fine", "clinc150"} <= tasks
