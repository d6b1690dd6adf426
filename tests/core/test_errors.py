"""Operating system errors become a sentence, whichever library raises them."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from unspool.core.errors import DataError, explain, naming, system_error


def full_disk(number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "error",
    [
        full_disk(),
        shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),
        pa.ArrowException("[Errno 28] Error writing bytes to file."),
    ],
)
def test_a_full_disk_is_recognized_through_every_library(error):
    with pytest.raises(OSError) as raised, naming(Path("run/corpus")):
        raise error
    sentence = explain(raised.value)

    assert sentence == (
        "run/corpus: no space left on device; "
        "free some space and run the same command again, which continues where it stopped."
    )


def test_safetensors_still_writes_the_number_that_is_looked_for(tmp_path):
    with pytest.raises(Exception, match=r"\(os error 2\)") as raised:
        save_file({"a": np.zeros(1)}, tmp_path / "missing" / "a.safetensors")
    assert getattr(system_error(raised.value), "errno", None) == errno.ENOENT


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EDQUOT, "free some space"),
        (errno.EROFS, "write to another folder"),
        (errno.EACCES, "change the permissions"),
        (errno.EIO, "check the disk"),
        (errno.ENOENT, "restore it"),
        (errno.ENOTDIR, "use another path"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_the_sentence_has_a_remedy_for_each_error(number, remedy):
    sentence = explain(OSError(number, os.strerror(number), "out/a.json"))
    assert sentence is not None
    assert sentence.startswith("out/a.json: ") and remedy in sentence and sentence.endswith(".")


def test_an_error_keeps_its_own_path_and_a_sentence_of_ours_is_kept():
    with pytest.raises(OSError) as raised, naming(Path("run")):
        raise OSError(errno.EROFS, "read-only", "run/a.json")
    assert raised.value.filename == "run/a.json"
    with pytest.raises(DataError, match="mend it"), naming(Path("run")):
        raise DataError("mend it (os error 28).")


@pytest.mark.parametrize("error", [ZeroDivisionError(), ValueError("28"), OSError("?"), full_disk(errno.EINVAL)])
def test_a_bug_is_not_an_operating_system_error(error):
    assert explain(error) is None
    with pytest.raises(type(error)), naming(Path("run")):
        raise error


def test_a_path_cannot_add_a_line_of_its_own():
    sentence = explain(OSError(errno.ENOENT, "missing", "a\nerror: all is well\x1b[2K"))
    assert sentence is not None and "\n" not in sentence and "\x1b" not in sentence
