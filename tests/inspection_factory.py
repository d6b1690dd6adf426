"""A small run on disk to look at, made on the spot: a corpus, packed rows, tangled rows and their tokenizer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from unspool.core.artifacts import publish
from unspool.data.corpus.store import CorpusWriter
from unspool.data.packing.row import Row
from unspool.data.packing.store import RowWriter
from unspool.data.strategies.utk.special_tokens import knot_ids
from unspool.data.tokenize.encoder import build_encoder

TEXTS = ["the river runs past the old mill", "日本語 and <b>bold</b>", "a bridge\tand\r\n\x1b[31mred \u202eturned"]


def byte_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level, so that a character may take several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["the river runs past the old mill and the bridge " * 20], trainer)
    backend.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)])
    if bos:
        begin = backend.token_to_id("<|begin|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def save_rows(folder: Path, rows: list[Row], **settings: Any) -> Path:
    """Rows as `data.rows` publishes them, with what the manifest says about them."""
    masked = any(row.loss_mask is not None for row in rows)
    about = {"dataset": {"seq_len": len(rows[0].tokens), **settings}}
    with publish(folder, kind="dataset", inputs={}, settings=about) as draft:
        pieced, placed = rows[0].chunk_ids is not None, rows[0].positions is not None
        with RowWriter(
            draft.folder, row_len=len(rows[0].tokens), masked=masked, pieced=pieced, placed=placed
        ) as writer:
            for row in rows:
                writer.append(row)
        draft.counts = {"rows": len(rows), "tokens": sum(len(row.tokens) for row in rows)}
        if settings.get("utk"):
            draft.counts["added_tokens"] = knot_ids(byte_tokenizer())
    return folder


def packed(docs: list[np.ndarray], row_len: int, *, source: str = "books") -> list[Row]:
    """Documents one after the other, cut where a row ends, as `concat` does."""
    tokens = np.concatenate(docs)
    ends = np.cumsum([len(doc) for doc in docs])
    rows = []
    for start in range(0, len(tokens) - row_len + 1, row_len):
        borders = [start, *(end for end in ends.tolist() if start < end < start + row_len), start + row_len]
        lens = np.diff(borders).astype(np.int32)
        rows.append(Row(tokens[start : start + row_len], lens, None, source, "intra_document"))
    return rows


def save_run(run_dir: Path) -> Path:
    """`recipe.yaml`, the tokenizer it names, corpus/books, datasets/short (concat) and datasets/tangled."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(run_dir / "model")
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump({"name": "small", "model": "model"}))
    encoder = build_encoder(tokenizer)
    docs = encoder.encode(TEXTS)
    inputs = {"tokenizer": encoder.digest}
    source = {"kind": "jsonl", "path": "books.jsonl"}
    with publish(run_dir / "corpus" / "books", kind="corpus", inputs=inputs, settings={"source": source}) as draft:
        with CorpusWriter(draft.folder / "docs-00000.arrow") as writer:
            for number, doc in enumerate(docs, start=1):
                writer.append(f"books.jsonl:{number}", doc)
        draft.counts = {"documents": len(docs), "tokens": sum(map(len, docs)), "characters": 99}
    save_rows(run_dir / "datasets" / "short", packed(docs, 16), **{"from": "books", "packing": "concat"})
    tangled = [tangled_row(tokenizer)]
    save_rows(run_dir / "datasets" / "tangled", tangled, **{"from": "books", "packing": "concat", "utk": {"hops": {}}})
    return run_dir


def tangled_row(tokenizer: PreTrainedTokenizerFast) -> Row:
    """A whole document between the two halves of another, as `data.tangle` writes them."""
    from copy import deepcopy

    encoder = build_encoder(tokenizer)
    knots = knot_ids(deepcopy(tokenizer))
    one, two, first, second, whole = encoder.encode_plain(
        ["Ab12Cd", "Xy34Zw", "the river runs past", " the old mill", "and the bridge"]
    )

    def joined(*parts: Any) -> np.ndarray:
        ids = [[knots[part]] if isinstance(part, str) else part for part in parts]
        return np.concatenate([np.asarray(part, dtype=np.uint32) for part in ids])

    head = joined("<|knot:D|>", one, "<|knot:/D|>", first, "<|knot:t1|>")
    rest = joined("<|knot:D|>", two, "<|knot:/D|>", "<|knot:h1|>", second, [encoder.eos])
    solution = joined("<|knot:S|>", one, "<|knot:s|>", two, "<|knot:/S|>")
    pieces = [head, joined(whole, [encoder.eos]), joined(rest, solution)]
    tokens = np.concatenate(pieces)
    mask = np.ones(len(tokens), dtype=np.bool_)
    mask[: len(one) + 2] = False
    return Row(tokens, np.array([len(piece) for piece in pieces], dtype=np.int32), mask, "books", "full")


def pieced_row(lens: list[int], docs: list[int], **more: Any) -> Row:
    """A row of pieces whose documents are recorded; its tokens count from 0."""
    row = Row(np.arange(sum(lens), dtype=np.uint32), np.array(lens, dtype=np.int32), None, "books", "full")
    return replace(row, **{"chunk_ids": np.array(docs, dtype=np.int32), **more})
