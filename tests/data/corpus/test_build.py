import json
import multiprocessing
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from unspool.core.artifacts import read_manifest
from unspool.core.errors import DataError
from unspool.data.corpus import pipeline
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.pipeline import ReadDocuments
from unspool.data.corpus.store import open_corpus
from unspool.data.sources import base, recall
from unspool.data.sources.jsonl import JsonlSource
from unspool.data.sources.recall import RecallSource
from unspool.data.tokenize.encoder import build_encoder

from ..conftest import build_tokenizer, prose

ONE = EngineConfig(workers=1)


def write_texts(folder: Path, num_files: int, per_file: int) -> list[str]:
    texts = [prose(20 + number % 7, seed=number) for number in range(num_files * per_file)]
    for file in range(num_files):
        part = texts[file * per_file : (file + 1) * per_file]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"part-{file}.jsonl").write_text(lines)
    return texts


def build(root: Path, name: str = "books", *, engine=ONE, tokenizer=None, **source) -> dict:
    return build_corpus(
        JsonlSource(kind="jsonl", path="part-*.jsonl", **source),
        root / "out" / name,
        tokenizer=tokenizer or build_tokenizer(),
        root=root,
        engine=engine,
        seed=0,
    )


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(base, "TASK_BYTES", 1)  # every file is a separate shard


def contents(folder: Path) -> list[tuple[str, list[int]]]:
    reader = open_corpus(folder)
    return [(reader.id(index), reader[index].tolist()) for index in range(len(reader))]


def test_a_corpus_holds_every_document_tokenised_and_counted(tmp_path, small_groups, tokenizer):
    texts = write_texts(tmp_path, num_files=3, per_file=4)
    counts = build(tmp_path)

    encoded = [tokens.tolist() for tokens in build_encoder(tokenizer).encode(texts)]
    ids = [f"part-{file}.jsonl:{line}" for file in range(3) for line in range(1, 5)]
    assert contents(tmp_path / "out/books") == list(zip(ids, encoded, strict=True))
    assert counts == read_manifest(tmp_path / "out/books")["counts"]
    assert (counts["documents"], counts["units"]) == (12, 3)
    assert counts["tokens"] == sum(map(len, encoded)) == sum(counts["lengths"]["tokens"])
    assert counts["characters"] == sum(map(len, texts))
    assert (counts["records"], counts["quarantined"], counts["filtered"], counts["left_out"]) == (12, {}, {}, {})
    files = sorted(path.name for path in (tmp_path / "out/books").rglob("*"))
    assert files == ["docs-00000.arrow", "docs-00001.arrow", "docs-00002.arrow", "manifest.json"]


TWO_WORKERS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from data.corpus.test_build import EngineConfig, base, build
base.TASK_BYTES = 1
build(Path(sys.argv[1]), "two", engine=EngineConfig(workers=2))
"""


def script(code: str, root: Path) -> list[str]:
    return [sys.executable, "-c", code, str(root), str(Path(__file__).parents[2])]


def test_two_worker_processes_make_the_same_bytes_as_one_and_print_nothing(tmp_path, small_groups):
    write_texts(tmp_path, num_files=3, per_file=3)
    build(tmp_path, "one")
    done = subprocess.run(script(TWO_WORKERS, tmp_path), capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == "", "a library is silent unless its user sets up logging"
    for file in (tmp_path / "out/one").glob("*.arrow"):
        assert file.read_bytes() == (tmp_path / "out/two" / file.name).read_bytes()


def test_small_files_share_a_shard(tmp_path):
    write_texts(tmp_path, num_files=5, per_file=2)
    build(tmp_path)
    assert [path.name for path in (tmp_path / "out/books").glob("*.arrow")] == ["docs-00000.arrow"]
    assert len(open_corpus(tmp_path / "out/books")) == 10


def test_a_corpus_is_rebuilt_only_when_its_files_settings_or_tokenizer_change(tmp_path, capfd):
    write_texts(tmp_path, num_files=2, per_file=2)

    def said(**changes) -> str:
        build(tmp_path, **changes)
        return capfd.readouterr().err

    assert "not built yet" in said()
    assert said() == "corpus books: up to date\n"
    assert "(changed inputs: tokenizer)" in said(tokenizer=build_tokenizer(bos=True))
    assert "(changed inputs: tokenizer)" in said()
    write_texts(tmp_path, num_files=2, per_file=3)
    assert "(changed inputs: files)" in said()
    assert "(changed settings: source)" in said(limit=30)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_limit_keeps_documents_in_order_up_to_the_one_that_reaches_it(tmp_path, small_groups, workers):
    write_texts(tmp_path, num_files=4, per_file=3)
    build(tmp_path, "all")
    everything = contents(tmp_path / "out/all")
    ends = np.cumsum([len(tokens) for _, tokens in everything])

    limits = ((1, 1), (int(ends[1]), 2), (int(ends[3]) - 1, 4), (int(ends[-1]) + 1, 12))
    for limit, kept in limits:
        counts = build(tmp_path, "some", engine=EngineConfig(workers=workers), limit=limit)
        assert contents(tmp_path / "out/some") == everything[:kept]
        assert (counts["documents"], counts["tokens"]) == (kept, ends[kept - 1])
        assert counts == read_manifest(tmp_path / "out/some")["counts"]


def test_finished_shards_are_kept_after_a_failure_unless_the_inputs_changed(tmp_path, small_groups, monkeypatch):
    write_texts(tmp_path, num_files=3, per_file=2)
    original = ReadDocuments.run
    read: list[int] = []
    fails = True

    def watched(self, data=None, rank=0, world_size=1):
        read.append(rank)
        if rank == 2 and fails:
            raise KeyboardInterrupt
        return original(self, data, rank, world_size)

    monkeypatch.setattr(ReadDocuments, "run", watched)
    for num_docs, again in ((6, [2]), (9, [0, 1, 2])):
        fails = True
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path)
        write_texts(tmp_path, num_files=3, per_file=num_docs // 3)
        fails, read[:] = False, []
        build(tmp_path)
        assert read == again
        assert len(open_corpus(tmp_path / "out/books")) == num_docs
        assert not (tmp_path / "out/books.partial").exists()
        write_texts(tmp_path, num_files=3, per_file=4)


def test_shards_that_an_earlier_run_made_beyond_the_limit_are_not_published(tmp_path, small_groups, monkeypatch):
    write_texts(tmp_path, num_files=3, per_file=2)
    with monkeypatch.context() as patch:
        patch.setattr(ReadDocuments, "run", lambda *_, **__: 1 / 0)
        with pytest.raises(DataError, match="ZeroDivisionError"):
            build(tmp_path, limit=1)
    for name in ("docs-00002.arrow", "docs-00001.arrow.tmp"):
        (tmp_path / "out/books.partial" / name).write_bytes(b"left over")

    build(tmp_path, limit=1)

    assert sorted(path.name for path in (tmp_path / "out/books").iterdir()) == ["docs-00000.arrow", "manifest.json"]


def stop_in_shard_3(root: Path) -> None:
    original = ReadDocuments.run

    def stopping(self, data=None, rank=0, world_size=1):
        for number, document in enumerate(original(self, data, rank, world_size)):
            if rank == 3 and number == 20:
                (root / "stopped").touch()
                time.sleep(1200)  # until it is killed
            yield document

    pipeline.BATCH_CHARS = 1
    ReadDocuments.run = stopping
    build(root, "killed")


def test_a_killed_build_resumes_and_ends_with_the_same_bytes(tmp_path, small_groups):
    write_texts(tmp_path, num_files=6, per_file=40)
    build(tmp_path, "whole")
    child = multiprocessing.get_context("fork").Process(target=stop_in_shard_3, args=(tmp_path,))
    child.start()
    while child.is_alive() and not (tmp_path / "stopped").exists():
        time.sleep(0.01)
    child.kill()
    child.join()
    left = sorted(path.name for path in (tmp_path / "out/killed.partial").glob("docs-*"))
    assert left == [*(f"docs-0000{rank}.arrow" for rank in range(3)), "docs-00003.arrow.tmp"]

    build(tmp_path, "killed")

    for file in (tmp_path / "out/whole").glob("*.arrow"):
        assert file.read_bytes() == (tmp_path / "out/killed" / file.name).read_bytes()
    assert len(list((tmp_path / "out/killed").iterdir())) == 7


def test_documents_without_text_are_skipped(tmp_path):
    (tmp_path / "part-0.jsonl").write_text('{"text": ""}\n{"text": "the mill"}\n')
    assert build(tmp_path)["documents"] == 1
    (tmp_path / "part-0.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="corpus books: no document contains text"):
        build(tmp_path)


BAD_LINES = ['{"text": 3}', '{"body": "x"}', "{"]


def write_bad(root: Path) -> None:
    write_texts(root, num_files=3, per_file=40)
    good = (root / "part-1.jsonl").read_text().splitlines()
    (root / "part-1.jsonl").write_text("\n".join([*good[:20], *BAD_LINES, *good[20:], '{"text": ""}']) + "\n")


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_records_are_set_aside_and_all_records_are_accounted_for(tmp_path, small_groups, workers):
    write_bad(tmp_path)
    counts = build(tmp_path, max_bad=0.05, engine=EngineConfig(workers=workers))
    assert counts["records"] == 124 == counts["documents"] + 3 + 1
    assert counts["quarantined"] == {"broken_json": 1, "missing_field": 1, "not_text": 1}
    assert counts["filtered"] == {"empty": 1}
    lines = (tmp_path / "out/books/quarantine.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {
        "file": "part-1.jsonl",
        "record": "line 21",
        "reason": "not_text",
        "detail": "field 'text' must be a string, not int",
    }
    assert [json.loads(line)["record"] for line in lines] == ["line 21", "line 22", "line 23"]
    ids = [name for name, _ in contents(tmp_path / "out/books")]
    assert len(ids) == 120
    assert not {f"part-1.jsonl:{number}" for number in (21, 22, 23, 44)} & set(ids)


def test_too_many_bad_records_stop_the_run_and_raising_max_bad_resumes_it(tmp_path, small_groups, monkeypatch):
    write_bad(tmp_path)
    with pytest.raises(DataError) as caught:
        build(tmp_path)
    text = str(caught.value)
    assert "3 of 124 records (2.42%) cannot be read, more than max_bad=0.001 allows" in text
    assert (
        "1 not_text, 1 missing_field, 1 broken_json; the first is part-1.jsonl, line 21: field 'text' must be" in text
    )
    assert "raise sources.books.max_bad" in text
    assert not (tmp_path / "out/books").exists()
    listed = Path(text.split("listed in ")[1].split(". Repair")[0])
    assert len(listed.read_text().splitlines()) == 3

    monkeypatch.setattr(ReadDocuments, "run", lambda *_, **__: 1 / 0)  # nothing is read a second time
    assert build(tmp_path, max_bad=0.05)["documents"] == 120


def test_a_source_that_is_wrong_throughout_stops_early(tmp_path):
    (tmp_path / "part-0.jsonl").write_text('{"body": "x"}\n' * 5000)
    with pytest.raises(DataError, match=r"1,000 of the first 1,000 records cannot be read; 1,000 missing_field"):
        build(tmp_path, max_bad=1)


def test_with_a_limit_the_records_still_add_up(tmp_path, small_groups):
    write_bad(tmp_path)
    for workers in (1, 2):
        counts = build(tmp_path, f"w{workers}", max_bad=0.05, limit=1500, engine=EngineConfig(workers=workers))
        rest = sum(counts["quarantined"].values()) + sum(counts["filtered"].values())
        assert counts["records"] == counts["documents"] + rest
        assert counts["filtered"]["limit"] > 0
    assert counts == read_manifest(tmp_path / "out/w1")["counts"]


def test_a_corpus_does_not_depend_on_the_folder_it_was_read_from(tmp_path, capfd):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write_texts(tmp_path / name, num_files=2, per_file=2)
    build(tmp_path / "here")
    shutil.copytree(tmp_path / "here/out", tmp_path / "there/out")
    capfd.readouterr()
    build(tmp_path / "there")
    assert capfd.readouterr().err == "corpus books: up to date\n"


def test_generated_documents_depend_on_the_prose_and_the_seed(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "prose.txt").write_text("Some prose. And more of it.")

    def generate(source, tokenizer, prose, seed):
        text = " ".join(prose)
        return iter([f"{text} {seed}", f"{source.tokens}"])

    monkeypatch.setattr(recall, "generate_documents", generate)
    source = RecallSource(kind="recall", tokens=1000, length=(64, 128), prose="prose.txt")

    def texts(seed: int) -> list[str]:
        out = tmp_path / "out"
        build_corpus(source, out, tokenizer=tokenizer, root=tmp_path, engine=ONE, seed=seed)
        return [tokenizer.decode(tokens[:-1]) for tokens in open_corpus(out)]

    assert texts(0) == ["Some prose. And more of it. 0", "1000"]
    assert texts(5)[0].endswith("5")
