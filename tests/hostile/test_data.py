"""Hostile archives and data files: each ends in one sentence and no corpus, or in exactly the documents it holds."""

import errno
import gzip
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.conftest import build_tokenizer
from unspool.core.errors import DataError, UnspoolError
from unspool.data.corpus import build as corpus_build
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.store import open_corpus
from unspool.data.sources import archives, base, files, jsonl, text
from unspool.data.sources.registry import SOURCES

from .data_cases import CASES, GOOD, RECORD_BYTES, lines

MAX_SECONDS, MAX_GROWTH_MB = 20, 300

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    built = build_tokenizer()
    built.chat_template = TEMPLATE
    return built


@pytest.fixture(autouse=True)
def _reference_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing a faster one takes longer than these files."""
    monkeypatch.setattr(corpus_build, "choose_route", lambda encoder, texts: encoder)
    monkeypatch.setattr(corpus_build, "forget_engines", lambda: None)  # collects garbage of the whole suite


def build(folder: Path, kind: str, tokenizer: Any, **settings: Any) -> Path:
    """The corpus of a folder."""
    source = SOURCES[kind].model_validate({"kind": kind, "path": str(folder), **settings})
    out = folder.with_name("out") / "web"
    build_corpus(source, out, tokenizer=tokenizer, root=Path(), engine=EngineConfig(workers=1), seed=0)
    return out


@pytest.mark.parametrize("name", CASES)
def test_hostile_data_ends_in_a_sentence_or_in_its_documents(name, tmp_path, monkeypatch, tokenizer):
    write, kind, wanted = CASES[name]
    for module in (base, jsonl, text):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", RECORD_BYTES)
    monkeypatch.setattr(archives, "SMALL_BYTES", RECORD_BYTES)
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder)
    before = sorted(path for path in tmp_path.rglob("*"))
    began, memory = time.monotonic(), _peak_mb()
    if isinstance(wanted, str):
        with pytest.raises(UnspoolError) as error:
            build(folder, kind, tokenizer)
        assert re.search(wanted, str(error.value)), str(error.value)
        assert "\n" not in str(error.value) and str(error.value).endswith(".")
        assert not (tmp_path / "out" / "web").exists(), "a corpus of hostile data was published"
    else:
        reader = open_corpus(build(folder, kind, tokenizer))
        texts = [tokenizer.decode(reader[index], skip_special_tokens=True) for index in range(len(reader))]
        assert texts == wanted if kind != "repos" else [re.findall(r"\S+\.py", text) for text in texts] == [wanted]
        assert not [reader.id(index) for index in range(len(reader)) if not reader.id(index).isprintable()]
    assert time.monotonic() - began < MAX_SECONDS
    assert _peak_mb() - memory < MAX_GROWTH_MB
    outside = {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "out")}
    assert outside == set(before), "reading wrote something"


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# Sources that change while they are read


class Shifty(SOURCES["jsonl"]):  # type: ignore[name-defined,misc]
    """A source to whose files something happens after the first record."""

    def read_units(self, units, seed=0):
        for number, item in enumerate(super().read_units(units, seed)):
            yield item
            if number == 0 and len(units) > 1:  # and not when a fast tokenizer is tried on some of its files
                HAPPENS[0](units[-1])


HAPPENS: list[Callable[[Path], None]] = [lambda path: None]


def _build_shifty(folder: Path, tokenizer: Any, happens: Callable[[Path], None]) -> Path:
    HAPPENS[0] = happens
    out = folder / "out" / "web"
    source = Shifty(kind="jsonl", path="*.jsonl", max_bad=0.5)
    build_corpus(source, out, tokenizer=tokenizer, root=folder, engine=EngineConfig(workers=1), seed=0)
    return out


def _write_parts(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD * 50)
    (folder / "b.jsonl").write_bytes(lines({"text": "three"}) * 50)


@pytest.mark.parametrize("damage", ["removed", "cut", "grown"])
def test_a_source_that_changes_while_it_is_read_is_refused_and_then_read_whole(damage, tmp_path, tokenizer):
    _write_parts(tmp_path)
    content = (tmp_path / "b.jsonl").read_bytes()
    happens = {
        "removed": Path.unlink,
        "cut": lambda path: path.write_bytes(content[: len(content) // 2]),
        "grown": lambda path: path.write_bytes(content * 2),
    }[damage]
    with pytest.raises((UnspoolError, FileNotFoundError)) as error:
        _build_shifty(tmp_path, tokenizer, happens)
    assert "b.jsonl" in str(error.value) or "changed during reading" in str(error.value)
    assert not (tmp_path / "out" / "web").exists()

    (tmp_path / "b.jsonl").write_bytes(content)
    out = _build_shifty(tmp_path, tokenizer, lambda path: None)
    assert len(open_corpus(out)) == 150, "work that had read other content was reused"


def test_a_failing_disk_is_not_a_bad_record(tmp_path, tokenizer, monkeypatch):
    """A share of bad records may be allowed; a file that the disk does not give must still stop the run."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(GOOD * 50)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(GOOD))

    def fail(path: Path, mode: str) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.gzip, "open", fail)
    with pytest.raises((DataError, OSError)) as error:
        build(folder, "jsonl", tokenizer, max_bad=0.5)
    assert re.search(r"[Ii]nput/output error.*b\.jsonl\.gz|b\.jsonl\.gz: input/output error; check", str(error.value))
    assert not (tmp_path / "out" / "web").exists()


def test_there_are_as_many_hostile_inputs_as_promised():
    assert len(CASES) >= 30
