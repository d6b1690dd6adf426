"""Check corpora and packed rows of a run without importing unspool: reads Arrow files and manifests only.

    python tools/audit_run.py RUN_FOLDER [--samples 40] [--same-as OTHER_RUN_FOLDER]

Checks that
  records   = documents + quarantined + filtered                      (every corpus)
  tokens in + added = tokens in rows + tokens dropped, by reason      (every dataset)
  every piece of a sampled row is in a corpus, and decodes to text of its source file
  two runs have the same bytes in every Arrow file                    (--same-as)
"""

import argparse
import glob
import gzip
import hashlib
import json
import random
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml
import zstandard
from tokenizers import Tokenizer


def batches(paths):
    for path in paths:
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        for number in range(file.num_record_batches):
            yield file.get_batch(number)


def corpus_documents(folder: Path):
    for batch in batches(sorted(folder.glob("docs-*.arrow"))):
        column = batch.column("tokens")
        offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
        for index, name in enumerate(batch.column("id").to_pylist()):
            yield name, values[offsets[index] : offsets[index + 1]]


def rows_of(folder: Path):
    for batch in batches(sorted(folder.glob("rows-*.arrow"))):
        length = batch.schema.field("tokens").type.list_size
        tokens = batch.column("tokens").values.to_numpy().reshape(-1, length)
        lens, offsets = batch.column("doc_lens").values.to_numpy(), batch.column("doc_lens").offsets.to_numpy()
        for index in range(batch.num_rows):
            yield tokens[index], lens[offsets[index] : offsets[index + 1]]


def expect(holds: bool, what: str) -> None:
    print(("ok    " if holds else "FAILS ") + what)
    if not holds:
        sys.exit(1)


def check_corpus(folder: Path) -> int:
    counts = json.loads((folder / "manifest.json").read_text())["counts"]
    lens = [len(tokens) for _, tokens in corpus_documents(folder)]
    quarantined, filtered = sum(counts["quarantined"].values()), sum(counts["filtered"].values())
    name = f"corpus {folder.name}: "
    expect(
        counts["records"] == counts["documents"] + quarantined + filtered,
        f"{name}{counts['records']:,} records = {counts['documents']:,} documents + {quarantined:,} quarantined "
        f"+ {filtered:,} filtered {counts['filtered'] or ''}",
    )
    listed = folder / "quarantine.jsonl"
    expect(
        quarantined == (len(listed.read_text().splitlines()) if listed.exists() else 0), name + "quarantine file agrees"
    )
    expect(
        (len(lens), sum(lens)) == (counts["documents"], counts["tokens"]),
        f"{name}the files hold {len(lens):,} documents, {sum(lens):,} tokens",
    )
    return sum(lens)


def check_rows(folder: Path, tokens_by_source: dict[str, int]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    counts, settings = manifest["counts"], manifest["settings"]["dataset"]
    drawn = [settings["from"]] if isinstance(settings["from"], str) else list(settings["from"])
    if settings.get("replace"):
        drawn.append(settings["replace"]["with"])
    tokens_in = sum(tokens_by_source[source] for source in drawn)
    in_rows = 0
    for tokens, doc_lens in rows_of(folder):
        assert doc_lens.sum() == len(tokens) and (doc_lens > 0).all()
        in_rows += len(tokens)
    dropped = sum(counts["dropped"].values())
    expect(
        tokens_in + counts["tokens_added"] == in_rows + dropped,
        f"rows {folder.name}: {tokens_in:,} tokens in + {counts['tokens_added']:,} added = {in_rows:,} in rows "
        f"+ {dropped:,} dropped {counts['dropped']}",
    )


def source_text(path: Path, line: int, field: str) -> str:
    return json.loads(read_whole(path).split(b"\n")[line - 1])[field]


def check_decoding(run: Path, folder: Path, recipe: dict, tokenizer: Tokenizer, samples: int) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["settings"]["dataset"].get("utk"):
        return
    drawn = manifest["settings"]["dataset"]["from"]
    sources = [drawn] if isinstance(drawn, str) else list(drawn)
    if not {recipe["sources"][source]["kind"] for source in sources} & {"jsonl", "repos", "textbooks"}:
        print(f"      rows {folder.name}: this tool cannot read its sources again")
        return
    documents = [
        (source, name, tokens) for source in sources for name, tokens in corpus_documents(run / "corpus" / source)
    ]
    blob = np.concatenate([tokens for _, _, tokens in documents]).astype(np.uint32)
    ends, data = np.cumsum([len(tokens) for _, _, tokens in documents]), blob.tobytes()
    rows = list(rows_of(folder))
    texts: dict[str, str | set[str]] = {}
    compared = 0
    for tokens, doc_lens in random.Random(0).sample(rows, min(samples, len(rows))):
        for piece in np.split(tokens, np.cumsum(doc_lens)[:-1]):
            if len(piece) < 12:
                continue  # too short to identify
            wanted = piece.tobytes()
            at = data.find(wanted)
            while at >= 0 and at % 4:
                at = data.find(wanted, at + 1)
            if at < 0 and len(set(piece.tolist())) == 1:
                continue  # padding
            assert at >= 0, f"a piece of {folder.name} is in no corpus"
            source, name, _ = documents[int(np.searchsorted(ends, at // 4, side="right"))]
            config = recipe["sources"][source]
            text = tokenizer.decode(piece.tolist(), skip_special_tokens=True).strip("\ufffd")
            if config["kind"] == "jsonl":
                if name not in texts:
                    file, _, line = name.rpartition(":")
                    path = next(Path(path) for path in glob.glob(config["path"]) if Path(path).name == file)  # noqa: PTH207
                    texts[name] = source_text(path, int(line), config.get("text", "text"))
                assert text in texts[name], f"{name}: decoded text is not in the source"
                compared += 1
            elif config["kind"] in ("repos", "textbooks"):
                if name not in texts:
                    from_archive = config["kind"] == "repos"
                    texts[name] = (archive_lines if from_archive else chapter_lines)(Path(config["path"]), name)
                lines = [line for line in text.splitlines()[1:-1] if len(line) > 20 and not line.startswith("# file: ")]
                assert all(line in texts[name] for line in lines), f"{name}: a decoded line is not in the archive"
                compared += len(lines)
    expect(
        compared > 0,
        f"rows {folder.name}: {compared:,} pieces or lines of {min(samples, len(rows))} rows are in their source",
    )


def archive_lines(place: Path, name: str) -> set[str]:
    """Return every line of a repository: a folder, zip or tar in `place`, or `place` itself."""
    name = name.rpartition(":")[0]
    path = place if place.name == name else place / name
    if path.is_dir():
        members = [file.read_bytes() for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = [archive.read(info) for info in archive.infolist() if not info.is_dir()]
    else:
        with tarfile.open(path) as archive:
            members = [archive.extractfile(member).read() for member in archive if member.isfile()]
    return {line for member in members for line in member.decode("utf-8", errors="replace").splitlines()}


def read_whole(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".zst":
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return gzip.decompress(data) if path.suffix == ".gz" else data


def chapter_lines(path: Path, name: str) -> set[str]:
    chapters = [json.loads(line)["text"] for line in read_whole(path).splitlines()]
    return {line for chapter in chapters for line in chapter.splitlines()}


def arrow_hashes(run: Path) -> dict[str, str]:
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*.arrow"))
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--same-as", type=Path)
    options = parser.parse_args()
    recipe = yaml.safe_load((options.run / "recipe.yaml").read_text())
    model = recipe["model"]
    folder = Path(model if isinstance(model, str) else model["tokenizer"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = {
        folder.name: check_corpus(folder)
        for folder in sorted((options.run / "corpus").iterdir())
        if (folder / "manifest.json").exists()
    }
    for folder in sorted((options.run / "datasets").iterdir()):
        check_rows(folder, tokens)
        check_decoding(
            options.run,
            folder,
            recipe,
            tokenizer,
            options.samples,
        )
    if options.same_as:
        ours, theirs = arrow_hashes(options.run), arrow_hashes(options.same_as)
        expect(ours == theirs, f"{len(ours)} Arrow files are byte-identical to those of {options.same_as}")


if __name__ == "__main__":
    main()
