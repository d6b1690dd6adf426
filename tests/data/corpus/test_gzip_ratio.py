"""Documents are kept by gzip ratio: against plain Python, for any division of the work, and after kills and damage."""

import gzip
import json
import math
import random
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError, DataError
from unspool.data.corpus import ratios
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.ratios import MeasureRatios, load_ratios, save_ratios
from unspool.data.corpus.store import keep_first, open_corpus
from unspool.data.sources import base
from unspool.data.sources.gzip_ratio import GzipRatio, gzip_ratio, middle_bounds
from unspool.data.sources.hub import HfSource
from unspool.data.sources.jsonl import JsonlSource
from unspool.data.sources.registry import build_source

from ..conftest import build_tokenizer, prose
from ..sources.test_stack import write as write_stack
from .test_build import contents

ONE = EngineConfig(workers=1)


def texts() -> dict[str, str]:
    """Documents by id: prose, repetitions and noise, of many lengths."""
    found = {}
    for number in range(40):
        noise = random.Random(number).choices("abcdefghijklmnopqrstuvwxyz .,", k=60 + 11 * number)
        kinds = (prose(30 + 7 * number, seed=number), "again and " * (5 + number), "".join(noise))
        found[f"part-{number // 10}.jsonl:{number % 10 + 1}"] = kinds[number % 3]
    return found


def write_files(folder: Path) -> dict[str, str]:
    written = texts()
    for file in range(4):
        part = [text for name, text in written.items() if name.startswith(f"part-{file}.")]
        (folder / f"part-{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return written


def build(root: Path, name: str = "pdfs", *, engine: EngineConfig = ONE, **options) -> dict:
    source = JsonlSource.model_validate({"kind": "jsonl", "path": "part-*.jsonl", **options})
    out = root / "out" / name
    return build_corpus(source, out, tokenizer=build_tokenizer(), root=root, engine=engine, seed=0)


def middle_in_plain_python(written: dict[str, str], middle: float) -> list[str]:
    by_ratio = sorted(
        written, key=lambda name: len(written[name].encode()) / len(zlib.compress(written[name].encode()))
    )
    ends = math.floor(len(by_ratio) * (1 - middle) / 2 + 1e-9)
    kept = set(by_ratio[ends : len(by_ratio) - ends])
    return [name for name in written if name in kept]


def test_a_ratio_is_bytes_over_compressed_bytes():
    text = "Ärger und Ähren. " * 50
    packed = gzip.compress(text.encode(), 6, mtime=0)

    # The formats differ in their frame: 18 bytes around a gzip stream, 6 around a zlib stream.
    assert gzip_ratio(text) == len(text.encode()) / (len(packed) - 12)
    data = prose(3000, seed=1).encode()
    packed_sizes = [len(zlib.compress(data, level)) for level in (6, 9)]
    assert gzip_ratio(data.decode()) == len(data) / packed_sizes[0] and len(set(packed_sizes)) == 2
    assert gzip_ratio("again and " * 500) > 50 > 4 > gzip_ratio(prose(300, seed=1)) > 2
    assert gzip_ratio("x") < 0.2


@pytest.mark.parametrize("middle", [0.6, 0.25, 0.9, 0.99])
def test_the_middle_of_a_source_is_that_of_plain_python(tmp_path, middle):
    written = write_files(tmp_path)
    counts = build(tmp_path, gzip_ratio={"middle": middle})
    reader = open_corpus(tmp_path / "out/pdfs")

    kept = [reader.id(index) for index in range(len(reader))]
    assert kept == middle_in_plain_python(written, middle)
    assert reader.gzip_ratios.tolist() == [gzip_ratio(written[name]) for name in kept]
    assert counts["records"] == 40 == counts["documents"] + sum(counts["filtered"].values())
    dropped = math.floor(40 * (1 - middle) / 2 + 1e-9)
    wanted = {"gzip_ratio_high": dropped, "gzip_ratio_low": dropped} if dropped else {}
    assert counts["filtered"] == wanted


def test_empty_and_unreadable_records_do_not_shift_the_ratios(tmp_path):
    written = write_files(tmp_path)
    lines = (tmp_path / "part-1.jsonl").read_text().splitlines()
    changed = [lines[0], '{"text": ""}', lines[2], "not JSON", "", *lines[5:]]
    (tmp_path / "part-1.jsonl").write_text("\n".join(changed) + "\n")
    for number in (2, 4, 5):
        del written[f"part-1.jsonl:{number}"]
    counts = build(tmp_path, gzip_ratio={"middle": 0.6}, max_bad=0.5)

    assert [name for name, _ in contents(tmp_path / "out/pdfs")] == middle_in_plain_python(written, 0.6)
    assert counts["filtered"] == {"empty": 1, "gzip_ratio_high": 7, "gzip_ratio_low": 7}
    assert counts["quarantined"] == {"broken_json": 1}


def test_bounds_need_no_first_pass_and_count_both_ends(tmp_path, monkeypatch):
    written = write_files(tmp_path)
    monkeypatch.setattr(MeasureRatios, "run", None)
    counts = build(tmp_path, gzip_ratio={"min": 1.5, "max": 4})

    kept = [name for name, text in written.items() if 1.5 <= gzip_ratio(text) <= 4]
    assert [name for name, _ in contents(tmp_path / "out/pdfs")] == kept and 0 < len(kept) < 40
    low = sum(gzip_ratio(text) < 1.5 for text in written.values())
    assert counts["filtered"] == {"gzip_ratio_high": 40 - len(kept) - low, "gzip_ratio_low": low}
    assert counts["gzip_ratio"] == {"low": 1.5, "high": 4.0}
    assert build(tmp_path, "open", gzip_ratio={"min": 1.5})["gzip_ratio"] == {"low": 1.5}


def test_what_was_dropped_is_logged_and_in_the_manifest(tmp_path, caplog):
    write_files(tmp_path)
    with caplog.at_level("INFO", logger="unspool"):
        build(tmp_path, gzip_ratio={"middle": 0.6})

    assert "kept 24 documents with a gzip ratio from " in caplog.text
    assert "dropped 8 below and 8 above" in caplog.text
    counts = read_manifest(tmp_path / "out/pdfs")["counts"]
    assert 0 < counts["gzip_ratio"]["low"] < counts["gzip_ratio"]["high"]


def test_the_division_into_tasks_and_the_number_of_workers_do_not_matter(tmp_path, monkeypatch):
    write_files(tmp_path)
    build(tmp_path, "one", gzip_ratio={"middle": 0.6})
    monkeypatch.setattr(base, "TASK_BYTES", 1)  # every file is a separate shard
    build(tmp_path, "four", gzip_ratio={"middle": 0.6})
    build(tmp_path, "workers", engine=EngineConfig(workers=2), gzip_ratio={"middle": 0.6})

    assert len(list((tmp_path / "out/four").glob("docs-*.arrow"))) == 4
    assert contents(tmp_path / "out/one") == contents(tmp_path / "out/four")
    for path in (tmp_path / "out/four").glob("docs-*.arrow"):
        assert path.read_bytes() == (tmp_path / "out/workers" / path.name).read_bytes()


def test_equal_ratios_at_a_bound_are_all_kept():
    found = np.array([3.0, 1.0, 2.0, 2.0, 2.0, 9.0])
    bounds = middle_bounds(found, 0.5)

    assert bounds == (2.0, 3.0)
    assert [bounds.reason_to_drop(ratio) for ratio in (1.99, 2.0, 3.0, 3.01)] == [
        "gzip_ratio_low",
        None,
        None,
        "gzip_ratio_high",
    ]
    assert middle_bounds(np.zeros(0), 0.5).reason_to_drop(7.0) is None


def test_a_killed_build_measures_no_document_twice_and_ends_with_the_same_bytes(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.setattr(base, "TASK_BYTES", 1)
    build(tmp_path, "whole", gzip_ratio={"middle": 0.6})
    measured: list[int] = []

    def measure(self, data=None, rank=0, world_size=1, original=MeasureRatios.run):
        if rank == 2 and len(measured) == 2:
            measured.append(-1)
            raise OSError("stopped")
        measured.append(rank)
        original(self, data, rank, world_size)

    monkeypatch.setattr(MeasureRatios, "run", measure)
    with pytest.raises(DataError, match="stopped"):
        build(tmp_path, gzip_ratio={"middle": 0.6})
    build(tmp_path, gzip_ratio={"middle": 0.6})

    assert measured == [0, 1, -1, 2, 3]
    for path in (tmp_path / "out/whole").glob("docs-*.arrow"):
        assert path.read_bytes() == (tmp_path / "out/pdfs" / path.name).read_bytes()


def test_damaged_ratios_are_noticed_and_measured_again(tmp_path, monkeypatch, caplog):
    write_files(tmp_path)
    monkeypatch.setattr(base, "TASK_BYTES", 1)
    build(tmp_path, "whole", gzip_ratio={"middle": 0.6})
    with monkeypatch.context() as patch:
        patch.setattr("unspool.data.corpus.build.middle_bounds", lambda *_: (_ for _ in ()).throw(OSError("stopped")))
        with pytest.raises(OSError, match="stopped"):
            build(tmp_path, gzip_ratio={"middle": 0.6})
    damaged = tmp_path / "out/pdfs.partial/tasks/ratios/ratios-00001.txt"
    damaged.write_text(damaged.read_text().replace("4", "5"))
    with caplog.at_level("WARNING", logger="unspool"):
        build(tmp_path, gzip_ratio={"middle": 0.6})

    assert "the gzip ratios of task 1 are damaged" in caplog.text
    assert contents(tmp_path / "out/whole") == contents(tmp_path / "out/pdfs")


@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_a_file_that_changes_between_the_passes_is_refused_and_read_again(tmp_path, monkeypatch, change):
    write_files(tmp_path)
    file = tmp_path / "part-2.jsonl"
    whole = file.read_text()

    def change_then_bounds(*args):
        one = whole.splitlines(keepends=True)
        file.write_text("".join([*one, one[0]] if change == "longer" else one[1:]))
        return middle_bounds(*args)

    with monkeypatch.context() as patch:
        patch.setattr("unspool.data.corpus.build.middle_bounds", change_then_bounds)
        with pytest.raises(DataError, match="a file of the source changed while it was read"):
            build(tmp_path, gzip_ratio={"middle": 0.6})
    assert not (tmp_path / "out/pdfs").exists()
    changed = {f"part-2.jsonl:{at + 1}": json.loads(line)["text"] for at, line in enumerate(file.open())}
    written = {name: text for name, text in texts().items() if not name.startswith("part-2.")} | changed
    build(tmp_path, gzip_ratio={"middle": 0.6})
    reader = open_corpus(tmp_path / "out/pdfs")
    assert {reader.id(at) for at in range(len(reader))} == set(middle_in_plain_python(written, 0.6))


def test_ratios_are_exact_in_their_file(tmp_path):
    save_ratios(tmp_path, 3, [1.1, 2.0 / 3, 1e-9])

    assert load_ratios(tmp_path, 3).tolist() == [1.1, 2.0 / 3, 1e-9]
    assert load_ratios(tmp_path, 4) is None
    assert ratios.load_ratios(tmp_path / "none", 0) is None


@pytest.mark.parametrize("kind", ["stack", "textbooks", "repos", "text", "parquet"])
def test_every_kind_of_text_is_filtered_as_its_documents_are(tmp_path, kind):
    """Also joined documents, and those that are sorted on disk before they are read."""
    root, settings = tmp_path / "in", write_kind(tmp_path / "in", kind)
    out = {}
    for name, options in (("all", {"gzip_ratio": {"min": 0.01}}), ("middle", {"gzip_ratio": {"middle": 0.6}})):
        source = build_source({"kind": kind, **settings, **options})
        build_corpus(source, tmp_path / name, tokenizer=build_tokenizer(), root=root, engine=ONE, seed=0)
        reader = open_corpus(tmp_path / name)
        out[name] = {reader.id(at): float(reader.gzip_ratios[at]) for at in range(len(reader))}

    low, high = middle_bounds(np.array(list(out["all"].values())), 0.6)
    assert len(out["all"]) == 10 and len(out["middle"]) == 6
    assert out["middle"] == {name: ratio for name, ratio in out["all"].items() if low <= ratio <= high}


def write_kind(folder: Path, kind: str) -> dict:
    """Ten documents with different ratios, as a source of this kind reads them."""
    folder.mkdir()
    bodies = {f"d{number}": f"{prose(40, seed=number)} " * (1 + number) for number in range(10)}
    if kind == "stack":
        write_stack(folder, [(name, "a.py", body) for name, body in bodies.items()], per_file=4)
        return {"path": ".", "filter": False}
    if kind == "parquet":
        pq.write_table(pa.table({"text": list(bodies.values())}), folder / "a.parquet")
        return {"path": "a.parquet"}
    if kind == "textbooks":
        records = [{"text": body, "book": name, "subject": name, "chapter": 1} for name, body in bodies.items()]
        (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return {"path": "a.jsonl"}
    for name, body in bodies.items():
        path = folder / name / "a.py" if kind == "repos" else folder / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(body)
    return {"path": "." if kind == "repos" else "*.txt"}


def test_a_limit_counts_documents_that_are_kept(tmp_path):
    write_files(tmp_path)
    build(tmp_path, "all", gzip_ratio={"middle": 0.6})
    everything = contents(tmp_path / "out/all")
    wanted = sum(len(tokens) for _, tokens in everything[:5])
    build(tmp_path, "some", limit=wanted, gzip_ratio={"middle": 0.6})

    assert contents(tmp_path / "out/some") == everything[:5]
    assert len(open_corpus(tmp_path / "out/some").gzip_ratios) == 5


def test_a_shard_that_is_cut_to_a_limit_keeps_the_ratios_of_its_documents(tmp_path):
    write_files(tmp_path)
    build(tmp_path, gzip_ratio={"min": 0.1})
    before = open_corpus(tmp_path / "out/pdfs").gzip_ratios.tolist()
    keep_first(tmp_path / "out/pdfs/docs-00000.arrow", 7)

    assert open_corpus(tmp_path / "out/pdfs").gzip_ratios.tolist() == before[:7]


def test_a_corpus_without_the_filter_is_as_before(tmp_path):
    write_files(tmp_path)
    counts = build(tmp_path)

    assert "gzip_ratio" not in counts and "tasks" not in counts
    assert open_corpus(tmp_path / "out/pdfs").gzip_ratios is None
    source = read_manifest(tmp_path / "out/pdfs")["settings"]["source"]
    assert not {"gzip_ratio", "aggregation"} & set(source), "so that older corpora stay up to date"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "set either middle"),
        ({"middle": 0.6, "min": 2}, "set either middle"),
        ({"min": 4, "max": 2}, "min 4 must be below max 2"),
        ({"middle": 1}, "less than 1"),
        ({"middle": 0}, "greater than 0"),
        ({"keep": 0.6}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_settings_are_refused(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        GzipRatio.model_validate(settings)


@pytest.mark.parametrize("kind", ["mds", "chat"])
def test_sources_without_text_have_no_such_key(kind):
    with pytest.raises(ValidationError, match="gzip_ratio"):
        build_source({"kind": kind, "path": "x", "gzip_ratio": {"middle": 0.6}})


def test_bounds_that_no_document_meets_are_refused(tmp_path):
    write_files(tmp_path)
    with pytest.raises(DataError, match=r"corpus pdfs: no document has a gzip ratio of at least 900 \(40 below and 0"):
        build(tmp_path, gzip_ratio={"min": 900})


def test_the_middle_of_a_streamed_source_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(HfSource, "units", lambda self, root: [])
    monkeypatch.setattr(HfSource, "content_marks", lambda self, units: ["a commit"])
    source = HfSource(kind="hf", path="org/name", gzip_ratio=GzipRatio(middle=0.6))
    with pytest.raises(ConfigError, match=r"gzip_ratio.middle reads all documents .* download it and set path"):
        build_corpus(source, tmp_path / "hf", tokenizer=build_tokenizer(), root=tmp_path, engine=ONE, seed=0)
