"""Write the training and evaluation files of the recipe and the studies called `…-small`, without overlap between them.

    python tools/prepare_corpus.py inputs.yaml --tokenizer MODEL --out data

`inputs.yaml` names your files; paths are relative to it:

    books: books/*.jsonl.zst                 # {"text": …}, one book per line
    textbooks: textbooks.jsonl.zst           # one chapter per line: book, chapter, text
    repos: sdists                            # source archives or folders, one per repository
    short: {web: …, wiki: …, stackexchange: …, math: …, papers: …}
    conversations: chats.jsonl.zst           # {"messages": […]}
    helmet: {nq: …, hotpotqa: …, passages: [a.jsonl.zst, b.jsonl.zst], trec.test: …}
    short_tasks: [hellaswag.jsonl.zst]       # further evaluation files: their texts leave the training data

A document (of textbooks: a chapter) is dropped if it shares 13 consecutive words with a text of an evaluation: a
question, an answer, a context, a held-out book, a record of a HELMET file. `overlap.json` counts what was found,
`files.json` holds the digests of all files read and written. Run it in the folder from which the recipe runs: its
evaluations name files in data/.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
import zstandard

from unspool.core.artifacts import file_digest
from unspool.core.config import did_you_mean
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.progress import progress_bar
from unspool.core.rng import rng_for
from unspool.data.sources.base import Document, FileSource, read_items, read_strictly
from unspool.data.sources.chat import ChatSource
from unspool.data.sources.jsonl import JsonlSource
from unspool.data.sources.repos import ReposSource
from unspool.evals.config import EvalConfig
from unspool.evals.suites import suite_of
from unspool.evals.suites.needle_wordings import expand_wordings
from unspool.evals.suites.niah import NiahEval
from unspool.models.location import model_path
from unspool.models.tokenizer import load_tokenizer
from unspool.recipe.load import load_recipe
from unspool.studies.load import load_study
from unspool.synthesis.decontamination import NgramIndex, eval_texts, file_texts

KEYS = ("books", "textbooks", "repos", "short", "conversations", "helmet", "short_tasks")
SHORT = ("web", "wiki", "stackexchange", "math", "papers")
RECIPES, STUDIES = ("prolong-small",), ("utk-small", "harpe-small", "prolong-small")
NGRAM = 13
HELDOUT_BOOKS, HELDOUT_CHARS = 12, 600_000  # books of at least this length: several windows of 128K tokens in each
SHORT_CHARS = 32_000  # longer texts of short sources are cut at paragraphs, to about 8K tokens
MAX_CHARS = {"books": 48_000_000, "repos": 24_000_000, "textbooks": 12_000_000}
REPO_CHARS = 1_500_000  # of one repository, so that no repository fills a source
SEEDS = range(6)  # of the planned runs
NEEDLES, NEEDLE_LENGTH = 270, 4096  # contexts per seed that are compared
LEVEL = 19  # of zstd


@dataclass
class Inputs:
    """The paths in the input file, and every file that was read."""

    root: Path
    paths: dict[str, Any]
    read: set[Path] = field(default_factory=set)

    def files(self, source: FileSource) -> list[Path]:
        found = source.units(self.root)
        self.read |= {file for path in found for file in ([path] if path.is_file() else path.rglob("*"))}
        return found

    def documents(self, source: FileSource) -> Iterator[Document]:
        return read_strictly(source, self.files(source), seed=0)

    def texts(self, path: str) -> Iterator[str]:
        return (document.text for document in self.documents(JsonlSource(kind="jsonl", path=path)))


def read_inputs(path: Path) -> Inputs:
    try:
        paths = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); write the paths as in --help.") from error
    if not isinstance(paths, dict):
        raise ConfigError(f"{path}: must be a mapping with the keys {', '.join(KEYS)}.")
    for key in paths:
        if key not in KEYS:
            raise ConfigError(f"{path}: {key!r} is not known{did_you_mean(key, KEYS)} Known: {', '.join(KEYS)}.")
    missing = [key for key in KEYS if not paths.get(key)]
    missing += [f"short.{name}" for name in SHORT if name not in (paths.get("short") or {})]
    if missing:
        raise ConfigError(f"{path}: {', '.join(missing)} missing; add the paths of your files.")
    return Inputs(path.parent, paths)


def cut(text: str, size: int) -> Iterator[str]:
    """Cut a text at paragraph ends into parts of about `size` characters."""
    part: list[str] = []
    length = 0
    for paragraph in text.split("\n\n"):
        if part and length + len(paragraph) > size:
            yield "\n\n".join(part)
            part, length = [], 0
        part.append(paragraph)
        length += len(paragraph) + 2
    yield "\n\n".join(part)


def up_to(texts: Iterable[str], chars: int) -> Iterator[str]:
    """Yield texts until they have `chars` characters; the last one is whole."""
    for text in texts:
        if chars <= 0:
            return
        yield text
        chars -= len(text)


def hold_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return (training books, held-out books)."""
    long = [at for at, text in enumerate(texts) if len(text) >= HELDOUT_CHARS]
    if len(long) < 2 * HELDOUT_BOOKS:
        raise ConfigError(
            f"books: {len(long)} have {HELDOUT_CHARS:,} characters; evaluation holds out {HELDOUT_BOOKS}, so give at "
            f"least {2 * HELDOUT_BOOKS} of them."
        )
    chosen = set(rng_for(0, "held-out books").choice(long, size=HELDOUT_BOOKS, replace=False).tolist())
    order = rng_for(0, "book order").permutation(len(texts)).tolist()
    return [texts[at] for at in order if at not in chosen], [texts[at] for at in sorted(chosen)]


def join_chapters(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Join the chapters of each book by number, the books in a seeded order."""
    books: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        books.setdefault(str(record["book"]), []).append(record)
    names = sorted(books)
    for at in rng_for(0, "textbook order").permutation(len(names)).tolist():
        chapters = sorted(books[names[at]], key=lambda record: int(re.sub(r"\D", "", str(record["chapter"])) or 0))
        yield "\n\n".join(str(chapter["text"]) for chapter in chapters)


def as_text(messages: Iterable[Any]) -> str:
    names = {"system": "System", "user": "User", "assistant": "Assistant"}
    return "\n\n".join(f"{names[one.role]}: {one.content}" for one in messages)


def long_conversations(abstracts: list[str], *, chars: tuple[int, int], count: int) -> Iterator[list[dict[str, str]]]:
    """Write conversations about many abstracts by rule: which title, which first sentence, all titles in order."""
    rng = rng_for(0, "long conversations")
    at = 0
    for _ in range(count):
        size = int(rng.integers(*chars))
        papers: list[tuple[str, str]] = []
        while sum(map(len, (text for _, text in papers))) < size and at < len(abstracts):
            title, _, text = abstracts[at].partition("\n")
            at += 1
            if title.strip() and text.strip():
                papers.append((title.strip(), text.strip()))
        if at >= len(abstracts):
            return
        listed = "\n\n".join(f"{title}\n{text}" for title, text in papers)
        one, other = (papers[place] for place in rng.choice(len(papers), size=2, replace=False).tolist())
        first = other[1].partition(". ")[0].rstrip(".") + "."
        turns = [
            (f"{listed}\n\nWhich of these papers begins with: “{first}”?", other[0]),
            (f"How does the abstract of “{one[0]}” begin?", one[1].partition(". ")[0].rstrip(".") + "."),
            ("List the titles of the first ten papers in order.", "\n".join(title for title, _ in papers[:10])),
        ]
        yield [
            message
            for asked, answer in turns
            for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})
        ]


@dataclass
class Overlap:
    """Finds documents that share words with an evaluation, and counts them by source and suite."""

    indexes: dict[str, NgramIndex]
    documents: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    chars_dropped: Counter[str] = field(default_factory=Counter)
    matches: dict[str, Counter[str]] = field(default_factory=dict)

    def clean(self, name: str, items: Iterable[Any], text_of: Callable[[Any], str] = str) -> Iterator[Any]:
        for item in items:
            text = text_of(item)
            found = [suite for suite, index in self.indexes.items() if index.overlaps(text)]
            self.documents[name] += 1
            self.matches.setdefault(name, Counter()).update(found)
            if found:
                self.dropped[name] += 1
                self.chars_dropped[name] += len(text)
            else:
                yield item

    def summary(self) -> dict[str, Any]:
        sources = {
            name: {
                "documents": count,
                "dropped": self.dropped[name],
                "characters_dropped": self.chars_dropped[name],
                "by_suite": dict(sorted(self.matches[name].items())),
            }
            for name, count in self.documents.items()
        }
        ngrams = {suite: {"texts": index.num_texts, "ngrams": len(index)} for suite, index in self.indexes.items()}
        return {"ngram": NGRAM, "suites": ngrams, "sources": sources}


def all_evals() -> list[tuple[EvalConfig, int]]:
    """Every entry of the recipe and the studies under the plan's seeds, in all needle wordings, at its shortest length.

    Longer prompts consist of the same held-out books, files, templates and generated facts.
    """
    recipes = [load_recipe(name).recipe for name in RECIPES]
    recipes += [run.loaded.recipe for name in STUDIES for run in load_study(name).runs]
    found = [(entry, seed) for recipe in recipes for entry in recipe.evals for seed in SEEDS]
    distinct: dict[str, tuple[EvalConfig, int]] = {}
    for whole, seed in found:
        change = {"lengths": [min(whole.lengths)]} if hasattr(whole, "lengths") else {}
        if isinstance(whole, NiahEval):
            change = {"lengths": [NEEDLE_LENGTH], "wordings": expand_wordings(["all", "heldout-2"]), "samples": NEEDLES}
        entry = whole.model_copy(update=change)
        # Short tasks need lm-eval; their texts come from `short_tasks`.
        if entry.suite != "short":
            distinct.setdefault(f"{seed} {entry.model_dump_json(exclude={'after'})}", (entry, seed))
    return list(distinct.values())


def build_indexes(inputs: Inputs, tokenizer: Any, root: Path, *, prompts: bool) -> dict[str, NgramIndex]:
    indexes: dict[str, NgramIndex] = {}
    evals = all_evals() if prompts else []
    with progress_bar("overlap: evaluations", len(evals)) as advance:
        for number, (entry, seed) in enumerate(evals, start=1):
            print(f"overlap: {number} of {len(evals)} evaluations, {entry.suite}, seed {seed}", file=sys.stderr)
            name = suite_of(entry).name
            indexes.setdefault(name, NgramIndex(NGRAM)).add(eval_texts([entry], tokenizer, seed=seed, root=root))
            advance(1)
    files = {"helmet": list(helmet_files(inputs).values()), "short": [inputs.paths["short_tasks"]]}
    for name, groups in files.items():
        paths = [str(inputs.root / path) for group in groups for path in group]
        inputs.read |= set(map(Path, paths))
        indexes.setdefault(name, NgramIndex(NGRAM)).add(file_texts(paths))
    return indexes


def helmet_files(inputs: Inputs) -> dict[str, list[str]]:
    given = inputs.paths["helmet"]
    return {name: paths if isinstance(paths, list) else [paths] for name, paths in given.items()}


class Writer:
    """Writes compressed JSON lines into the output folder; a file appears when it is complete."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.written: dict[str, dict[str, Any]] = {}

    def write(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        path = self.out / f"{name}.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".partial")
        count = chars = 0
        with draft.open("wb") as raw, zstandard.ZstdCompressor(level=LEVEL).stream_writer(raw) as stream:
            for record in records:
                line = json.dumps(record, ensure_ascii=False)
                stream.write(f"{line}\n".encode())
                count += 1
                chars += len(line)
        if not count:
            draft.unlink()
            raise ConfigError(f"{name}: no document is left; give more text for it.")
        draft.rename(path)
        self.written[name] = {"records": count, "characters": chars, "bytes": path.stat().st_size}
        self.written[name]["sha256"] = file_digest(path)
        print(f"{path}: {count:,} records, {chars / 4e6:.2f}M tokens at 4 characters, {path.stat().st_size:,} bytes")

    def texts(self, name: str, texts: Iterable[str]) -> None:
        self.write(name, ({"text": text} for text in texts))


def write_training(inputs: Inputs, writer: Writer, overlap: Overlap, books: list[str]) -> None:
    paths = inputs.paths
    writer.texts("books", up_to(overlap.clean("books", books), MAX_CHARS["books"]))
    chapters = overlap.clean("textbooks", records_of(inputs, paths["textbooks"]), lambda record: str(record["text"]))
    writer.texts("textbooks", up_to(join_chapters(chapters), MAX_CHARS["textbooks"]))
    repositories = inputs.documents(ReposSource(kind="repos", path=paths["repos"]))
    code = overlap.clean("repos", (document.text[:REPO_CHARS] for document in repositories))
    writer.texts("repos", up_to(code, MAX_CHARS["repos"]))
    for name in SHORT:
        parts = (part for text in inputs.texts(paths["short"][name]) for part in cut(text, SHORT_CHARS))
        kept = overlap.clean(name, parts)
        if name == "papers":
            # Long conversations are about other abstracts than those of the training text.
            abstracts = list(kept)
            kept = iter(abstracts[::2])
            conversations = long_conversations(abstracts[1::2], chars=(32_000, 100_000), count=60)
            writer.write("long-chat", ({"messages": messages} for messages in conversations))
        writer.texts(name, kept)


def write_chats(inputs: Inputs, writer: Writer, overlap: Overlap) -> None:
    """Half of the conversations become plain text for training, the other half is for SFT."""
    source = ChatSource(kind="chat", path=inputs.paths["conversations"])
    # Conversations with tool calls cannot be read; `read_items` yields the reason instead.
    items = list(read_items(source, inputs.files(source), 0))
    messages = [item.messages for item in items if isinstance(item, Document)]
    print(f"conversations: {len(messages):,} of {len(items):,} can be read")
    kept = list(overlap.clean("conversations", messages, as_text))
    order = rng_for(0, "conversation order").permutation(len(kept)).tolist()
    writer.texts("talks", (as_text(kept[at]) for at in order[::2]))
    chats = ([{"role": one.role, "content": one.content} for one in kept[at]] for at in order[1::2])
    writer.write("chat", ({"messages": messages} for messages in chats))


def write_evaluation(inputs: Inputs, writer: Writer, heldout: list[str]) -> None:
    writer.texts("heldout", heldout)
    for name, paths in helmet_files(inputs).items():
        writer.write(f"helmet/{name}", (record for path in paths for record in records_of(inputs, path)))


def records_of(inputs: Inputs, path: str) -> Iterator[dict[str, Any]]:
    with zstandard.open(inputs.root / path, "rt", encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines)


def prepare(inputs: Inputs, out: Path, tokenizer: str, *, prompts: bool) -> None:
    encoder = load_tokenizer(model_path(tokenizer, Path()))
    writer = Writer(out)
    books, heldout = hold_out(list(inputs.texts(inputs.paths["books"])))
    write_evaluation(inputs, writer, heldout)
    indexes = build_indexes(inputs, encoder, out.absolute().parent, prompts=prompts)
    indexes.setdefault("perplexity", NgramIndex(NGRAM)).add(heldout)
    overlap = Overlap(indexes)
    write_training(inputs, writer, overlap, books)
    write_chats(inputs, writer, overlap)
    read = {file.relative_to(inputs.root).as_posix(): file_digest(file) for file in sorted(inputs.read)}
    (out / "overlap.json").write_text(json.dumps(overlap.summary(), indent=1) + "\n", encoding="utf-8")
    files = {"read": read, "written": writer.written}
    (out / "files.json").write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
    print(f"{out / 'overlap.json'}, {out / 'files.json'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path, help="YAML file with the paths of your files")
    parser.add_argument("--tokenizer", required=True, help="model whose tokenizer the evaluations use")
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder to write; the recipes read data/")
    parser.add_argument(
        "--files-only",
        action="store_true",
        help="compare with evaluation files and held-out books only, not with generated prompts (a tenth of the time)",
    )
    args = parser.parse_args()
    if args.out.name != "data":
        parser.error("--out: the evaluations of the recipes read files in data/; choose a folder called data")
    try:
        prepare(read_inputs(args.inputs), args.out, args.tokenizer, prompts=not args.files_only)
    except UnspoolError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
