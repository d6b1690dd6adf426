"""MRCR recovery on the user's conversations, in the format of OpenAI's data set."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import unspool
from unspool.core.errors import ConfigError, DataError
from unspool.evals.suites.mrcr import MRCREval, given_conversation
from unspool.evals.suites.mrcr_data import choose_dialogs, read_dialogs


def record(number: int = 0, *, turns: int = 6, needles: int = 2, wanted: int = 1, **changes) -> dict:
    """A conversation with `needles` equal requests, in the published format."""
    messages = [{"role": "user", "content": "Here are some solved examples."}]
    for at in range(turns):
        request = "write a poem about tapirs" if at < needles else f"write a speech about rocks {at}"
        messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "content": f"Reply {at} of record {number}: mita bela dora."})
    asked = f"Prepend aYoo8 to the {wanted + 1}th (1 indexed) poem about tapirs. Do not include any other text."
    messages.append({"role": "user", "content": asked})
    return {
        "prompt": json.dumps(messages),
        "answer": f"aYoo8Reply {wanted} of record {number}: mita bela dora.",
        "random_string_to_prepend": "aYoo8",
        "n_needles": needles,
        "desired_msg_index": 1 + 2 * wanted,
        "total_messages": len(messages),
        "n_chars": 100,
        **changes,
    }


def write(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(path)


def test_a_record_becomes_the_paired_contexts(tmp_path, tokenizer):
    [dialog] = read_dialogs(write(tmp_path / "data.jsonl", [record(wanted=1)]))
    made = given_conversation(tokenizer, dialog, seed=0, length=1024, index=0)
    texts = {
        name: tokenizer.decode(getattr(made, name), skip_special_tokens=True) for name in ("full", "oracle", "query")
    }

    assert dialog.reply == "Reply 1 of record 0: mita bela dora." and dialog.needles == 2
    assert texts["full"].startswith(
        "Here are some solved examples.\n\nUser: write a poem about tapirs\nAssistant: Reply 0"
    )
    assert all(text.endswith(f"Assistant: aYoo8{dialog.reply}") for text in texts.values())
    assert texts["oracle"].count("write a poem") == 1 and texts["oracle"].count("Reply 1 of") == 2
    assert "write a poem" not in texts["query"]
    answer = tokenizer.decode(made.full[-made.answer_tokens :])
    assert answer == dialog.reply, "the string that the question gives away is not scored"


def test_parquet_files_and_lists_of_messages_are_read_too(tmp_path):
    rows = [record(number) for number in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    as_lists = write(tmp_path / "data.jsonl", [{**row, "prompt": json.loads(row["prompt"])} for row in rows])

    assert read_dialogs(str(tmp_path / "data.parquet")) == read_dialogs(as_lists)


def test_conversations_are_chosen_by_length_and_evenly_over_needles(tmp_path):
    rows = [
        record(at, turns=turns, needles=needles) for at, (turns, needles) in enumerate([(4, 2), (9, 2), (4, 4)] * 4)
    ]
    path = write(tmp_path / "data.jsonl", rows)

    def count(dialog):
        return 100 * len(dialog.turns)

    found = choose_dialogs(path, [512, 1024], [2, 4], 4, count)
    assert [one.needles for one in found[512]] == [2, 4, 2, 4]
    assert [len(one.turns) for one in found[1024]] == [9, 9], "two per number of needles at most"
    with pytest.raises(
        DataError,
        match=r"no conversation with 2 or 4 needles has 1025 to 2048 tokens; those counted "
        r"have 400 to 900 tokens\. Remove length 2K, or use another file",
    ):
        choose_dialogs(path, [512, 2048], [2, 4], 4, count)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": None}, r"record 1: no field answer\. Expected prompt: a list of messages .+openai/mrcr"),
        ({"prompt": "no JSON"}, r"record 1: prompt is not a list of messages with role and content"),
        ({"prompt": json.dumps([{"role": "user"}])}, r"prompt is not a list .+KeyError: 'content'"),
        ({"prompt": "[]"}, r"prompt has no messages; expected a list of messages"),
        ({"prompt": 5}, r"prompt is not a list of messages"),
        ({"n_needles": "two"}, r"n_needles 'two' is not a number"),
        ({"answer": "aYoo8Something else"}, r"its answer is no reply in its prompt; remove the record"),
    ],
)
def test_a_wrong_record_is_named(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        read_dialogs(write(tmp_path / "data.jsonl", [record(**changes)]))


def test_settings_of_generated_conversations_are_refused_beside_data():
    with pytest.raises(ConfigError, match="reply_words only for generated conversations"):
        unspool.evaluate("asset:tiny-base", "mrcr", [256], paths={"data": "x"}, suite_settings={"reply_words": 12})
    with pytest.raises(ConfigError, match="file not found; use a JSON, JSONL or Parquet file, or hub:ORG/NAME"):
        unspool.evaluate("asset:tiny-base", "mrcr", [256], paths={"data": "missing.jsonl"})
    with pytest.raises(ValueError, match="path dta is not known; the only one is data"):
        MRCREval.model_validate({"suite": "mrcr", "lengths": [256], "paths": {"dta": "x"}})


def test_the_users_conversations_are_scored_end_to_end(tmp_path):
    path = write(tmp_path / "data.jsonl", [record(number, wanted=number % 2) for number in range(3)])
    result = unspool.evaluate("asset:tiny-base", "mrcr", [512], samples=4, paths={"data": path})
    cells = {cell.get("task"): cell for cell in result.cells()}

    assert cells[None]["n"] == cells["2 needles"]["n"] == 3 and cells["8 needles"]["n"] == 0
    assert cells[None]["metric"] == "recovery" and cells[None]["oracle"] < cells[None]["query"]
