"""Loss masks go with their tokens: into the corpus, through every way of filling rows, to the labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.conftest import prose
from data.tokenize.chat_families import TEMPLATES, chat_encoder, chat_tokenizer
from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError, DataError
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.store import CorpusReader, CorpusWriter, open_corpus
from unspool.data.packing import order, pack
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.row import IGNORE, labels
from unspool.data.packing.store import open_rows
from unspool.data.sources.base import Message
from unspool.data.sources.chat import ChatSource
from unspool.data.sources.jsonl import JsonlSource
from unspool.data.strategies import cip, nextlong
from unspool.data.strategies.utk import tangle

NAME = "smollm2"
# In these tests users shout and assistants do not, so that a row's text shows whose it is.
TALKS = [
    [
        message
        for turn in range(1 + number % 3)
        for message in (
            Message("user", prose(3 + number % 20, seed=number + turn).upper()),
            Message("assistant", prose(2 + (7 * number) % 60, seed=1000 + number + turn)),
        )
    ]
    for number in range(60)
]


def save_talks(path: Path, talks: list[list[Message]] = TALKS) -> Path:
    lines = [json.dumps({"messages": [message._asdict() for message in talk]}) + "\n" for talk in talks]
    path.write_text("".join(lines))
    return path


def corpus(folder: Path, **changes: Any) -> dict[str, Any]:
    source = ChatSource(kind="chat", path="talks.jsonl", **changes)
    return build_corpus(
        source,
        folder / "talks",
        tokenizer=chat_tokenizer(NAME),
        root=folder,
        engine=EngineConfig(workers=1),
        seed=0,
    )


@pytest.fixture(scope="module")
def talks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_talks(folder / "talks.jsonl")
    corpus(folder)
    (folder / "books.jsonl").write_text("".join(json.dumps({"text": prose(300, seed)}) + "\n" for seed in range(9)))
    build_corpus(
        JsonlSource(kind="jsonl", path="books.jsonl"),
        folder / "books",
        tokenizer=chat_tokenizer(NAME),
        root=folder,
        engine=EngineConfig(workers=1),
        seed=0,
    )
    return folder


def rows(talks: Path, out: Path, **config: Any) -> tuple[dict[str, Any], list[Any]]:
    settings = DatasetConfig.model_validate({"from": "talks", "seq_len": 256} | config)
    corpora = {name: talks / name for name in ("talks", "books")}
    counts = build_rows(settings, corpora, out / "rows", tokenizer=chat_tokenizer(NAME), seed=0)
    built = open_rows(out / "rows")
    return counts, [built[index] for index in range(len(built))]


# The corpus


def test_a_corpus_holds_what_the_encoder_gives_and_counts_what_is_trained(talks):
    reader, counts = open_corpus(talks / "talks"), read_manifest(talks / "talks")["counts"]
    assert len(reader) == len(TALKS)
    trained = 0
    for index, talk in enumerate(TALKS):
        encoded = chat_encoder(NAME).encode(talk)
        np.testing.assert_array_equal(reader[index], encoded.tokens)
        np.testing.assert_array_equal(reader.loss_mask(index), encoded.loss_mask)
        np.testing.assert_array_equal(reader.stored_mask(index)[2:9], encoded.loss_mask[2:9])
        np.testing.assert_array_equal(reader.stored(index)[2:9], encoded.tokens[2:9])
        trained += int(encoded.loss_mask.sum())
    assert counts["trained_tokens"] == trained < counts["tokens"]


def test_documents_without_masks_have_no_mask_column(tmp_path, talks):
    with CorpusWriter(tmp_path / "docs-00000.arrow") as writer:
        writer.append("a", np.arange(5, dtype=np.uint32))
    reader = CorpusReader([tmp_path / "docs-00000.arrow"])
    assert not reader.is_masked and reader.loss_mask(0) is None and reader.stored_mask(0) is None
    assert not open_corpus(talks / "books").is_masked
    assert "trained_tokens" not in read_manifest(talks / "books")["counts"]


def test_a_limit_keeps_the_masks_of_kept_documents(tmp_path):
    save_talks(tmp_path / "talks.jsonl")
    corpus(tmp_path, limit=500)
    reader = open_corpus(tmp_path / "talks")
    assert 1 < len(reader) < len(TALKS)
    for index in range(len(reader)):
        np.testing.assert_array_equal(reader.loss_mask(index), chat_encoder(NAME).encode(TALKS[index]).loss_mask)


def test_the_template_is_part_of_a_corpus_identity(tmp_path, capsys):
    save_talks(tmp_path / "talks.jsonl", TALKS[:5])
    text = (TEMPLATES / "smollm2.jinja").read_text()
    (tmp_path / "own.jinja").write_text(text)
    corpus(tmp_path)
    assert (tmp_path / "talks" / "chat_template.jinja").read_text() == text
    corpus(tmp_path, template="own.jinja")
    assert "corpus talks: up to date" in capsys.readouterr().err, "the same template from elsewhere changes nothing"

    (tmp_path / "own.jinja").write_text(text.replace("briefly", "at length"))
    corpus(tmp_path, template="own.jinja")
    assert "changed inputs: template" in capsys.readouterr().err


def test_records_that_cannot_be_used_are_quarantined_up_to_a_share(tmp_path):
    path = save_talks(tmp_path / "talks.jsonl")
    path.write_text(path.read_text() + '{"messages": []}\n' + json.dumps({"data": ["a\ufdd0", "b"]}) + "\n")
    with pytest.raises(DataError, match=r"2 of 62 records .* 1 empty_conversation, 1 noncharacter"):
        corpus(tmp_path)
    counts = corpus(tmp_path, max_bad=0.1)
    assert (counts["documents"], counts["quarantined"]) == (60, {"empty_conversation": 1, "noncharacter": 1})
    listed = [json.loads(line) for line in (tmp_path / "talks" / "quarantine.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["record"]) for entry in listed] == [
        ("talks.jsonl", "line 61"),
        ("talks.jsonl", "record 62"),
    ]


def test_conversations_without_a_template_are_refused_before_any_work(tmp_path):
    save_talks(tmp_path / "talks.jsonl")
    bare = chat_tokenizer.__wrapped__(NAME)
    bare.chat_template = None
    source = ChatSource(kind="chat", path="talks.jsonl")
    with pytest.raises(ConfigError, match=r"source talks: .* has no chat template"):
        build_corpus(source, tmp_path / "talks", tokenizer=bare, root=tmp_path, engine=EngineConfig(workers=1), seed=0)
    assert not (tmp_path / "talks").exists() and not (tmp_path / "talks.partial").exists()


# Rows

WAYS: dict[str, dict[str, Any]] = {
    "concat": {"packing": "concat"},
    "truncate": {"packing": "truncate"},
    "single_doc": {"packing": "single_doc", "seq_len": 32},
    "best_fit": {"packing": "best_fit"},
    "cip": {"packing": "truncate", "cip": {"pieces": 2}},
    "utk": {"packing": "truncate", "utk": {"min_split": 32, "probability": 1}},
    "nextlong": {"packing": "truncate", "nextlong": {"chunk": 32}},
    "upsample": {"upsample": {"above": 64, "times": 2}},
    "pose": {"pose": {"target": 1024}},
    "limit": {"limit": 1024},
    "longest": {"packing": "concat", "cip": {"pieces": 2, "longest": 48}},
}


def asked_texts(row: Any) -> list[str]:
    """The tokens that a row's labels ask for, run by run."""
    targets = labels(row.tokens, row.doc_lens, row.loss_mask)
    tokens = targets[targets != IGNORE]
    return chat_tokenizer(NAME).decode(tokens.tolist())


def check_rows(found: list[Any], counts: dict[str, Any]) -> None:
    """No prediction target is a user's text, and most of the assistant's text is a target."""
    asked = "".join(asked_texts(row) for row in found)
    assert asked == asked.lower(), "a user's words are asked for"
    for never in ("<|im_start|>", "user", "system", "you answer briefly"):
        assert never not in asked
    assert len(asked) > 400 and asked.count("<|im_end|>") > 5
    trained = [labels(row.tokens, row.doc_lens, row.loss_mask) != IGNORE for row in found]
    assert counts["trained_tokens"] == sum(int(each.sum()) for each in trained) > 0
    assert counts["untrained_rows"] == sum(not each.any() for each in trained)


@pytest.mark.parametrize("way", WAYS)
def test_masks_stay_with_their_tokens_however_rows_are_filled(talks, tmp_path, way):
    counts, found = rows(talks, tmp_path, **WAYS[way])
    if way == "utk":  # marks and labels of pieces are targets as without a mask
        marks = list(counts["added_tokens"].values())
        assert any(np.isin(row.tokens, marks).any() for row in found), "nothing was tangled"
        text = [row.tokens[row.loss_mask & ~np.isin(row.tokens, marks)] for row in found]
        said = chat_tokenizer(NAME).decode(np.concatenate(text).tolist())
        assert "<|im_start|>" not in said and "RIVER" not in said and "river" in said
        return
    check_rows(found, counts)


def test_a_mix_with_plain_text_trains_on_all_of_that(talks, tmp_path):
    _, found = rows(talks, tmp_path, **{"from": {"talks": 0.5, "books": 0.5}, "packing": "concat"})
    books = [doc.tobytes() for doc in open_corpus(talks / "books")]
    whole = 0
    for row in found:
        stops = np.cumsum(row.doc_lens)
        for start, stop in zip(stops - row.doc_lens, stops, strict=True):
            piece, mask = row.tokens[start:stop], row.loss_mask[start:stop]
            if any(piece.tobytes() in book for book in books):
                whole += 1
                assert mask.all()
            elif len(piece) > 60:
                assert not mask.all()
    assert whole


def test_rows_without_prediction_targets_are_dropped_and_counted(tmp_path):
    long = [Message("user", prose(600, seed=1).upper()), Message("assistant", "yes")]
    save_talks(tmp_path / "talks.jsonl", [*TALKS[:20], long])
    corpus(tmp_path)
    counts, found = rows(tmp_path, tmp_path, packing="concat", seq_len=64)
    assert counts["dropped"]["untrained"] >= 4 * 64
    assert counts["untrained_rows"] == 0
    assert counts["tokens_in"] == counts["tokens"] + sum(counts["dropped"].values())
    check_rows(found, counts)


def test_too_short_rows_say_so(tmp_path):
    save_talks(tmp_path / "talks.jsonl", [[Message("user", prose(90, seed=1)), Message("assistant", "yes")]])
    corpus(tmp_path)
    with pytest.raises(DataError, match="no row of 64 holds a trained token"):
        rows(tmp_path, tmp_path, packing="truncate", seq_len=64)


def test_rows_keep_the_template_for_the_model_that_is_trained_on_them(talks, tmp_path):
    rows(talks, tmp_path)
    assert (tmp_path / "rows" / "chat_template.jinja").read_text() == chat_tokenizer(NAME).chat_template


# The checks above can fail


@pytest.mark.parametrize(
    ("way", "module", "name"),
    [
        ("concat", order, "Doc"),
        ("truncate", order, "Doc"),
        ("best_fit", order, "Doc"),
        ("cip", cip, "Row"),
        ("nextlong", nextlong, "Row"),
        ("utk", tangle, "Row"),
        ("truncate", pack, "Row"),
    ],
)
def test_a_mask_that_is_one_token_off_would_be_noticed(talks, tmp_path, monkeypatch, way, module, name):
    real = getattr(module, name)

    def shifted(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        mask = made.loss_mask
        if mask is None:
            return made
        values = {field: getattr(made, field) for field in made.__slots__}
        return real(**values | {"loss_mask": np.roll(mask[0 : len(mask)], -1)})

    monkeypatch.setattr(module, name, shifted)
    counts, found = rows(talks, tmp_path, **WAYS[way])
    with pytest.raises(AssertionError):
        if way == "utk":
            marks = list(counts["added_tokens"].values())
            text = [row.tokens[row.loss_mask & ~np.isin(row.tokens, marks)] for row in found]
            said = chat_tokenizer(NAME).decode(np.concatenate(text).tolist())
            assert "\nthe" not in said and "<|im_end|>\n" not in said and "\n" not in said
        else:
            check_rows(found, counts)
