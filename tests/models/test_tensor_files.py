"""Files are written as `safetensors` writes them, and hashed meanwhile."""

import errno

import pytest
import torch
from safetensors.torch import load_file, save_file

from unspool.core import artifacts
from unspool.core.artifacts import digest_once, file_digest, list_files
from unspool.models import tensor_files
from unspool.models.tensor_files import TensorFile, write_tensor_files

DTYPES = list(tensor_files._TYPES)


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"of/{dtype}": (100 * torch.randn(7, 3)).to(dtype) for dtype in DTYPES}
    return found | {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "é": torch.arange(6.0).view(2, 3)}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_bytes_are_those_of_safetensors(metadata, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", chunk)
    save_file(some_tensors(), tmp_path / "wanted", metadata)
    write_tensor_files([TensorFile(tmp_path / "found", some_tensors(), metadata)])
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_a_view_is_written_in_its_own_order(tmp_path):
    weight = torch.arange(6.0).view(2, 3).T
    write_tensor_files([TensorFile(tmp_path / "file", {"weight": weight})])
    assert torch.equal(load_file(tmp_path / "file")["weight"], weight)


def test_nobody_reads_a_file_again_that_was_hashed_while_it_was_written(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("one", "two", "three")]
    write_tensor_files([TensorFile(path, {"weight": torch.full((9,), float(at))}) for at, path in enumerate(paths)])
    wanted = [file_digest(path) for path in paths]
    monkeypatch.setattr(artifacts, "file_digest", lambda path: pytest.fail(f"{path} is read again"))

    assert [digest_once(path) for path in paths] == wanted
    assert [entry["sha256"] for entry in list_files(tmp_path, paths).values()] == wanted
    moved = tmp_path / "moved"
    paths[0].rename(moved)  # changes its ctime
    with pytest.raises(pytest.fail.Exception):
        digest_once(moved)


def test_a_file_that_changed_since_is_read_again(tmp_path):
    path = tmp_path / "file"
    write_tensor_files([TensorFile(path, {"weight": torch.zeros(9)})])
    before = digest_once(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)
    assert digest_once(path) == file_digest(path) != before


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files.os, "fsync", lambda number: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full") as error:
        write_tensor_files([TensorFile(tmp_path / "file", {"weight": torch.zeros(9)})], sync=True)
    assert error.value.filename == str(tmp_path / "file")
