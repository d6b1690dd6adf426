"""Digest everything that a finished run computed, independent of names of files and fields.

    .venv/bin/unspool run tiny
    .venv/bin/python tools/digests.py runs/tiny --json before.json
    .venv/bin/python tools/digests.py runs/tiny --compare before.json

Packed datasets and corpora are digested by column, trained models by tensor, scores by prompt, answer and score. The
tool also trains the golden loss again and digests the numbers of `unspool verify` on the CPU; --skip disables both. A
column, folder or suite may be renamed if the tables below list both names. --root names the checkout whose code runs,
by default this one. Exits with 1 if --compare finds a difference.

Always use the same number of threads for the demo and this tool: floating-point sums depend on it.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

ROOT = Path(__file__).resolve().parents[1]
# Each group lists old and new names of one thing; it is digested under the first.
CORPUS_FOLDERS = ("corpus", "corpora")
DATASET_FOLDERS = ("datasets", "rows")
UNFINISHED = (".partial", ".work", ".old", ".tmp")
COLUMNS = (
    ("tokens", "token_ids", "input_ids"),
    ("doc_lens", "document_lengths", "doc_lengths"),
    ("loss_mask",),
    ("chunk_ids", "chunk_ids", "chunk_docs", "chunk_labels", "chunk_documents"),
    ("positions", "position_ids"),
)
# Names may be reworded; their effect shows in the trained weights.
COLUMNS_LEFT_OUT = {"id", "source", "attention", "doc_id", "document_id", "attends", "sources"}
SUITES = {"kv": "key_value", "loss": "perplexity"}
# Fields of a sample, by digest; no field holds a time or a version.
FIELDS = {
    "prompts": (
        ("suite",),
        ("task",),
        ("length", "context_length"),
        ("depth",),
        ("index",),
        ("hash", "prompt_hash"),
        ("context", "context_hash"),
        ("prompt_tokens",),
        ("answer_tokens", "max_answer_tokens"),
        ("prompt", "excerpt"),
        ("pair",),
    ),
    "answers": (("reference", "gold", "expected"), ("output", "answer")),
    "scores": (("score",), ("losses", "loss_by_position", "losses_by_position")),
}
FIELDS_LEFT_OUT = {"wording", "judge"}  # the hash of a user's file, the judge's prompt
COMMANDS = ("unspool.cli.main", "unspool.cli.app", "unspool.cli", "unspool.__main__")
GOLDEN = ("training.golden", "train.golden")

Digests = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description="Digest what a finished run computed, independent of names.")
    parser.add_argument("run", type=Path, help="the folder of a finished run, such as runs/tiny")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the digests to this file")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare with digests that --json wrote")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose code is run")
    parser.add_argument("--skip", nargs="*", default=[], choices=("golden", "verify"), help="skip these")
    args = parser.parse_args()
    if not args.run.is_dir():
        sys.exit(f"{args.run}: no such folder")
    digests = dict(run_digests(args.run))
    if "golden" not in args.skip:
        digests |= golden_digests(args.root.resolve())
    if "verify" not in args.skip:
        digests |= verify_digests(args.root.resolve())
    for name, value in digests.items():
        print(f"{value[:16]}  {name}")
    if args.json:
        args.json.write_text(json.dumps(digests, indent=1) + "\n")
    if args.compare:
        before: Digests = json.loads(args.compare.read_text())
        left_out = {name for name in before if name.split("/")[0] in args.skip}
        different = list(differences({name: before[name] for name in before if name not in left_out}, digests))
        print("\n".join(different) or f"all {len(digests)} digests are the same as in {args.compare}")
        sys.exit(bool(different))


def differences(before: Digests, after: Digests) -> Iterator[str]:
    """Return a line for each digest that differs."""
    for name, value in before.items():
        if name not in after:
            same = [other for other in after if after[other] == value and other not in before]
            yield f"MISSING {name}" + (f" (the same digest as {same[0]})" if same else "")
        elif after[name] != value:
            yield f"DIFFERENT {name}"
    yield from (f"NEW {name}" for name in after if name not in before)


def run_digests(run: Path) -> Iterator[tuple[str, str]]:
    for kind, names in (("corpus", CORPUS_FOLDERS), ("datasets", DATASET_FOLDERS)):
        for folder in finished(run, names):
            yield from ((f"{kind}/{folder.name}/{name}", value) for name, value in arrow_digests(folder).items())
    for folder in finished(run, ("stages",)):
        yield f"stages/{folder.name}/tensors", tensors_digest(sorted((folder / "model").glob("*.safetensors")))
    for folder in finished(run, ("scores",)):
        yield from ((f"scores/{folder.name}/{name}", value) for name, value in score_digests(folder).items())


def finished(run: Path, names: Iterable[str]) -> list[Path]:
    """Return the folders of finished results inside the first of these folders that exists."""
    found = [run / name for name in names if (run / name).is_dir()]
    if len(found) != 1:
        sys.exit(f"{run}: expected one of these folders: {', '.join(names)}")
    inside = (path for path in found[0].iterdir() if path.is_dir() and not path.name.endswith(UNFINISHED))
    return sorted(inside, key=lambda path: path.name)


def arrow_digests(folder: Path) -> Digests:
    """Digest the values of each column and their number per record, independent of files and batches."""
    sums: dict[str, tuple[Any, Any]] = {}
    for path in sorted(folder.glob("*.arrow")):
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        known = {name for group in COLUMNS for name in group} | COLUMNS_LEFT_OUT
        if unknown := set(file.schema.names) - known:
            sys.exit(f"{path}: columns that this tool does not know: {', '.join(sorted(unknown))}")
        for batch in map(file.get_batch, range(file.num_record_batches)):
            for group in COLUMNS:
                column = next((batch.column(name) for name in group if name in batch.schema.names), None)
                if column is None or pa.types.is_null(column.type):
                    continue
                values, lengths = sums.setdefault(group[0], (hashlib.sha256(), hashlib.sha256()))
                values.update(as_integers(column.flatten()))
                lengths.update(as_integers(column.value_lengths()))
    if "tokens" not in sums:
        sys.exit(f"{folder}: no *.arrow file with tokens")
    return {name: digest([values.hexdigest(), lengths.hexdigest()]) for name, (values, lengths) in sums.items()}


def as_integers(array: Any) -> bytes:
    return np.ascontiguousarray(array.to_numpy(zero_copy_only=False).astype("<i8")).tobytes()


def tensors_digest(paths: list[Path]) -> str:
    """Digest name, type, shape and bytes of every tensor, independent of how files divide them."""
    entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in paths:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        entries |= {name: (path, 8 + size, said) for name, said in header.items() if name != "__metadata__"}
    if not entries:
        sys.exit("stage without tensors")
    total = hashlib.sha256()
    for name, (path, start, said) in sorted(entries.items()):
        first, end = said["data_offsets"]
        data = np.memmap(path, mode="r", offset=start + first, shape=(end - first,), dtype=np.uint8)
        total.update(json.dumps([name, said["dtype"], said["shape"]]).encode() + data.tobytes())
    return total.hexdigest()


def score_digests(folder: Path) -> Digests:
    """Digest prompts, answers and scores, in the order of the questions."""
    known = {name for groups in FIELDS.values() for group in groups for name in group} | FIELDS_LEFT_OUT
    found: dict[str, list[Any]] = {kind: [] for kind in FIELDS}
    for file in ("samples.jsonl", "prompts.jsonl"):
        path = folder / file
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() or file == "samples.jsonl" else []
        for said in (json.loads(line) for line in lines if line):
            if unknown := said.keys() - known:
                sys.exit(f"{path}: fields that this tool does not know: {', '.join(sorted(unknown))}")
            said["suite"] = SUITES.get(said["suite"], said["suite"])
            for kind, groups in FIELDS.items():
                found[kind].append([leaves(said[name]) for group in groups for name in group if name in said])
    return {kind: digest(values) for kind, values in found.items()}


def leaves(value: Any) -> Any:
    """Return the value without field names."""
    if isinstance(value, dict):
        return [leaves(inner) for inner in value.values()]
    return [leaves(inner) for inner in value] if isinstance(value, list) else value


def golden_digests(root: Path) -> Digests:
    """Return the losses of tests/…/golden.py, trained again on one thread, and the recorded ones."""
    program = f"""
import importlib, importlib.util, json, sys, tempfile, pathlib
sys.path.insert(0, {str(root / "tests")!r})
names = [name for name in {GOLDEN!r} if importlib.util.find_spec(name.split('.')[0])]
golden = importlib.import_module(next(name for name in names if importlib.util.find_spec(name)))
with tempfile.TemporaryDirectory() as folder:
    losses = golden.train_golden(pathlib.Path(folder))
print(json.dumps([losses, json.loads(golden.GOLDEN.read_text())["losses"]]))
"""
    trained, written = json.loads(run_python(root, program).splitlines()[-1])
    return {"golden/trained": digest(trained), "golden/written": digest(written)}


def verify_digests(root: Path) -> Digests:
    """Return the numbers of `unspool verify` in order, without names of checks, seconds and details."""
    program = f"""
import importlib, importlib.util, sys
names = [name for name in {COMMANDS!r} if importlib.util.find_spec(name.rpartition('.')[0]) is not None]
modules = (importlib.import_module(name) for name in names if importlib.util.find_spec(name))
main = next(module.main for module in modules if callable(getattr(module, 'main', None)))
sys.argv = ['unspool', 'verify', '--device', 'cpu', '--json']
main()
"""
    results = json.loads(run_python(root, program))
    names = {"status": ("status",), "limits": ("limit", "tolerance"), "errors": ("error",)}
    return {
        f"verify/{kind}": digest([next(said[name] for name in group if name in said) for said in results])
        for kind, group in names.items()
    }


def run_python(root: Path, program: str) -> str:
    """Run a program with the code of a checkout on one thread; return its output."""
    env = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    check = f"import unspool; assert unspool.__file__.startswith({str(root)!r}), unspool.__file__\n"
    done = subprocess.run(
        [sys.executable, "-c", check + program], env=env, cwd=root, stdout=subprocess.PIPE, text=True, check=False
    )
    if not done.stdout:
        sys.exit(f"a program with the code of {root} failed with exit code {done.returncode}")
    return done.stdout


def digest(value: Any) -> str:
    # json writes the repr of a float, which reads back as the same float.
    return hashlib.sha256(json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


if __name__ == "__main__":
    main()
