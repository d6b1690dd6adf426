import bz2
import gzip
import lzma
import random
import stat
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from unspool.data.sources import archives
from unspool.data.sources.archives import is_archive, members
from unspool.data.sources.files import Unreadable

from .packing import FILES, TAR_ENDINGS, special, tar_bytes, write_tar, write_zip


def contents(path: Path) -> dict[str, bytes | str]:
    """Every member's content, or why it is refused."""
    return {member.path: member.refused or member.read() for member in members(path)}


def failure(path: Path) -> str:
    with pytest.raises(Unreadable) as caught:
        contents(path)
    assert caught.value.detail
    return caught.value.reason


@pytest.mark.parametrize("ending", TAR_ENDINGS)
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_kind_of_tar_gives_back_its_files(tmp_path, ending, format):
    long = "top/" + "d" * 90 + "/" + "e" * 90 + ".py"  # longer than a plain header holds
    files = FILES | {long: b"long"}
    path = write_tar(tmp_path / f"x.{ending}", tar_bytes(files, format=format))
    assert contents(path) == files
    assert [member.size for member in members(path)] == [len(data) for data in files.values()]


@pytest.mark.parametrize("ending", ["zip", "whl"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_files_and_wheels_give_back_their_files(tmp_path, ending, method):
    assert contents(write_zip(tmp_path / f"x.{ending}", FILES | {"top/sub/": b""}, method)) == FILES


def test_members_may_be_passed_over_unread(tmp_path):
    path = write_tar(tmp_path / "x.tar.gz", tar_bytes())
    assert [member.read() for member in members(path) if member.path == "top/sub/b.py"] == [b"b" * 1500]


def test_only_the_listed_endings_are_archives():
    assert all(is_archive(Path(f"x{ending}")) for ending in (*archives.ENDINGS, ".TAR.GZ"))
    assert not any(is_archive(Path(name)) for name in ("x.gz", "x.py", "tar", "zip"))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.py", "a/../../x.py", "..\\x.py", "C:\\x.py", "\\\\host\\x.py"])
def test_paths_that_lead_out_of_the_archive_are_refused(tmp_path, name):
    files = {name: b"evil", "a.py": b"good"}
    assert contents(write_tar(tmp_path / "x.tar", tar_bytes(files))) == {name: "unsafe_path", "a.py": b"good"}
    assert contents(write_zip(tmp_path / "x.zip", files)) == {name: "unsafe_path", "a.py": b"good"}


def test_paths_are_tidied(tmp_path):
    files = {"./a//b.py": b"1", "c\\d.py": b"2"}
    assert contents(write_tar(tmp_path / "x.tar", tar_bytes(files))) == {"a/b.py": b"1", "c/d.py": b"2"}


def test_links_devices_and_pipes_in_tar_are_refused(tmp_path):
    extra = [
        special("top/soft", tarfile.SYMTYPE, "/etc/passwd"),
        special("top/loop", tarfile.SYMTYPE, "loop"),
        special("top/hard", tarfile.LNKTYPE, "top/a.py"),
        special("top/device", tarfile.CHRTYPE),
        special("top/disk", tarfile.BLKTYPE),
        special("top/pipe", tarfile.FIFOTYPE),
    ]
    assert contents(write_tar(tmp_path / "x.tar.gz", tar_bytes(extra=extra))) == FILES | {
        "top/soft": "unsafe_path",
        "top/loop": "unsafe_path",
        "top/hard": "unsafe_path",
        "top/device": "special_file",
        "top/disk": "special_file",
        "top/pipe": "special_file",
    }


def test_sparse_files_in_tar_are_refused_and_their_maps_passed_over(tmp_path):
    sparse = tarfile.TarInfo("top/holes")
    sparse.type = tarfile.GNUTYPE_SPARSE
    sparse.size = 512
    header = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    header[482] = 1  # a block of the map follows
    header[148:156] = b"%06o\0 " % sum(header[:148] + b" " * 8 + header[156:])
    data = tar_bytes()
    begin = data[:512]
    path = write_tar(tmp_path / "x.tar", begin + bytes(header) + bytes(512) + b"x" * 512 + data[512:])
    assert contents(path) == {"top/holes": "special_file"} | FILES

    pax = tarfile.TarInfo("top/holes")
    pax.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    assert contents(write_tar(tmp_path / "y.tar", tar_bytes(extra=[pax]))) == FILES | {"top/holes": "special_file"}


def test_links_and_pipes_in_zip_are_refused(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"a.py": b"good"})
    with zipfile.ZipFile(path, "a") as archive:
        for name, kind in (("link", stat.S_IFLNK), ("pipe", stat.S_IFIFO)):
            info = zipfile.ZipInfo(name)
            info.external_attr = (kind | 0o777) << 16
            archive.writestr(info, "/etc/passwd")
    assert contents(path) == {"a.py": b"good", "link": "unsafe_path", "pipe": "special_file"}


def test_names_that_are_not_utf8_or_hold_control_characters_are_refused_and_shown_escaped(tmp_path):
    names = {"caf\udce9.py": "caf\\xe9.py", "a\n# file: b.py": "a\\n# file: b.py", "x" * 2000: "x" * 1024}
    data = tar_bytes(dict.fromkeys(names, b"x"), format=tarfile.GNU_FORMAT)
    found = contents(write_tar(tmp_path / "x.tar", data))
    assert found == dict.fromkeys(names.values(), "odd_name")
    assert all(name.encode() for name in found)


def test_members_without_a_name_are_refused(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"nameless": b"1", "b.py": b"2"})
    path.write_bytes(path.read_bytes().replace(b"nameless", bytes(8)))
    assert contents(path) == {"": "odd_name", "b.py": b"2"}


def test_zip_names_in_utf8_are_read_whether_or_not_they_say_so(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"größe.py": b"1"})
    assert contents(path) == {"größe.py": b"1"}
    # Take the flag away, in the member's header and in the list.
    data = bytearray(path.read_bytes())
    for offset in (6, data.index(b"PK\1\2") + 8):
        data[offset : offset + 2] = b"\0\0"
    path.write_bytes(data)
    assert contents(path) == {"größe.py": b"1"}


def test_an_encrypted_member_is_refused(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"a.py": b"secret"})
    data = bytearray(path.read_bytes())
    for offset in (6, data.index(b"PK\1\2") + 8):
        data[offset] |= 1
    path.write_bytes(data)
    assert contents(path) == {"a.py": "encrypted"}


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_methods_that_cannot_be_bounded_are_refused(tmp_path, method):
    assert contents(write_zip(tmp_path / "x.zip", {"a.py": b"x"}, method)) == {"a.py": "unknown_compression"}


def test_archives_without_members_are_empty(tmp_path):
    assert contents(write_zip(tmp_path / "x.zip", {})) == {}
    for ending in TAR_ENDINGS:
        assert contents(write_tar(tmp_path / f"x.{ending}", bytes(10240))) == {}


@pytest.mark.parametrize("ending", TAR_ENDINGS)
def test_a_tar_cut_anywhere_is_truncated(tmp_path, ending):
    whole = write_tar(tmp_path / f"x.{ending}", tar_bytes({"a.py": random.Random(0).randbytes(5000)})).read_bytes()
    cut = tmp_path / f"cut.{ending}"
    # A plain tar ends in padding, which may be lost.
    last = len(whole) - 1 if ending != "tar" else whole.rindex(whole.rstrip(b"\0")[-1:])
    for length in (20, 700, 3000, last):
        cut.write_bytes(whole[:length])
        assert failure(cut) == "truncated", length


def test_a_zip_cut_anywhere_is_truncated(tmp_path):
    whole = write_zip(tmp_path / "x.zip").read_bytes()
    for length in (10, 100, len(whole) - 30, len(whole) - 1):
        (tmp_path / "cut.zip").write_bytes(whole[:length])
        assert failure(tmp_path / "cut.zip") == "truncated", length


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tar.bz2", "x.tar.xz", "x.zip"])
def test_a_file_that_is_not_an_archive_is_unreadable(tmp_path, name):
    (tmp_path / name).write_bytes(b"this is no archive " * 100)
    assert failure(tmp_path / name) == "unreadable"


@pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])
def test_a_vanished_file_is_not_reported_as_damaged(tmp_path, name):
    with pytest.raises(FileNotFoundError):
        list(archives.members(tmp_path / name))


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tar.bz2", "x.tar.xz"])
def test_a_compressed_file_that_is_not_a_tar_is_unreadable(tmp_path, name):
    assert failure(write_tar(tmp_path / name, b"this is no archive " * 100)) == "unreadable"


def test_a_damaged_header_is_not_treated_as_the_end(tmp_path):
    data = bytearray(tar_bytes())
    data[data.index(b"top/empty.py") + 5] ^= 1
    assert failure(write_tar(tmp_path / "x.tar.gz", bytes(data))) == "unreadable"


def test_a_zip_that_lists_fewer_members_than_it_counts_is_unreadable(tmp_path):
    path = write_zip(tmp_path / "x.zip")
    data = bytearray(path.read_bytes())
    end = data.rindex(b"PK\5\6")
    data[end + 12 : end + 16] = bytes(4)  # the length of the list
    path.write_bytes(data)
    assert failure(path) == "unreadable"


def test_damaged_content_is_found_by_its_checksum(tmp_path):
    data = bytearray(write_zip(tmp_path / "x.zip", method=zipfile.ZIP_STORED).read_bytes())
    data[data.index(b"bbbb")] ^= 1
    (tmp_path / "x.zip").write_bytes(data)
    assert failure(tmp_path / "x.zip") == "unreadable"

    squeezed = bytearray(gzip.compress(tar_bytes()))
    squeezed[-8] ^= 1  # the checksum itself, after the archive's end
    (tmp_path / "x.tar.gz").write_bytes(squeezed)
    assert failure(tmp_path / "x.tar.gz") == "unreadable"


@pytest.mark.parametrize("ending", ["tar.gz", "tar.bz2", "tar.xz"])
def test_a_tar_bomb_is_refused_at_the_limit(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(archives, "SMALL_BYTES", 1 << 20)
    path = write_tar(tmp_path / f"x.{ending}", tar_bytes({"zeros": bytes(20 << 20)}))
    assert path.stat().st_size * archives.MAX_RATIO < 20 << 20
    expanded = 0
    unpack = archives._unpacked

    def counted(path):
        nonlocal expanded
        for part in unpack(path):
            expanded += len(part)
            yield part

    monkeypatch.setattr(archives, "_unpacked", counted)
    assert failure(path) == "archive_bomb"
    assert expanded <= 2 * archives._CHUNK, "the claimed size alone must do"


def test_a_bomb_of_many_small_members_is_refused(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "x.tar.gz", tar_bytes({f"{number}": b"x" for number in range(600)}))
    monkeypatch.setattr(archives, "MAX_MEMBERS", 600)
    assert len(contents(path)) == 600
    monkeypatch.setattr(archives, "MAX_MEMBERS", 599)
    assert failure(path) == "archive_bomb"


def test_a_bomb_behind_the_end_mark_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "SMALL_BYTES", 1 << 20)
    assert failure(write_tar(tmp_path / "x.tar.gz", tar_bytes() + bytes(20 << 20))) == "archive_bomb"


@pytest.mark.parametrize("type", [b"x", b"L"])
def test_a_tar_header_of_any_size_is_refused(tmp_path, type):
    info = tarfile.TarInfo("huge")
    info.type = type
    info.size = 30 << 20
    data = info.tobuf(tarfile.USTAR_FORMAT) + bytes(info.size)
    assert failure(write_tar(tmp_path / "x.tar", data)) == "archive_bomb"


@pytest.mark.parametrize(
    "record", [b"12345678901 path=a\n", b"0 path=a\n", b"99 path=a\n", b"x path=a\n", b"9 nothing"]
)
def test_a_tar_header_that_contradicts_itself_is_unreadable(tmp_path, record):
    info = tarfile.TarInfo("pax")
    info.type = b"x"
    info.size = len(record)
    data = info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0")
    assert failure(write_tar(tmp_path / "x.tar", data + tar_bytes())) == "unreadable"


def test_a_tar_member_of_negative_size_is_unreadable(tmp_path):
    header = bytearray(tarfile.TarInfo("a.py").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (-512).to_bytes(12, "big", signed=True)
    header[148:156] = b"%06o\0 " % sum(header[:148] + b" " * 8 + header[156:])
    assert failure(write_tar(tmp_path / "x.tar", bytes(header) + tar_bytes())) == "unreadable"


def test_a_zip_bomb_is_refused_by_its_declared_size(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "SMALL_BYTES", 1 << 20)
    path = write_zip(tmp_path / "x.zip", {"zeros": bytes(20 << 20)})
    monkeypatch.setattr(archives, "_read_zipped", None)  # nothing may be read
    assert failure(path) == "archive_bomb"


@pytest.mark.parametrize(("claim", "reason"), [(10, "unreadable"), (1500, "unreadable"), (3 << 30, "archive_bomb")])
def test_a_zip_member_with_a_false_size_is_not_expanded(tmp_path, claim, reason):
    path = write_zip(tmp_path / "x.zip", {"a.py": b"x" * 1000})
    data = bytearray(path.read_bytes())
    for offset in (22, data.index(b"PK\1\2") + 24):
        data[offset : offset + 4] = struct.pack("<I", claim)
    path.write_bytes(data)
    assert failure(path) == reason


def test_zip_members_that_share_their_bytes_are_refused(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"a.py": b"x" * 5000, "b.py": b"y" * 5000})
    data = bytearray(path.read_bytes())
    second = data.rindex(b"PK\1\2")
    data[second + 42 : second + 46] = struct.pack("<I", 0)  # the declared start of b.py: that of a.py
    path.write_bytes(data)
    assert failure(path) == "archive_bomb"


def test_a_zip_with_an_endless_list_of_members_is_refused(tmp_path, monkeypatch):
    path = write_zip(tmp_path / "x.zip", {f"{number:05}": b"" for number in range(500)})
    monkeypatch.setattr(archives, "MAX_DIRECTORY_BYTES", 1000)
    assert failure(path) == "archive_bomb"


def test_mutated_archives_never_raise_anything_but_unreadable(tmp_path):
    seeds = {
        "x.tar": tar_bytes(FILES | {"top/" + "é" * 120: b"long"}),
        "x.tar.gz": gzip.compress(tar_bytes()),
        "x.tar.xz": lzma.compress(tar_bytes()),
        "x.tar.bz2": bz2.compress(tar_bytes()),
        "x.zip": write_zip(tmp_path / "seed.zip").read_bytes(),
    }
    rng = random.Random(0)
    damaged = 0
    for name, whole in seeds.items():
        path = tmp_path / name
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 1, 3, 20))):
                data[rng.randrange(len(data))] = rng.choice((0, 1, 0x2F, 0x37, 0x80, 0xFF, rng.randrange(256)))
            path.write_bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
            try:
                assert all(
                    member.refused or member.read() is not None for member in members(path) if member.size < 9999
                )
            except Unreadable:
                damaged += 1
    assert damaged > 200, "the mutations are too gentle to test anything"
