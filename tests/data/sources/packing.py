"""Archives for the tests of archives and repositories."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

FILES = {"top/a.py": b"a = 1\n", "top/sub/b.py": b"b" * 1500, "top/empty.py": b""}
TAR_ENDINGS = ["tar", "tar.gz", "tgz", "tar.bz2", "tar.xz"]
SQUEEZE = {".gz": gzip.compress, ".tgz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".tar": bytes}


def tar_bytes(files=FILES, extra=(), format=tarfile.PAX_FORMAT) -> bytes:
    """A tar file of files by name, and of `extra` members without content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        folder = tarfile.TarInfo("top")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra:
            tar.addfile(info)
    return buffer.getvalue()


def special(name: str, type: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = type
    info.linkname = target
    return info


def write_tar(path: Path, data: bytes) -> Path:
    path.write_bytes(SQUEEZE[path.suffix](data))
    return path


def write_zip(path: Path, files=FILES, method=zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path
