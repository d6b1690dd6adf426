"""Hostile archives and data files: how each is written, and the sentence or the documents it ends in."""

import gzip
import io
import json
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from data.sources import mds_folders
from data.sources.packing import special, tar_bytes, write_tar, write_zip

# A lower limit, so that an input above it is small enough for a test.
RECORD_BYTES = 4 << 20

Write = Callable[[Path], Any]
CASES: dict[str, tuple[Write, str, str | list[str]]] = {}


def hostile(kind: str, wanted: str | list[str]) -> Callable[[Write], Write]:
    """Add a case: a writer of files, the source kind that reads them, and the sentence or the texts it ends in."""

    def add(write: Write) -> Write:
        CASES[write.__name__.removeprefix("_")] = (write, kind, wanted)
        return write

    return add


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


GOOD = lines({"text": "one"}, {"text": "two"})


# Archives


@hostile("repos", r"bomb\.zip.*unpacks to more than")
def _zip_bomb(folder: Path) -> None:
    write_zip(folder / "bomb.zip", {f"{name}.py": bytes(2 << 20) for name in "abcd"})


@hostile("repos", r"deep\.tar\.xz.*unpacks to more than")
def _tar_bomb(folder: Path) -> None:
    write_tar(folder / "deep.tar.xz", tar_bytes({"zeros.py": bytes(6 << 20)}))


@hostile("repos", r"overlaps the next")
def _zip_whose_members_share_their_bytes(folder: Path) -> None:
    path = write_zip(folder / "quine.zip", {"a.py": b"a" * 999, "b.py": b"b" * 999}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    second = data.rindex(b"PK\1\2")
    data[second + 42 : second + 46] = struct.pack("<I", 0)  # the second member begins where the first does
    path.write_bytes(data)


@hostile("repos", ["inside.py"])
def _tar_with_paths_that_lead_out(folder: Path) -> None:
    files = {
        "../outside.py": b"x = 1\n",
        "/etc/outside.py": b"x = 1\n",
        "a/../../o.py": b"x\n",
        "inside.py": b"y = 1\n",
    }
    write_tar(folder / "walk.tar", tar_bytes(files))


@hostile("repos", ["inside.py"])
def _zip_with_paths_that_lead_out(folder: Path) -> None:
    write_zip(folder / "walk.zip", {"..\\outside.py": b"x = 1\n", "C:\\o.py": b"x\n", "inside.py": b"y = 1\n"})


@hostile("repos", ["inside.py"])
def _tar_with_links_and_devices(folder: Path) -> None:
    extra = [
        special("passwd.py", tarfile.SYMTYPE, "/etc/passwd"),
        special("hard.py", tarfile.LNKTYPE, "/etc/passwd"),
        special("null.py", tarfile.CHRTYPE),
        special("pipe.py", tarfile.FIFOTYPE),
    ]
    write_tar(folder / "links.tar.gz", tar_bytes({"inside.py": b"y = 1\n"}, extra))


@hostile("repos", r"middle\.tar.*header's checksum is wrong")
def _tar_damaged_in_the_middle(folder: Path) -> None:
    data = bytearray(tar_bytes({f"{name}.py": b"x = 1\n" * 99 for name in "abc"}))
    data[len(data) // 2 // 512 * 512 - 512 * 2 + 3] ^= 0xFF
    for at in range(0, len(data), 512):  # whichever block is a header
        if data[at + 257 : at + 262] == b"ustar":
            last = at
    data[last + 1] ^= 0x01
    (folder / "middle.tar").write_bytes(data)


@hostile("repos", r"half\.tar\.gz.*truncated")
def _tar_cut_short(folder: Path) -> None:
    whole = write_tar(folder / "half.tar.gz", tar_bytes({"a.py": os.urandom(9999).hex().encode()})).read_bytes()
    (folder / "half.tar.gz").write_bytes(whole[: len(whole) // 2])


@hostile("repos", r"member\.zip.*(CRC|invalid|Error)")
def _zip_with_a_damaged_member(folder: Path) -> None:
    path = write_zip(folder / "member.zip", {"a.py": b"a = 1\n" * 500, "b.py": os.urandom(2000).hex().encode()})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@hostile("repos", ["ok.py"])
def _zip_with_terminal_escapes_in_names(folder: Path) -> None:
    write_zip(folder / "names.zip", {"\x1b[2Jgone.py": b"x = 1\n", "line\nbreak.py": b"x = 1\n", "ok.py": b"y = 1\n"})


@hostile("repos", r"lies\.zip.*lists 1 members instead of 9")
def _zip_with_a_wrong_count(folder: Path) -> None:
    path = write_zip(folder / "lies.zip", {"a.py": b"a = 1\n"})
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\5\6")
    data[at + 8 : at + 12] = struct.pack("<HH", 9, 9)
    path.write_bytes(data)


@hostile("repos", r"secret\.zip.*encrypted")
def _zip_with_encrypted_members(folder: Path) -> None:
    path = write_zip(folder / "secret.zip", {"a.py": b"a = 1\n"})
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.rindex(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)


@hostile("jsonl", r"half\.jsonl\.gz, after line \d+.*truncated")
def _gzip_cut_short(folder: Path) -> None:
    whole = gzip.compress(lines(*({"text": os.urandom(99).hex()} for _ in range(50))))
    (folder / "half.jsonl.gz").write_bytes(whole[: len(whole) // 2])


@hostile("jsonl", r"bits\.jsonl\.zst, after line")
def _zstd_damaged_in_the_middle(folder: Path) -> None:
    random = Random(0)  # with some texts, the damage is first seen as lines that are no JSON
    content = lines(*({"text": random.randbytes(999).hex()} for _ in range(900)))
    data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(content))
    data[len(data) // 2] ^= 0xFF
    (folder / "bits.jsonl.zst").write_bytes(data)


@hostile("jsonl", r"bomb\.jsonl\.gz, line 1: more than 4 MiB in one line")
def _gzip_bomb(folder: Path) -> None:
    (folder / "bomb.jsonl.gz").write_bytes(gzip.compress(bytes(40 << 20), 1))


@hostile("text", r"plain\.gz, whole file: Not a gzipped file")
def _plain_text_named_gz(folder: Path) -> None:
    (folder / "plain.gz").write_text("this is no gzip file")


# JSON lines


@hostile("jsonl", r"line 2: more than 4 MiB in one line")
def _line_of_40_megabytes(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "' + b"x" * (40 << 20) + b'"}\n')


@hostile("jsonl", r"line 3: JSON that cannot be read \(maximum recursion")
def _json_nested_deeply(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n")


@hostile("jsonl", ["one", "two", "three"])
def _numbers_that_json_does_not_have(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + b'{"n": NaN, "m": -Infinity, "e": 1e999, "text": "three"}\n')


@hostile("jsonl", r"line 3: JSON that cannot be read")
def _number_of_ten_thousand_digits(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + b'{"text": "three", "n": ' + b"9" * 10_000 + b"}\n")


@hostile("jsonl", r"field 'text' must be a string, not list")
def _text_that_is_a_list(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + lines({"text": ["three"]}))


@hostile("jsonl", r"no field 'text'; it has 'txt'")
def _records_without_the_field(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + lines({"txt": "three"}))


@hostile("jsonl", r"expected a JSON object, not list")
def _records_that_are_no_objects(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + lines(["text"]))


@hostile("jsonl", ["one", "two", "four"])  # the last one counts, as in every reader of JSON
def _text_given_twice_in_one_record(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + b'{"text": "three", "text": "four"}\n')


@hostile("jsonl", ["one", "two", "one", "two"])
def _the_same_records_and_ids_twice(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + GOOD)


@hostile("jsonl", r"an unpaired surrogate at character 2")
def _half_a_surrogate_pair(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + b'{"text": "a \\ud83d b"}\n')


@hostile("jsonl", r"a NUL character at 1")
def _nul_characters(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + b'{"text": "a\\u0000b"}\n')


@hostile("jsonl", r"line 3: not valid UTF-8 at byte 12")
def _one_line_in_another_encoding(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + '{"text": "na\xefve"}\n'.encode("latin-1"))


@hostile("jsonl", ["one", "two"])
def _byte_order_mark_blank_lines_and_windows_line_ends(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n\r\n"))


@hostile("jsonl", r"no document contains text")
def _empty_file(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b"")


@hostile("jsonl", r"line 3: not valid JSON")
def _last_line_cut_short(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + b'{"text": "thr')


@hostile("jsonl", ["one", "two"])
def _folder_and_pipe_and_loop_beside_the_data(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD)
    (folder / "folder.jsonl").mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")


# Text


@hostile("text", r"not valid UTF-8 at byte 0")
def _utf16(folder: Path) -> None:
    (folder / "a.txt").write_bytes("text".encode("utf-16"))


@hostile("text", ["a\r\nb\rc\x0cd\u2028e"])
def _every_kind_of_line_end(folder: Path) -> None:
    (folder / "a.txt").write_bytes("\ufeffa\r\nb\rc\x0cd\u2028e".encode())


@hostile("text", r"␛\]0;owned␇↵\.txt, whole file: not valid UTF-8")
def _file_name_with_terminal_escapes(folder: Path) -> None:
    (folder / "\x1b]0;owned\x07\n.txt").write_bytes(b"\xff\xfe\xff")


@hostile("text", ["fine"])
def _file_name_that_is_no_unicode(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.txt")).write_bytes(b"fine")


# Parquet and Arrow


def _save_parquet(folder: Path, column: Any, name: str = "text") -> Path:
    pq.write_table(pa.table({name: column}), folder / "a.parquet")
    return folder / "a.parquet"


@hostile("parquet", r"truncated; the metadata at the end")
def _parquet_cut_short(folder: Path) -> None:
    path = _save_parquet(folder, ["one"] * 500)
    path.write_bytes(path.read_bytes()[:-20])


@hostile("parquet", r"no document contains text")
def _parquet_without_records(folder: Path) -> None:
    _save_parquet(folder, pa.array([], type=pa.string()))


@hostile("parquet", r"column 'text' must hold strings, not int64")
def _parquet_of_numbers(folder: Path) -> None:
    _save_parquet(folder, [1, 2])


@hostile("parquet", r"no column 'text'; it has 'content'")
def _parquet_without_the_column(folder: Path) -> None:
    _save_parquet(folder, ["one"], "content")


@hostile("parquet", r"record 2: null instead of a string")
def _parquet_with_nulls(folder: Path) -> None:
    _save_parquet(folder, ["one", None])


@hostile("parquet", r"cannot be read as Parquet")
def _parquet_with_a_damaged_footer(folder: Path) -> None:
    path = _save_parquet(folder, ["one", "two"])
    data = bytearray(path.read_bytes())
    data[-8:-4] = b"\xff\xff\xff\x7f"  # its length
    path.write_bytes(data)


@hostile("hf", r"a\.arrow.*truncated")
def _arrow_stream_cut_short(folder: Path) -> None:
    buffer = io.BytesIO()
    table = pa.table({"text": ["one", "two"]})
    with pa.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table)
    (folder / "a.arrow").write_bytes(buffer.getvalue()[:-8])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}], "_split": "train"}))


# MDS


def _save_mds(folder: Path) -> list[dict[str, Any]]:
    rows = [{"input_ids": np.arange(5, dtype=np.uint32)}, {"input_ids": np.arange(3, dtype=np.uint32)}]
    return mds_folders.write(folder, {"input_ids": "ndarray:uint32"}, rows)


@hostile("mds", r"holds 2 samples, but index\.json says 7")
def _mds_index_with_a_wrong_count(folder: Path) -> None:
    shards = _save_mds(folder)
    shards[0]["samples"] = 7
    mds_folders.save_index(folder, shards)


@hostile("mds", r"names '\.\./\.\./etc/passwd', which is not a shard below its folder")
def _mds_index_that_leads_out(folder: Path) -> None:
    shards = _save_mds(folder)
    mds_folders.save_index(folder, [*shards, {**shards[0], "raw_data": {"basename": "../../etc/passwd"}}])


@hostile("mds", r"names this shard, but the file does not exist")
def _mds_index_of_a_missing_shard(folder: Path) -> None:
    shards = _save_mds(folder)
    mds_folders.save_index(folder, [*shards, {**shards[0], "raw_data": {"basename": "shard.00009.mds", "bytes": 9}}])


@hostile("mds", r"token 4294967295 is outside the model's")
def _mds_of_another_tokenizer(folder: Path) -> None:
    mds_folders.write(
        folder, {"input_ids": "ndarray:uint32"}, [{"input_ids": np.array([1, 2**32 - 1], dtype=np.uint32)}]
    )


@hostile("mds", r"not valid JSON|nested|recursion")
def _mds_index_nested_deeply(folder: Path) -> None:
    _save_mds(folder)
    (folder / "index.json").write_text('{"shards": ' + "[" * 100_000 + "]" * 100_000 + "}")


# Chat


@hostile("chat", r"role")
def _conversation_of_unknown_roles(folder: Path) -> None:
    messages = [{"role": "\x1b[31mroot", "content": "obey"}, {"role": "assistant", "content": "yes"}]
    (folder / "a.jsonl").write_bytes(lines({"messages": messages}))


@hostile("chat", r"messages")
def _conversation_that_is_no_list(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(lines({"messages": {"role": "user", "content": "hi"}}))
