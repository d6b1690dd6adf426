"""Whatever a reader is given, it ends, it stays small, it gives items and nothing else, and a corpus adds up."""

import faulthandler
import json
import os
import re
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unspool.core.errors import UnspoolError
from unspool.core.rng import rng_for
from unspool.data.corpus import build
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.store import open_corpus
from unspool.data.sources import archives, arrow, base, jsonl, mds, repos, text
from unspool.data.sources.base import Bad, Document, Filtered, Item, read_items
from unspool.data.tokenize.encoder import build_encoder

from .fuzz_inputs import TARGETS, Input, textbooks_inputs
from .fuzzing import LIMIT, UNPACKED_LIMIT, damage

# Fewer folders than files, since most of the time goes into making and removing them.
NUM_INPUTS = {target: 350 if target == "repos folder" else 750 for target in TARGETS}
# Far beyond what any input takes, also where the machine has other things to do.
SECONDS = 60
# What one input may make of itself, and what all of them together may add to the memory of the process.
PRODUCED_BYTES = 64 << 20
GROWTH_BYTES = 512 << 20
FOLDERS_PER_TARGET = 25
ONE = EngineConfig(workers=1)


class HungError(BaseException):
    """Not an Exception, so that no reader can take it for damage."""


@contextmanager
def watched(what: str) -> Iterator[None]:
    """HungError after some seconds."""

    def ring(number: int, frame: object) -> None:
        raise HungError(f"{what} took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def low_limits(monkeypatch):
    """So that small inputs can be too long, and can unpack to too much."""
    for module in (text, jsonl, arrow, mds):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", LIMIT)
    monkeypatch.setattr(repos, "MAX_TEXT_BYTES", 4 * LIMIT)
    monkeypatch.setattr(archives, "SMALL_BYTES", UNPACKED_LIMIT)
    monkeypatch.setattr(archives, "MAX_RATIO", 20)
    monkeypatch.setattr(archives, "MAX_HEADER_BYTES", LIMIT)


def write(given: Input, folder: Path) -> None:
    for name, data in given.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for name, target in given.links.items():
        (folder / name).symlink_to(target)
    for name in given.pipes:
        os.mkfifo(folder / name)


def read_all(given: Input, folder: Path) -> list[Item] | None:
    """The items; None if the source is refused before reading, with words for the user."""
    try:
        units = given.source.units(folder)
    except UnspoolError:
        return None
    return list(read_items(given.source, units, seed=3))


def check(item: Item) -> int:
    """Assert that an item is what the corpus can store; returns how many bytes it holds."""
    if isinstance(item, Document):
        words = [item.id, item.text, *(word for part in item.left_out for word in part)]
        assert "\0" not in item.text
        size = 0
        if item.tokens is not None:
            assert not item.text
            assert type(item.tokens) is np.ndarray
            assert (item.tokens.dtype, item.tokens.ndim) == (np.uint32, 1)
            assert len(item.tokens)
            size = item.tokens.nbytes
    elif isinstance(item, Bad):
        words, size = [item.file, item.record, item.reason, item.detail], 0
        assert item.reason.replace("_", "").isalnum()
        assert item.detail
    else:
        assert type(item) is Filtered
        words, size = [item.id, item.reason], 0
    assert all(type(word) is str for word in words)
    return size + sum(len(word.encode()) for word in words)


def outcome(item: Item) -> str:
    return "document" if isinstance(item, Document) else item.reason


def feed(target: str, count: int, seed: int, folder: Path) -> Counter[str]:
    """Damaged inputs, one after another; how often each outcome was seen. The last input stays in the folder."""
    valid = TARGETS[target]()
    seen: Counter[str] = Counter()
    for number in range(count):
        given = damage(rng_for(seed, "fuzz", target, number), valid)
        place = folder / "input"
        shutil.rmtree(place, ignore_errors=True)
        write(given, place)
        what = f"{target}, seed {seed}, input {number} (in {place})"
        try:
            with watched(what):
                items = read_all(given, place)
            produced = sum(map(check, items or []))
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        assert produced < PRODUCED_BYTES + given.size, what
        seen.update(["refused"] if items is None else map(outcome, items))
    return seen


def feed_within_memory(target: str, count: int, seed: int, folder: Path) -> Counter[str]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Should a hang be where Python cannot interrupt it, the process ends with a traceback.
    faulthandler.dump_traceback_later(count, exit=True, file=sys.__stderr__)
    try:
        seen = feed(target, count, seed, folder)
    finally:
        faulthandler.cancel_dump_traceback_later()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown << 10 < GROWTH_BYTES, f"{target}: the process has grown by {grown >> 10} MiB"
    return seen


# What the damage must bring about, or it would test less than it seems to.
EXPECTED = {
    "text": "invalid_utf8 nul too_long truncated unreadable",
    "jsonl": "invalid_utf8 nul too_long broken_json not_an_object missing_field not_text surrogate",
    "jsonl.gz": "truncated unreadable broken_json missing_field too_long",
    "jsonl.zst": "truncated unreadable broken_json missing_field too_long",
    "textbooks": "truncated broken_json missing_field not_text joined too_long surrogate",
    "parquet": "truncated unreadable corrupt_page invalid_utf8",
    "repos tar.gz": "truncated unreadable archive_bomb",
    "repos zip": "truncated unreadable archive_bomb",
    "repos whl": "truncated unreadable archive_bomb",
    "repos folder": "",
    "mds": "bad_offsets bad_borders not_tokens truncated unreadable broken_json unsafe_path missing_field",
    "mds zstd": "bad_offsets bad_borders not_tokens truncated unreadable broken_json archive_bomb",
    "hf files": "refused truncated unreadable broken_json",
    "hf save_to_disk": "refused truncated unreadable corrupt_page invalid_utf8",
}


def test_there_are_ten_thousand_inputs_for_all_readers():
    assert sum(NUM_INPUTS.values()) >= 10_000
    assert set(EXPECTED) == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_the_inputs_are_valid_before_they_are_damaged(target, tmp_path, low_limits):
    for number, given in enumerate(TARGETS[target]()):
        write(given, tmp_path / str(number))
        items = read_all(given, tmp_path / str(number)) or []
        assert any(isinstance(item, Document) for item in items)
        # A null has its place in a Parquet file.
        assert {outcome(item) for item in items} <= {"document", "joined", "not_text"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("share", [0.4, pytest.param(1, marks=pytest.mark.slow)])
def test_no_damage_makes_a_reader_fail_hang_or_grow(target, share, tmp_path, low_limits):
    seen = feed_within_memory(target, round(share * NUM_INPUTS[target]), 0, tmp_path)
    assert {"document", *EXPECTED[target].split()} <= set(seen), seen


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_no_damage_makes_a_reader_fail_hang_or_grow_in_the_long_run(target, tmp_path, low_limits):
    feed_within_memory(target, 20 * NUM_INPUTS[target], 1, tmp_path)


# Whole corpora


@pytest.fixture
def quick_builds(monkeypatch):
    """Without the slowest parts of a small corpus, which have their own tests."""
    monkeypatch.setattr(build, "choose_route", lambda encoder, sample: encoder)
    monkeypatch.setattr(build, "forget_engines", lambda *_: None)  # looks through all that Python holds
    monkeypatch.setattr(base, "TASK_BYTES", 2000)


def numbered(given: Input, number: int) -> Input:
    """The same input under names that allow others of its kind next to it."""
    kind = given.source.kind

    def name(old: str) -> str:
        if kind == "hf":  # whose names are their content
            return re.sub(r"00000-of-00001|(?<=train)(?=[.])|(?<=part)", f"-{number:05d}-of-00004", old, count=1)
        return f"{number}/{old}" if kind == "mds" else f"{number}-{old}"

    return Input(
        given.source,
        {name(old): data for old, data in given.files.items()},
        {name(old): target for old, target in given.links.items()},
        tuple(map(name, given.pipes)),
    )


def only_data(given: Input) -> Input:
    if given.source.kind != "hf":
        return given
    files = {name: data for name, data in given.files.items() if name.startswith(("data", "train"))}
    return replace(given, files=files)


def mixed(rng: np.random.Generator, valid: list[Input], whole: Input) -> tuple[Input, list[Input]]:
    """An undamaged input, and several damaged ones for the same folder."""
    damaged = [numbered(damage(rng, valid), number) for number in (0, 2, 3)]
    return numbered(whole, 1), damaged


def write_around(given: Input, inputs: list[Input], folder: Path) -> None:
    for each in inputs:
        write(each, folder)
    if "README.md" in given.files:
        (folder / "README.md").write_bytes(given.files["README.md"])
    if "state.json" in given.files:
        names = sorted(path.name for path in folder.glob("*.arrow"))
        state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
        (folder / "state.json").write_text(json.dumps(state))


def stored(items: list[Item], encoder: Any) -> list[tuple[str, list[int]]]:
    """What a corpus of these items holds."""
    documents = [item for item in items if isinstance(item, Document) and (item.text or item.tokens is not None)]
    encoded = iter(encoder.encode([item.text for item in documents if item.tokens is None]))
    return [(item.id, (next(encoded) if item.tokens is None else item.tokens).tolist()) for item in documents]


@pytest.mark.parametrize("target", TARGETS)
def test_the_sums_of_a_corpus_hold_and_whole_files_are_untouched_by_damaged_ones(
    target, tmp_path, low_limits, quick_builds, tokenizer
):
    encoder = build_encoder(tokenizer)
    valid = TARGETS[target]()
    # Chapters of one subject are joined from all files, so undamaged input needs separate subjects.
    wholes = textbooks_inputs("Untouched ") if target == "textbooks" else valid
    totals: Counter[str] = Counter()
    for number in range(FOLDERS_PER_TARGET):
        which = number % len(valid)
        whole, damaged = mixed(
            rng_for(0, "fuzz folders", target, number), [only_data(valid[which])], only_data(wholes[which])
        )
        alone, root = tmp_path / f"{number}-alone", tmp_path / f"{number}"
        write_around(valid[which], [whole], alone)
        write_around(valid[which], [whole, *damaged], root)
        expected = stored(read_all(whole, alone) or [], encoder)
        assert expected
        source = whole.source.model_copy(update={"max_bad": 1.0})

        counts = build_corpus(
            source, tmp_path / "out" / str(number), tokenizer=tokenizer, root=root, engine=ONE, seed=3
        )

        bad, filtered = sum(counts["quarantined"].values()), sum(counts["filtered"].values())
        assert counts["records"] == counts["documents"] + bad + filtered, root
        assert counts["records"] == len(read_all(whole, root) or []), root
        listed = tmp_path / "out" / str(number) / "quarantine.jsonl"
        assert bad == (len(listed.read_text().splitlines()) if bad else 0), root
        assert listed.exists() == bool(bad)
        reader = open_corpus(tmp_path / "out" / str(number))
        assert len(reader) == counts["documents"], root
        found = {(reader.id(index), tuple(reader[index].tolist())) for index in range(len(reader))}
        assert {(name, tuple(tokens)) for name, tokens in expected} <= found, root
        totals.update(bad=bad, documents=counts["documents"], whole=len(expected))
    assert totals["documents"] > totals["whole"], "no damaged file gave a document"
    assert totals["bad"] or target == "repos folder", totals
