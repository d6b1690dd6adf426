"""Each conversation's format is detected; unusable ones are quarantined with a reason."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from unspool.core.errors import ConfigError
from unspool.data.sources.base import Bad, Document, Message, read_items
from unspool.data.sources.chat import ChatSource

TALK = (Message("user", "why?"), Message("assistant", "because"))
WITH_SYSTEM = (Message("system", "be brief"), *TALK)
MESSAGES = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because"}]
SHAPES = {
    "ultrachat": ({"prompt": "why?", "messages": MESSAGES}, TALK),
    "ultrachat, first form": ({"id": "1", "data": ["why?", "because"]}, TALK),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because"}]},
        TALK,
    ),
    "sharegpt with system": (
        {
            "conversations": [
                {"from": s, "value": v} for s, v in (("system", "be brief"), ("human", "why?"), ("gpt", "because"))
            ]
        },
        WITH_SYSTEM,
    ),
    "sharegpt, system beside": (
        {
            "system": "be brief",
            "conversations": [{"from": "user", "value": "why?"}, {"from": "model", "value": "because"}],
        },
        WITH_SYSTEM,
    ),
    "tulu": (
        {"id": "x", "source": "flan", "messages": [{"role": "system", "content": "be brief"}, *MESSAGES]},
        WITH_SYSTEM,
    ),
    "openai": (
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "y?"}]},
                {"role": "assistant", "content": "because", "tool_calls": None},
            ]
        },
        WITH_SYSTEM,
    ),
}
BAD = {
    "empty list": ({"messages": []}, "empty_conversation"),
    "no words": ({"data": [" ", ""]}, "empty_conversation"),
    "no assistant": ({"messages": MESSAGES[:1]}, "no_assistant"),
    "another field": ({"text": "why?"}, "missing_field"),
    "a text for a list": ({"messages": "why?"}, "unknown_shape"),
    "other keys": ({"messages": [{"speaker": "a", "words": "b"}]}, "unknown_shape"),
    "texts and objects": ({"messages": ["why?", MESSAGES[1]]}, "unknown_shape"),
    "unknown role": ({"messages": [{"role": "alien", "content": "x"}, *MESSAGES]}, "unknown_role"),
    "a tool's answer": ({"messages": [*MESSAGES, {"role": "tool", "content": "3"}]}, "tool_role"),
    "a tool call": ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]}, "tool_role"),
    "a function call": ({"conversations": [{"from": "function_call", "value": "{}"}]}, "tool_role"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, MESSAGES[1]]}, "not_text"),
    "null": ({"messages": [{"role": "user", "content": None}, MESSAGES[1]]}, "not_text"),
    "NUL": ({"messages": [{"role": "user", "content": "a\0"}, MESSAGES[1]]}, "nul"),
}  # fmt: skip


def read(path, **changes):
    source = ChatSource(kind="chat", path=path.name, **changes)
    return list(read_items(source, source.units(path.parent)))


def save(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_all_shapes_are_read_from_one_file(tmp_path):
    items = read(save(tmp_path / "a.jsonl", [record for record, _ in SHAPES.values()]))
    assert [item.messages for item in items] == [expected for _, expected in SHAPES.values()]
    assert [item.id for item in items] == [f"a.jsonl:{line}" for line in range(1, len(SHAPES) + 1)]


@pytest.mark.parametrize("kind", BAD)
def test_an_unusable_conversation_is_quarantined_with_its_reason(kind, tmp_path):
    record, reason = BAD[kind]
    bad, good = read(save(tmp_path / "a.jsonl", [record, {"messages": MESSAGES}]))
    assert isinstance(bad, Bad) and (bad.reason, bad.record) == (reason, "line 1")
    assert isinstance(good, Document)


def test_a_named_field_is_the_only_one_looked_at(tmp_path):
    path = save(tmp_path / "a.jsonl", [{"talk": MESSAGES}, {"messages": MESSAGES}])
    good, bad = read(path, messages="talk")
    assert good.messages == TALK
    assert bad.reason == "missing_field" and "'talk'" in bad.detail


def test_compressed_files_and_parquet_give_the_same(tmp_path):
    lines = "".join(json.dumps(record) + "\n" for record, _ in SHAPES.values()).encode()
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(lines))
    tulu, _ = SHAPES["tulu"]
    sharegpt = {
        "system": "be brief",
        "conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because"}],
    }
    for name, record in (("c", tulu), ("d", sharegpt), ("e", {"data": ["why?", "because"]})):
        pq.write_table(pa.Table.from_pylist([record, record]), folder / f"{name}.parquet")
    found = [item.messages for item in read(folder)]
    every = [expected for _, expected in SHAPES.values()]
    assert found == [*every, *every, *[WITH_SYSTEM] * 4, *[TALK] * 2]


def test_parquet_with_bad_records_or_columns_loses_no_others(tmp_path):
    pq.write_table(
        pa.Table.from_pylist([{"messages": MESSAGES}, {"messages": []}, {"messages": MESSAGES}]), tmp_path / "a.parquet"
    )
    first, bad, last = read(tmp_path / "a.parquet")
    assert first.messages == last.messages == TALK
    assert (bad.record, bad.reason) == ("record 2", "empty_conversation")

    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    (bad,) = read(tmp_path / "b.parquet")
    assert (bad.record, bad.reason) == ("whole file", "missing_field")


def test_a_string_that_is_not_utf8_costs_one_record(tmp_path):
    values = pa.array([b"why?", b"\xff"]).view(pa.string())
    role = pa.array(["assistant", "assistant"])
    turns = pa.StructArray.from_arrays([role, values], ["role", "content"])
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 1, 2], turns)}), tmp_path / "a.parquet")
    good, bad = read(tmp_path / "a.parquet")
    assert isinstance(good, Document) and bad.reason == "invalid_utf8"


def test_a_folder_without_conversations_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match=r"holds no .* or .parquet files; a source of kind chat needs"):
        read(tmp_path / "data")
