"""Unpack a bundle of tools/bundle.py on a machine without internet. Needs only Python; copied into every part.

    python bundle/part-1/unpack.py run-inputs --source UNSPOOL

Parts may arrive in any order and over several calls; each call unpacks the parts that lie beside this file. Every piece
and every file is checked against its sha256. Once the packages are complete, all imports are tried; once the model is,
it is dequantized, and the line that sets PYTHONPATH is printed. UNSPOOL is a checkout of the repository.
"""

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIST = "bundle.json"
PACKAGES, MODEL = "packages", "model"
TREE, GGUF = "packages.tar", "model.gguf"


class BundleError(Exception):
    """Something is damaged or does not fit; the message says what to do."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Coding. A region of a file is a table of `width` columns; bytes of one column compress better together.

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "lc": 0, "lp": 0, "pb": 0, "dict_size": 1 << 20}]


def by_column(content: bytes, regions: list[list[int]], *, back: bool = False) -> bytes:
    """Store each region [start, size, width] column by column, or undo that."""
    out = bytearray(content)
    for start, size, width in regions:
        rows = size // width
        for column in range(width):
            table = slice(start + column, start + size, width)
            line = slice(start + column * rows, start + (column + 1) * rows)
            if back:
                out[table] = content[line]
            else:
                out[line] = content[table]
    return bytes(out)


def decode(content: bytes, item: dict[str, Any]) -> bytes:
    if item["coding"] == "xz":
        content = lzma.decompress(content)
    return by_column(content, item["regions"], back=True)


# Pieces


def read_list(part: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((part / LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{part}: {LIST} cannot be read ({error}); copy the part again.") from error
    return found


def store_pieces(part: Path, listed: dict[str, Any], target: Path) -> None:
    """Copy the pieces of one part into the target, unless their file is already unpacked."""
    for item in listed["items"]:
        for piece in item["pieces"]:
            path, kept = part / piece["file"], target / ".pieces" / piece["file"]
            if not path.is_file() or kept.is_file() or is_unpacked(target, item):
                continue
            content = path.read_bytes()
            if sha256(content) != piece["sha256"]:
                raise BundleError(f"{path}: its sha256 differs from {LIST}; copy the part again.")
            write(kept, content)


def assemble(target: Path, item: dict[str, Any]) -> bool:
    """Write an item if all its pieces have arrived; return whether it is complete."""
    if is_unpacked(target, item):
        return True
    paths = [target / ".pieces" / piece["file"] for piece in item["pieces"]]
    if not all(path.is_file() for path in paths):
        return False
    content = decode(b"".join(path.read_bytes() for path in paths), item)
    if sha256(content) != item["sha256"]:
        raise BundleError(f"{item['path']}: its sha256 differs from {LIST}; delete {target} and unpack again.")
    write(target / item["path"], content)
    if item["path"] == TREE:
        shutil.rmtree(target / PACKAGES, ignore_errors=True)
        with tarfile.open(target / TREE) as tree:
            tree.extractall(target / PACKAGES, filter="data")
    write(mark(target, item), b"")
    for path in paths:
        path.unlink()
    return True


def mark(target: Path, item: dict[str, Any]) -> Path:
    return target / ".unpacked" / str(item["sha256"])


def is_unpacked(target: Path, item: dict[str, Any]) -> bool:
    path = target / item["path"]
    return mark(target, item).is_file() and path.is_file() and path.stat().st_size == item["bytes"]


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".partial")
    draft.write_bytes(content)
    draft.replace(path)


# Packages and model


def python_path(target: Path, source: Path) -> str:
    return f"{target / PACKAGES}:{source / 'src'}"


def run(target: Path, source: Path, *arguments: str, what: str) -> str:
    """Run Python with the unpacked packages; BundleError with the last line of its error."""
    environment = {**os.environ, "PYTHONPATH": python_path(target, source), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise BundleError(f"{what}: {lines[-1] if lines else f'exit status {done.returncode}'}")
    return done.stdout


def tensor_digest(path: Path) -> str:
    """Hash names, types, shapes and bytes of all tensors in a safetensors file, in the order of their names."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name in sorted(header):
            start, end = header[name]["data_offsets"]
            found.update(json.dumps([name, header[name]["dtype"], header[name]["shape"]]).encode())
            file.seek(8 + size + start)
            found.update(file.read(end - start))
    return found.hexdigest()


# As `unspool export`, without its logits: the tensors are compared with those that it wrote for the bundle.
DEQUANTIZE = """
import sys
from pathlib import Path
import torch
from unspool.models.export import save_model
from unspool.models.load import load_model
from unspool.models.tokenizer import load_tokenizer
model = load_model(sys.argv[1], device=torch.device("cpu"), dtype=torch.float32)
save_model(model, load_tokenizer(sys.argv[1]), Path(sys.argv[2]), dtype=torch.float32)
"""


def build_model(listed: dict[str, Any], target: Path, source: Path) -> str:
    """Dequantize the model, and compare its tensors with those of the machine that packed it."""
    weights = target / MODEL / "model.safetensors"
    done = target / ".unpacked" / listed["tensors"]
    if listed["gguf"] and not done.is_file():
        shutil.rmtree(target / MODEL, ignore_errors=True)
        (target / MODEL).mkdir(parents=True)
        run(target, source, "-c", DEQUANTIZE, str(target / GGUF), str(target / MODEL), what="dequantizing the model")
    if not done.is_file():
        if tensor_digest(weights) != listed["tensors"]:
            raise BundleError(f"{weights}: other tensors than on the machine that packed it; compare the versions.")
        write(done, b"")
    return f"{MODEL}: same tensors as packed, {weights.stat().st_size / 1e6:.0f} MB"


def check_imports(listed: dict[str, Any], target: Path, source: Path) -> str:
    here = ".".join(map(str, sys.version_info[:2]))
    if listed["python"] != here:
        raise BundleError(f"the packages are for Python {listed['python']}, this is {here}; pack with --python {here}.")
    code = f"import {', '.join(listed['imports'])}; from importlib.metadata import version; "
    code += "print(', '.join(f'{name} {version(name)}' for name in ('torch', 'transformers')))"
    versions = run(target, source, "-c", code, what="imports (add the package to packages.txt)").strip()
    return f"imports: {len(listed['imports'])} modules, {versions}, Python {sys.version.split()[0]}"


# Command


def unpack(parts: list[Path], target: Path, source: Path) -> Iterator[str]:
    """Yield a line for each thing done. Raises BundleError."""
    listed = read_list(parts[0])
    for part in parts:
        if read_list(part)["items"] != listed["items"]:
            raise BundleError(f"{part} is a part of another bundle than {parts[0]}; use parts of one bundle.")
        began = time.monotonic()
        store_pieces(part, listed, target)
        yield f"{part.name}: checked in {time.monotonic() - began:.1f} s"
    complete = {item["path"]: assemble(target, item) for item in listed["items"]}
    yield f"{sum(complete.values())} of {len(complete)} files are complete"
    began = time.monotonic()
    if complete[TREE]:
        yield check_imports(listed, target, source)
        if all(done for path, done in complete.items() if path == GGUF or path.startswith(f"{MODEL}/")):
            yield build_model(listed, target, source)
            yield f"packages and model are ready ({time.monotonic() - began:.1f} s)"
            yield f"export PYTHONPATH={python_path(target, source)} HF_HUB_OFFLINE=1"
    missing = {piece["part"] for piece in absent_pieces(target, listed)}
    if missing:
        yield f"not here yet: {', '.join(f'part-{number}' for number in sorted(missing))}"


def absent_pieces(target: Path, listed: dict[str, Any]) -> list[dict[str, Any]]:
    waiting = [item for item in listed["items"] if not is_unpacked(target, item)]
    pieces = [piece for item in waiting for piece in item["pieces"]]
    return [piece for piece in pieces if not (target / ".pieces" / piece["file"]).is_file()]


def main() -> int:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--source", type=Path, default=Path(), help="checkout of the repository (default: this folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    lines: list[str] = []
    problem = None
    try:
        if not (args.source / "src" / "unspool").is_dir():
            raise BundleError(f"--source {args.source}: holds no src/unspool; give a checkout of the repository.")
        parts = [path.parent for path in sorted(here.parent.glob(f"part-*/{LIST}"))]
        for line in unpack(parts, args.target.resolve(), args.source.resolve()):
            lines.append(line)
            if not args.json:
                print(line, flush=True)
    except (BundleError, OSError, lzma.LZMAError, tarfile.TarError) as error:
        problem = str(error)
        print(problem, file=sys.stderr)
    if args.json:
        print(json.dumps({"lines": lines, "error": problem}))
    return 2 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
