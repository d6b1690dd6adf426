"""A file that grows by lines keeps them all, also while the disk is full."""

import errno

import pytest

from unspool.training.metrics.logger import JsonlLog


class Full:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def write(self, content):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(content[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_lines_are_on_disk_at_once_and_go_on_after_what_is_there(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text("1\n")
    with JsonlLog(path) as file:
        file.append("2\n")
        assert path.read_text() == "1\n2\n"
        assert file.content == b"1\n2\n"


def test_what_finds_no_room_waits_and_no_half_line_stays(tmp_path, capsys):
    path = tmp_path / "ledger.jsonl"
    with JsonlLog(path) as file:
        file._file = Full(file._file, room=6)
        file.append("first\n")
        file._file.room = 3
        file.append("second\n")
        assert path.read_text() == "first\n"
        file.append("third\n")
        assert file.content == b"first\nsecond\nthird\n"
        file._file.room = 1000
        file.append("fourth\n")

    assert path.read_text() == "first\nsecond\nthird\nfourth\n"
    assert capsys.readouterr().err.count("cannot write ledger.jsonl (No space left on device)") == 1


def test_what_still_finds_no_room_at_the_end_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No space"), JsonlLog(tmp_path / "ledger.jsonl") as file:
        file._file = Full(file._file, room=0)
        file.append("first\n")
