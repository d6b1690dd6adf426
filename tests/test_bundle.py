"""tools/bundle.py and its unpack.py: what arrives equals what was packed; damaged or missing parts are named."""

import json
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import bundle  # noqa: E402
import unpack_bundle  # noqa: E402

RNG = np.random.default_rng(0)


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """A bundle of a model folder, two data files and a package, in parts of 20 KB of content."""
    data, model, wheels = (tmp_path / name for name in ("data", "model", "wheels"))
    (data / "helmet").mkdir(parents=True)
    (data / "books.jsonl.zst").write_bytes(RNG.bytes(50_000))
    (data / "helmet" / "nq.jsonl.zst").write_bytes(RNG.bytes(10))
    (data / "empty.jsonl.zst").write_bytes(b"")
    model.mkdir()
    save_file({"a": RNG.random((40, 50), dtype=np.float32), "b": np.arange(3)}, model / "model.safetensors")
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "spare-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("spare_package/__init__.py", "answer = 42")
        wheel.writestr("datatrove/assets/large.bin", RNG.bytes(1000))
    monkeypatch.setattr(bundle, "download", lambda *_: sorted(wheels.iterdir()))
    monkeypatch.setattr(bundle, "RESERVED", 0)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # the packages are imported, and no file may be added to them
    monkeypatch.setattr(bundle, "IMPORTS", ("json",))
    (tmp_path / "packages.txt").write_text("spare  # nothing else\n")
    args = Namespace(
        data=data, model=model, packages=tmp_path / "packages.txt", constraints=None, out=tmp_path / "bundle",
        part_mb=0.02, first=["helmet/nq.jsonl.zst"], python=".".join(map(str, sys.version_info[:2])), platform=(),
    )  # fmt: skip
    return tmp_path, bundle.bundle(args)


def parts_of(folder: Path) -> list[Path]:
    return sorted((folder / "bundle").iterdir())


def unpack(folder: Path, parts: list[Path]) -> list[str]:
    return list(unpack_bundle.unpack(parts, folder / "target", ROOT))


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_arrives_equals_what_was_packed_in_any_order_of_parts(packed):
    folder, made = packed
    parts = parts_of(folder)
    assert len(parts) == len(made["parts"]) >= 3
    for part in parts[::-1]:
        lines = unpack(folder, [part])
    assert files(folder / "target" / "data") == files(folder / "data")
    assert files(folder / "target" / "model") == files(folder / "model")
    package = folder / "target" / "packages"
    assert files(package) == {"spare_package/__init__.py": b"answer = 42"}
    assert any(line.startswith(f"export PYTHONPATH={package.resolve()}:{ROOT / 'src'}") for line in lines)
    assert not list((folder / "target" / ".pieces").iterdir())


def test_pieces_stay_within_the_part_size_and_the_first_files_come_first(packed):
    folder, _ = packed
    items = json.loads((parts_of(folder)[0] / "bundle.json").read_text())["items"]
    by_part = {}
    for piece in (piece for item in items for piece in item["pieces"]):
        by_part.setdefault(piece["part"], []).append(piece["bytes"])
    assert max(map(sum, by_part.values())) == 20_000
    assert [item["path"] for item in items] == [
        "packages.tar", "model/model.safetensors", "data/helmet/nq.jsonl.zst", "data/books.jsonl.zst",
        "data/empty.jsonl.zst",
    ]  # fmt: skip


def test_missing_parts_are_named_and_the_model_waits_for_them(packed):
    folder, _ = packed
    lines = unpack(folder, parts_of(folder)[1:2])
    assert lines[-1].startswith("not here yet: part-1")
    assert not any("PYTHONPATH" in line for line in lines)


def test_a_damaged_piece_is_named_and_a_good_copy_continues(packed):
    folder, _ = packed
    parts = parts_of(folder)
    piece = next(path for path in parts[1].iterdir() if path.name.startswith("0"))
    good = piece.read_bytes()
    piece.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(unpack_bundle.BundleError, match=rf"{piece.name}: its sha256 differs"):
        unpack(folder, parts)
    piece.write_bytes(good)
    assert "PYTHONPATH" in " ".join(unpack(folder, parts))


def test_a_part_of_another_bundle_is_refused(packed):
    folder, _ = packed
    parts = parts_of(folder)
    listed = json.loads((parts[1] / "bundle.json").read_text())
    listed["items"][0]["sha256"] = "0" * 64
    (parts[1] / "bundle.json").write_text(json.dumps(listed))
    with pytest.raises(unpack_bundle.BundleError, match="part of another bundle"):
        unpack(folder, parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": "0" * 64}, "other tensors than on the machine that packed it"),
        ({"imports": ["json", "no_such_package"]}, r"packages.txt.*no_such_package"),
    ],
    ids=["other tensors", "missing package"],
)
def test_a_model_or_a_package_that_is_not_the_packed_one_is_named(packed, change, message):
    folder, _ = packed
    parts = parts_of(folder)
    for part in parts:
        listed = json.loads((part / "bundle.json").read_text())
        (part / "bundle.json").write_text(json.dumps(listed | change))
    with pytest.raises(unpack_bundle.BundleError, match=message):
        unpack(folder, parts)


def test_packages_for_another_python_are_refused(packed):
    folder, _ = packed
    parts = parts_of(folder)
    for part in parts:
        listed = json.loads((part / "bundle.json").read_text())
        (part / "bundle.json").write_text(json.dumps(listed | {"python": "3.9"}))
    with pytest.raises(unpack_bundle.BundleError, match=r"for Python 3.9, this is .*pack with --python"):
        unpack(folder, parts)


def test_columns_of_blocks_are_stored_together_and_come_back():
    content = RNG.integers(0, 256, 1000, dtype=np.uint8)
    regions = [[10, 340, 34], [400, 600, 20]]
    stored = np.frombuffer(unpack_bundle.by_column(content.tobytes(), regions), np.uint8)
    expected = content.copy()
    expected[10:350] = content[10:350].reshape(10, 34).T.ravel()
    expected[400:1000] = content[400:1000].reshape(30, 20).T.ravel()
    assert np.array_equal(stored, expected)
    assert unpack_bundle.by_column(stored.tobytes(), regions, back=True) == content.tobytes()


def test_the_digest_of_tensors_ignores_the_order_in_the_file_and_sees_one_bit(tmp_path):
    def write(name: str, order: list[str], value: float) -> Path:
        tensors = {"a": np.full((2, 3), 1, np.float32), "b": np.full((4,), value, np.float32)}
        header, at = {}, 0
        for key in order:
            header[key] = {
                "dtype": "F32",
                "shape": list(tensors[key].shape),
                "data_offsets": [at, at := at + tensors[key].nbytes],
            }
        text = json.dumps({"__metadata__": {"order": "".join(order)}, **header}).encode()
        body = b"".join(tensors[key].tobytes() for key in order)
        (tmp_path / name).write_bytes(len(text).to_bytes(8, "little") + text + body)
        return tmp_path / name

    first, second = write("1", ["a", "b"], 2), write("2", ["b", "a"], 2)
    assert unpack_bundle.tensor_digest(first) == unpack_bundle.tensor_digest(second)
    assert unpack_bundle.tensor_digest(first) != unpack_bundle.tensor_digest(
        write("3", ["a", "b"], np.nextafter(2, 3, dtype=np.float32))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--data": "nowhere"}, "--data nowhere: no such folder"),
        ({"--model": "nowhere"}, "--model nowhere: neither a folder nor a .gguf file"),
        ({"--first": "books.zst"}, "--first books.zst: data has no such file. It has books.jsonl."),
        ({"--out": "data"}, "--out data exists and is no bundle"),
        ({"--part-mb": "0.01"}, "--part-mb 0.01: too small"),
    ],
)
def test_mistakes_end_with_one_sentence(tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle, "download", lambda *_: [])
    for name in ("data", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "books.jsonl").write_text("{}\n")
    save_file({"a": np.arange(3)}, "model/model.safetensors")
    (tmp_path / "packages.txt").write_text("")
    given = {"--data": "data", "--model": "model", "--packages": "packages.txt", "--out": "bundle"} | change
    monkeypatch.setattr(sys, "argv", ["bundle.py", *(part for pair in given.items() for part in pair)])
    assert bundle.main() == 2
    assert capsys.readouterr().err.startswith(message)


def test_unpack_needs_only_the_standard_library():
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import unpack_bundle"
    assert subprocess.run([sys.executable, "-S", "-I", "-c", code]).returncode == 0
