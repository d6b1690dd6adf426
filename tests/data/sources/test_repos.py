import os
import random
import shutil
import tarfile
from pathlib import Path

import pytest

from unspool.core.errors import ConfigError
from unspool.data.sources import archives, repos
from unspool.data.sources.base import Bad, Document, Filtered
from unspool.data.sources.repos import ReposSource

from .packing import special, tar_bytes, write_tar, write_zip

FILES = {f"thing-1.0/pkg/m{number}.py": f"x = {number}\n".encode() for number in range(20)}


def source(path: str = ".") -> ReposSource:
    return ReposSource(kind="repos", path=path)


def read_one(path: Path, seed: int = 0):
    (item,) = source().read_units([path], seed)
    return item


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def headers(text: str) -> list[str]:
    return [line.removeprefix("# file: ") for line in text.splitlines() if line.startswith("# file: ")]


def test_files_are_joined_under_path_headers_without_the_common_top_folder(tmp_path):
    files = {"thing-1.0/README.md": b"# Thing", "thing-1.0/pkg/a.py": b"\xef\xbb\xbfa = 1\r\n"}
    item = read_one(write_tar(tmp_path / "thing-1.0.tar.gz", tar_bytes(files)))

    assert item.id == "thing-1.0.tar.gz:1"
    readme, code = "# file: README.md\n# Thing\n", "# file: pkg/a.py\na = 1\r\n"
    assert item.text in (readme + "\n" + code, code + "\n" + readme)
    assert item.left_out == ()


def test_without_a_common_top_folder_paths_stay_as_they_are(tmp_path):
    item = read_one(write_zip(tmp_path / "x.whl", {"pkg/a.py": b"a", "other/b.py": b"b"}))
    assert sorted(headers(item.text)) == ["other/b.py", "pkg/a.py"]
    item = read_one(write_zip(tmp_path / "y.zip", {"pkg/a.py": b"a", "setup.py": b"b"}))
    assert sorted(headers(item.text)) == ["pkg/a.py", "setup.py"]
    item = read_one(write_folder(tmp_path / "z", {"src/a.py": b"a", "src/b.py": b"b"}))
    assert sorted(headers(item.text)) == ["src/a.py", "src/b.py"], "a folder's name is no part of its paths"


def test_the_order_is_random_by_seed_and_the_same_however_the_archive_is_listed(tmp_path):
    names = list(FILES)
    shuffled = random.Random(1).sample(names, len(names))
    texts = {}
    for ending, write in (("tar.gz", lambda path, files: write_tar(path, tar_bytes(files))), ("zip", write_zip)):
        for label, order in (("sorted", names), ("shuffled", shuffled)):
            (tmp_path / label).mkdir(exist_ok=True)
            path = write(tmp_path / label / f"thing.{ending}", {name: FILES[name] for name in order})
            texts[ending, label] = read_one(path)

    assert texts["tar.gz", "sorted"] == texts["tar.gz", "shuffled"]
    assert texts["zip", "sorted"] == texts["zip", "shuffled"]
    path = tmp_path / "sorted" / "thing.zip"
    orders = {tuple(headers(read_one(path, seed).text)) for seed in range(5)}
    assert len(orders) == 5, "the seed must matter"
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(f"pkg/m{n}.py" for n in range(20)))}
    assert tuple(f"pkg/m{n}.py" for n in range(20)) not in orders


def test_two_repositories_with_the_same_files_have_orders_of_their_own(tmp_path):
    items = [read_one(write_zip(tmp_path / name, FILES)) for name in ("a.zip", "b.zip")]
    assert headers(items[0].text) != headers(items[1].text)


def test_a_folder_is_read_the_same_wherever_it_lies_and_however_it_was_filled(tmp_path):
    one = write_folder(tmp_path / "one" / "thing", FILES)
    other = write_folder(tmp_path / "other" / "thing", dict(reversed(FILES.items())))
    assert read_one(one) == read_one(other)
    assert len(headers(read_one(one).text)) == 20


def test_every_skipped_file_is_listed_with_its_reason(tmp_path):
    files = {
        "t/a.py": b"a = 1\n",
        "t/logo.png": b"\x89PNG",
        "t/latin.py": b"caf\xe9\n",
        "t/nul.py": b"\0",
        "t/__init__.py": b"",
        "t/blank.py": b"\n\n",
        "t/vendor/x.py": b"x = 1\n",
        "t/poetry.lock": b"x",
        "t/api_pb2.py": b"x",
        "t/made.py": b"# @generated\n",
        "t/app.min.js": b"x",
        "t/table.csv": b"1,2\n" * 20_000,
        "t/huge.py": b"x = 1\n" * 200_000,
    }
    expected = (
        ("__init__.py", "empty"),
        ("api_pb2.py", "generated"),
        ("app.min.js", "minified"),
        ("blank.py", "empty"),
        ("huge.py", "too_long"),
        ("latin.py", "binary"),
        ("logo.png", "binary"),
        ("made.py", "generated"),
        ("nul.py", "binary"),
        ("poetry.lock", "lock"),
        ("table.csv", "data"),
        ("vendor/x.py", "vendored"),
    )
    for path in (write_tar(tmp_path / "t.tar.gz", tar_bytes(files)), write_zip(tmp_path / "t.zip", files)):
        item = read_one(path)
        assert item.text == "# file: a.py\na = 1\n"
        assert item.left_out == expected
    # Of a folder, what is below an unwanted one is not even listed.
    item = read_one(write_folder(tmp_path / "f", files) / "t")
    assert item.left_out == (*expected[:-1], ("vendor/", "vendored"))


def test_unsafe_members_are_skipped_and_the_rest_is_kept(tmp_path):
    extra = [special("t/link", tarfile.SYMTYPE, "/etc/passwd"), special("t/device", tarfile.CHRTYPE)]
    data = tar_bytes({"t/a.py": b"a\n", "../evil.py": b"e", "/abs.py": b"e", "t/caf\udce9.py": b"c"}, extra)
    item = read_one(write_tar(tmp_path / "t.tar.gz", data))
    assert item.text == "# file: a.py\na\n"
    assert item.left_out == (
        ("../evil.py", "unsafe_path"),
        ("/abs.py", "unsafe_path"),
        ("caf\\xe9.py", "odd_name"),
        ("device", "special_file"),
        ("link", "unsafe_path"),
    )


def test_a_repository_of_nothing_but_unsafe_members_is_bad(tmp_path):
    path = write_tar(tmp_path / "t.tar.gz", tar_bytes({"../a.py": b"e"}, [special("link", tarfile.SYMTYPE, "/")]))
    item = read_one(path)
    assert isinstance(item, Bad)
    assert (item.file, item.record, item.reason) == (str(path), "whole repository", "unsafe_path")
    assert "2 files" in item.detail


def test_a_repository_of_nothing_but_encrypted_members_is_bad(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"a.py": b"secret"})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    item = read_one(path)
    assert (item.reason, item.detail) == ("unreadable", "none of its 1 files can be read (encrypted)")


def test_a_repository_without_text_is_filtered(tmp_path):
    (tmp_path / "nothing").mkdir()
    for path in (
        write_tar(tmp_path / "a.tar.gz", bytes(10240)),
        write_zip(tmp_path / "b.zip", {}),
        write_zip(tmp_path / "c.zip", {"x/logo.png": b"png", "x/__init__.py": b""}),
        tmp_path / "nothing",
    ):
        assert read_one(path) == Filtered(f"{path.name}:1", "empty")


def test_broken_archives_are_bad_and_the_next_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "SMALL_BYTES", 1 << 20)
    good = write_zip(tmp_path / "good.zip", {"a.py": b"a\n"})
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(write_tar(tmp_path / "w.tar.gz", tar_bytes(FILES)).read_bytes()[:-9])
    noise = tmp_path / "noise.zip"
    noise.write_bytes(b"noise" * 99)
    bomb = write_tar(tmp_path / "bomb.tar.xz", tar_bytes({"zeros": bytes(20 << 20)}))
    items = list(source().read_units([cut, noise, bomb, good], 0))

    assert [getattr(item, "reason", "read") for item in items] == [
        "truncated",
        "unreadable",
        "archive_bomb",
        "read",
    ]
    assert all(item.file == str(path) for item, path in zip(items, [cut, noise, bomb], strict=False))


def test_of_two_members_with_one_name_the_first_counts(tmp_path):
    files = {"a.py": b"first\n", "./a.py": b"second\n"}
    write_zip(tmp_path / "x.zip", files)
    write_tar(tmp_path / "x.tar", tar_bytes(files))
    for name in ("x.zip", "x.tar"):
        item = read_one(tmp_path / name)
        assert (item.text, item.left_out) == ("# file: a.py\nfirst\n", (("a.py", "duplicate"),))


def test_a_full_repository_keeps_the_first_of_the_order_however_it_is_listed(tmp_path, monkeypatch):
    rng = random.Random(2)
    files = {f"t/{number:02}.py": b"x = 1\n" * rng.randrange(1, 400) for number in range(60)}
    everything = read_one(write_zip(tmp_path / "t.zip", files))
    limit = 20_000
    monkeypatch.setattr(repos, "MAX_TEXT_BYTES", limit)
    items = []
    for _ in range(4):
        order = rng.sample(list(files), len(files))
        items.append(read_one(write_zip(tmp_path / "t.zip", {name: files[name] for name in order})))

    assert all(item == items[0] for item in items)
    assert 0.8 * limit < len(items[0].text.encode()) <= limit
    assert everything.text.startswith(items[0].text)
    assert {reason for _, reason in items[0].left_out} == {"repository_full"}
    assert sorted(headers(items[0].text) + [name for name, _ in items[0].left_out]) == sorted(headers(everything.text))


def test_links_in_folders_are_not_followed(tmp_path):
    write_folder(tmp_path, {"secret.py": b"secret\n", "away/b.py": b"b\n"})
    folder = write_folder(tmp_path / "repo", {"a.py": b"a\n"})
    (folder / "file.py").symlink_to(tmp_path / "secret.py")
    (folder / "away").symlink_to(tmp_path / "away")
    (folder / "loop").symlink_to(folder)
    (folder / "self").symlink_to(folder / "self")
    (folder / "nowhere").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe")
    item = read_one(folder)
    assert item.text == "# file: a.py\na\n"
    assert item.left_out == (
        ("away", "unsafe_path"),
        ("file.py", "unsafe_path"),
        ("loop", "unsafe_path"),
        ("nowhere", "unsafe_path"),
        ("pipe", "special_file"),
        ("self", "unsafe_path"),
    )


def test_a_folder_of_nothing_but_links_is_bad(tmp_path):
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "a.py").symlink_to(tmp_path)
    assert read_one(tmp_path / "repo").reason == "unsafe_path"


def test_names_in_a_folder_that_are_not_utf8_are_skipped(tmp_path):
    folder = write_folder(tmp_path / "repo", {"a.py": b"a\n"})
    try:
        (folder / os.fsdecode(b"caf\xe9.py")).write_bytes(b"c\n")
    except OSError:
        pytest.skip("this file system has no such names")
    item = read_one(folder)
    assert item.left_out == (("caf\\xe9.py", "odd_name"),)


def test_a_file_that_cannot_be_opened_is_skipped(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "repo", {"a.py": b"a\n", "b.py": b"b\n"})
    open_file = Path.open

    def refuse(path, *arguments, **options):
        if path.name == "b.py":
            raise PermissionError(13, "no")
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    item = read_one(folder)
    assert (item.text, item.left_out) == ("# file: a.py\na\n", (("b.py", "unreadable"),))


def test_a_vanished_folder_is_not_reported_as_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_one(tmp_path / "gone")


def test_units_are_the_archives_and_folders_of_a_folder(tmp_path):
    write_folder(tmp_path, {"b/x.py": b"x", "a/setup.py": b"x", ".cache/x.py": b"x", "index.tsv": b"x", "._c.zip": b""})
    write_zip(tmp_path / "c.zip")
    write_tar(tmp_path / "d.tar.gz", tar_bytes())
    (tmp_path / "e").symlink_to(tmp_path / "a")
    assert [path.name for path in source().units(tmp_path)] == ["a", "b", "c.zip", "d.tar.gz"]


@pytest.mark.parametrize("marker", [".git/config", "pyproject.toml", "package.json", "Cargo.toml", "go.mod"])
def test_a_folder_with_a_marker_is_one_repository(tmp_path, marker):
    write_folder(tmp_path / "repo", {marker: b"x", "src/a.py": b"x", "tests/b.py": b"x"})
    assert source("repo").units(tmp_path) == [tmp_path / "repo"]


def test_a_folder_of_plain_files_is_one_repository(tmp_path):
    write_folder(tmp_path / "repo", {"a.py": b"x", "b.py": b"x"})
    assert source("repo").units(tmp_path) == [tmp_path / "repo"]


def test_units_of_a_pattern_and_of_one_archive(tmp_path):
    write_folder(tmp_path, {"r1/a.py": b"x", "r2/src/b.py": b"x", "r3.txt": b"x"})
    write_zip(tmp_path / "r4.zip")
    assert [path.name for path in source("r*").units(tmp_path)] == ["r1", "r2", "r4.zip"]
    assert source("r4.zip").units(tmp_path) == [tmp_path / "r4.zip"]


def test_missing_units_are_refused(tmp_path):
    write_folder(tmp_path, {"a.txt": b"x"})
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="does not exist"):
        source("gone").units(tmp_path)
    with pytest.raises(ConfigError, match="matches no file"):
        source("gone*").units(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.txt is not an archive.*\.tar\.gz"):
        source("a.txt").units(tmp_path)
    with pytest.raises(ConfigError, match="holds no repository"):
        source("nothing").units(tmp_path)


def test_an_archive_and_the_folder_it_was_made_of_hold_the_same_files(tmp_path):
    folder = write_folder(tmp_path / "thing-1.0", {name.partition("/")[2]: data for name, data in FILES.items()})
    packed = Path(shutil.make_archive(str(tmp_path / "thing-1.0"), "gztar", tmp_path, "thing-1.0"))
    from_folder, from_archive = read_one(folder), read_one(packed)
    assert isinstance(from_folder, Document)
    assert sorted(from_folder.text.split("\n\n")) != from_folder.text.split("\n\n")
    assert sorted(headers(from_folder.text)) == sorted(headers(from_archive.text))
