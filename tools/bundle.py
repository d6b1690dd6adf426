"""Pack what the runs of a study need for a machine without internet: data, model and packages, in parts.

    python tools/bundle.py --data data --model MODEL.gguf --packages packages.txt --out bundle

Copy `bundle/part-1`, `bundle/part-2`, … to the machine, together or one after the other, and run there:

    python part-1/unpack.py run-inputs --source UNSPOOL

The order is: packages, model, files of --first, all other files of --data. So the first parts are enough to start.

`packages.txt` names the packages that the machine lacks, one per line. Their wheels are downloaded in the versions of
constraints.txt, for another Python and platform than this one's, and unpacked. The weights of a GGUF file are stored
column by column of their blocks, which saves a tenth; a model folder is stored as it is.
"""

import argparse
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import unpack_bundle
from unpack_bundle import FILTERS, GGUF, LIST, MODEL, TREE, by_column, sha256, tensor_digest
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.progress import progress_bar

ROOT = Path(__file__).resolve().parents[1]
# Bytes per block of quantized weights.
BLOCKS = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64")
# Large files of wheels that Unspool does not use.
UNUSED = ("datatrove/assets/*", "zstandard/_cffi*", "*/tests/*")
IMPORTS = ("torch", "transformers", "scipy", "pyarrow", "tiktoken", "unspool.studies.study", "unspool.cli.main")


# Packages


def read_packages(path: Path) -> list[str]:
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line]


def download(packages: list[str], constraints: Path, python: str, platforms: list[str], out: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--constraint", str(constraints), "--dest", str(out)]
    command += [part for platform in platforms for part in ("--platform", platform)]
    done = subprocess.run([*command, *packages], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ConfigError(f"--packages: pip download failed: {' '.join(errors) or done.stderr.strip()}")
    return sorted(out.glob("*.whl"))


def join_wheels(wheels: list[Path]) -> tuple[bytes, list[str]]:
    """Return a tar of all wheels' files without the unused ones, and the names to import."""
    files: dict[str, bytes] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                unused = any(PurePath("/", info.filename).match(pattern) for pattern in UNUSED)
                if not info.is_dir() and not unused:
                    files[info.filename] = archive.read(info)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tree:
        for name in sorted(files):  # equal files give equal bytes
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o644
            tree.addfile(entry, io.BytesIO(files[name]))
    tops = {PurePath(name).parts[0].partition(".")[0] for name in files if name.endswith(("/__init__.py", ".py"))}
    tops = {top for top in tops if f"{top}/__init__.py" in files or f"{top}.py" in files}
    return buffer.getvalue(), sorted(top for top in tops if not top.startswith("_"))


# Model


def block_regions(path: Path) -> list[list[int]]:
    """Return [start, size, bytes per block] of each tensor with blocks, neighbors of one width joined."""
    from gguf import GGUFReader

    regions: list[list[int]] = []
    for tensor in sorted(GGUFReader(path).tensors, key=lambda one: one.data_offset):
        width = BLOCKS.get(tensor.tensor_type.name)
        if width is None:
            continue
        start, size = int(tensor.data_offset), int(tensor.n_bytes)
        last = regions[-1] if regions else [0, 0, 0]
        if last[2] == width and last[0] + last[1] == start:
            last[1] += size
        else:
            regions.append([start, size, width])
    return regions


def export(path: Path) -> str:
    """Dequantize a GGUF file as the other machine will; return the digest of its tensors."""
    with tempfile.TemporaryDirectory(prefix="bundle-") as folder:
        model = Path(folder) / MODEL
        done = subprocess.run(
            [sys.executable, "-m", "unspool", "export", str(path), str(model)], capture_output=True, text=True
        )
        if done.returncode:
            raise ConfigError(f"--model {path}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
        return tensor_digest(model / "model.safetensors")


# Items: files of the other machine


def item(path: str, content: bytes, *, coding: str = "none", regions: list[list[int]] | None = None) -> dict[str, Any]:
    """Describe a file of the target folder; `stored` holds its coded bytes."""
    regions = regions or []
    stored = by_column(content, regions)
    if coding == "xz":
        stored = lzma.compress(stored, filters=FILTERS if regions else None)
    return {
        "path": path,
        "bytes": len(content),
        "sha256": sha256(content),
        "coding": coding,
        "regions": regions,
        "stored": stored,
    }


def model_items(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        if not (path / "model.safetensors").is_file():
            raise ConfigError(f"--model {path}: holds no model.safetensors; give a GGUF file or an exported folder.")
        yield from (item(f"{MODEL}/{file.name}", file.read_bytes(), coding="xz") for file in sorted(path.iterdir()))
    elif path.suffix == ".gguf" and path.is_file():
        yield item(GGUF, path.read_bytes(), coding="xz", regions=block_regions(path))
    else:
        raise ConfigError(f"--model {path}: neither a folder nor a .gguf file; correct the path.")


def data_files(data: Path, first: list[str]) -> list[Path]:
    if not data.is_dir():
        raise ConfigError(f"--data {data}: no such folder; write it with tools/prepare_corpus.py.")
    names = [file.relative_to(data).as_posix() for file in sorted(data.rglob("*")) if file.is_file()]
    unknown = next((name for name in first if name not in names), None)
    if unknown is not None:
        raise ConfigError(f"--first {unknown}: {data} has no such file. It has {', '.join(names)}.")
    return [data / name for name in [*first, *(name for name in names if name not in first)]]


def collect_items(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    files = data_files(args.data, args.first)
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder, progress_bar("bundle", 3 + len(files)) as advance:
        advance(0, "download packages")
        wheels = download(read_packages(args.packages), args.constraints, args.python, args.platform, Path(folder))
        tree, names = join_wheels(wheels)
        advance(1, "compress packages")
        items = [item(TREE, tree, coding="xz")]
        advance(1, "compress model")
        items += model_items(args.model)
        advance(1, "data")
        for file in files:
            # Compressed already.
            items.append(item(f"{args.data.name}/{file.relative_to(args.data).as_posix()}", file.read_bytes()))
            advance(1, "data")
    return items, names


def write_parts(items: list[dict[str, Any]], facts: dict[str, Any], out: Path, part_size: int) -> list[int]:
    """Cut the items in their order into parts of at most `part_size` bytes; return the size of each part."""
    pieces: list[tuple[int, str, bytes]] = []
    part, left = 1, part_size
    for number, one in enumerate(items):
        stored, one["pieces"] = one.pop("stored"), []
        start = 0
        while start < len(stored) or not one["pieces"]:
            if not left:
                part, left = part + 1, part_size
            content = stored[start : start + left]
            name = f"{number:03d}-{len(one['pieces'])}"
            one["pieces"].append({"part": part, "file": name, "bytes": len(content), "sha256": sha256(content)})
            pieces.append((part, name, content))
            start += len(content)
            left -= len(content)
    shutil.rmtree(out, ignore_errors=True)
    listed = json.dumps({**facts, "items": items}, indent=1) + "\n"
    for number in range(1, part + 1):
        folder = out / f"part-{number}"
        folder.mkdir(parents=True)
        (folder / LIST).write_text(listed, encoding="utf-8")
        shutil.copy(Path(unpack_bundle.__file__), folder / "unpack.py")
    for number, name, content in pieces:
        (out / f"part-{number}" / name).write_bytes(content)
    return [sum(path.stat().st_size for path in (out / f"part-{number}").iterdir()) for number in range(1, part + 1)]


RESERVED = 100_000  # of each part: its list and unpack.py


def bundle(args: argparse.Namespace) -> dict[str, Any]:
    size = int(args.part_mb * 1e6) - RESERVED
    if size < RESERVED:
        raise ConfigError(f"--part-mb {args.part_mb}: too small; use at least {2 * RESERVED / 1e6}.")
    if args.out.exists() and not any(args.out.glob(f"part-1/{LIST}")):
        raise ConfigError(f"--out {args.out} exists and is no bundle; give a new folder, so that no files are lost.")
    items, names = collect_items(args)
    is_gguf = args.model.is_file()
    tensors = export(args.model) if is_gguf else tensor_digest(args.model / "model.safetensors")
    facts = {"python": args.python, "gguf": is_gguf, "tensors": tensors, "imports": [*IMPORTS, *names]}
    stored = {one["path"]: len(one["stored"]) for one in items}
    sizes = write_parts(items, facts, args.out, size)
    return {"parts": sizes, "stored": stored, **facts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that tools/prepare_corpus.py wrote")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file, or folder with model.safetensors")
    parser.add_argument("--packages", type=Path, required=True, help="text file: packages that the machine lacks")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="versions of packages")
    parser.add_argument("--out", type=Path, default=Path("bundle"), help="folder to write")
    parser.add_argument("--part-mb", type=float, default=40, help="most million bytes of a part (default: 40)")
    parser.add_argument("--first", nargs="*", default=[], metavar="FILE", help="files of --data that come first")
    parser.add_argument("--python", default="3.12", help="Python version of the machine (default: 3.12)")
    parser.add_argument("--platform", nargs="*", default=PLATFORMS, help="platform tags of the machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    try:
        made = bundle(args)
    except (UnspoolError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(made))
        return 0
    for number, size in enumerate(made["parts"], start=1):
        print(f"{args.out / f'part-{number}'}: {size / 1e6:.1f} MB")
    print(f"{sum(made['parts']) / 1e6:.0f} MB; to unpack: python part-1/unpack.py run-inputs --source UNSPOOL")
    return 0


if __name__ == "__main__":
    sys.exit(main())
