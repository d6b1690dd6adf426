"""Build a dataset: documents of one or more corpora, packed into rows of one length.

The seed shuffles the documents, and sources follow their shares of tokens. The counts add up: tokens in the corpora +
tokens added = tokens in rows + tokens dropped, by reason. Memory holds the order of the documents and a batch of rows.

With several sources, the shares count trained tokens (shares.py); `shares` holds requested and realized ones.

Reasons for dropped tokens: `unread`, documents never drawn (`limit`, or a source of a mix ran out); `last_row`, a row
that was never filled; `limit`, the rest of a document when the limit was reached; `cut`, the rest of a document under
`truncate`; `share`, the rest of a document that was cut where its source reached its share; `short` and `tail`, under
`single_doc`, documents shorter than a row and rests after whole rows; `downsampled`, short documents that `upsample`
does not keep; `low_gain`, documents that `score` does not keep; `untrained`, rows without any loss.

Further counts, all by source: `padding`, tokens under `best_fit`; `fill_rate`, the share of rows that is not padding;
`truncated`, documents that are not whole in one row, and `truncation_rate`; `lengths` of the documents as rows hold
them (of chunks, if a strategy moves them). `strategy` has its name and the tokens it added; `upsample` the tokens drawn
again and dropped; conversations have `trained_tokens` and `untrained_rows`.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from unspool.core.artifacts import digest, publish, read_manifest, stale_reason
from unspool.core.errors import DataError
from unspool.core.progress import progress_bar
from unspool.core.sizes import format_count, format_size
from unspool.data.corpus.store import CorpusReader, open_corpus
from unspool.data.document_scores import read_scores
from unspool.data.lengths import Lengths, add_up
from unspool.data.mixture import MOST_EPOCHS
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.describe import describe_shares
from unspool.data.packing.order import Drawn, Order
from unspool.data.packing.pack import PACKERS, Packer, RowStream, Tally
from unspool.data.packing.row import Row, num_trained
from unspool.data.packing.shares import TOLERANCE, ShareKeeper
from unspool.data.packing.store import RowWriter
from unspool.data.strategies.base import Finish, PackingInputs, RowBuilder
from unspool.data.strategies.long_context_gain import describe_gains
from unspool.data.strategies.retrieval import Embed
from unspool.data.tokenize.chat_template import TEMPLATE_FILE, common_template
from unspool.data.tokenize.encoder import build_encoder

logger = logging.getLogger(__name__)

KIND = "dataset"


def build_rows(
    config: DatasetConfig,
    corpora: Mapping[str, Path],
    out_dir: Path,
    *,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    embed: Embed | None = None,
    scores: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Write the rows of `config` to `out_dir`, unless they are up to date; return the counts of the manifest.

    `corpora` maps source names to corpus folders; `tokenizer` is the unchanged tokenizer of these corpora. `embed`
    computes embeddings of texts, for `negatives` with `retriever: embeddings` only. `scores` maps the sources that
    `score` chooses documents of to their scores folders.
    """
    name = out_dir.name
    wanted = [] if config.score is None else config.score.scored_sources(config)
    missing = sorted(set(wanted) - set(scores or {}))
    assert not missing, f"dataset {name}: the caller gives no scores of {', '.join(missing)}"
    inputs = {f"corpus {source}": _files_digest(corpora[source]) for source in config.shares}
    if embed is not None:
        inputs["embeddings"] = embed.digest
    inputs |= {f"scores {source}": _files_digest(folder) for source, folder in (scores or {}).items()}
    if any(strategy.uses_tokenizer for strategy in config.strategies):
        inputs["tokenizer"] = build_encoder(tokenizer).digest
    # Omitted when it is the default, so that datasets from before this key stay up to date.
    unset = {"max_epochs"} if config.max_epochs == 1 else set()
    dumped = config.model_dump(mode="json", by_alias=True, exclude=unset)
    settings: dict[str, Any] = {"dataset": dumped, "name": name, "seed": seed}
    if len(config.shares) > 1:
        settings["shares_of"] = "trained tokens"
    # Padding is never a prediction target, and no document attends to it, so without EOS any token works.
    pad = tokenizer.eos_token_id or 0
    if config.packing == "best_fit":
        settings["padding"] = pad
    reason = stale_reason(out_dir, kind=KIND, inputs=inputs, settings=settings)
    if reason is None:
        logger.info(f"dataset {name}: up to date")
        manifest = read_manifest(out_dir)
        assert manifest is not None
        counts: dict[str, Any] = manifest["counts"]
        return counts
    logger.info(f"dataset {name}: packing {format_size(config.seq_len)} rows ({reason})")

    template = common_template({source: corpora[source] for source in config.shares}, f"dataset {name}")
    readers = {source: open_corpus(corpora[source]) for source in config.shares}
    given = PackingInputs(readers=readers, tokenizer=tokenizer, pad=pad, seed=seed, name=name, embed=embed)
    with publish(out_dir, kind=KIND, inputs=inputs, settings=settings) as draft:
        builder = _row_builder(config, given)
        tally, most = Tally(), _most_rows(config)
        gains = {source: read_scores(folder).gains for source, folder in (scores or {}).items()}
        order = Order(config, readers, seed=seed, name=name, builder=builder, tally=tally, most_rows=most, gains=gains)
        _check_gains(order, gains, name)
        if tally.shares:
            _check_suffices(config, tally.shares, name, builder)
        draft.counts = _write_rows(config, order, builder, tally, draft.folder, _finish(config, given))
        if template is not None:
            (draft.folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        if not draft.counts["rows"]:
            raise DataError(f"dataset {name}: {_too_little(config, readers, draft.counts['dropped'])}")
        if tally.shares and most and draft.counts["rows"] < (1 - TOLERANCE) * most:
            raise DataError(_ran_out(config, tally.shares, name, builder))
        if tally.shares and order.ran_out:
            _check_survived(config, draft.counts, name, order.ran_out)
    if tally.shares:
        _report_shares(name, draft.counts["shares"])
    was_limited = config.limit is not None and draft.counts["tokens"] >= config.limit
    if order.ran_out and not was_limited and "unread" in draft.counts["dropped"]:
        unread = format_count(draft.counts["dropped"]["unread"])
        logger.warning(
            f"dataset {name}: source {order.ran_out} ran out; {unread} tokens are not used, to keep the shares"
        )
    return draft.counts


def _check_gains(order: Order, gains: Mapping[str, np.ndarray], name: str) -> None:
    """Reject a source of which `score` keeps nothing; warn if documents without gain are kept."""
    for source, values in gains.items():
        uses = order.gain_uses[source]
        if not uses.any():
            raise DataError(
                f"dataset {name}: score keeps no document of source {source}, because none has a gain above 0; use "
                "score.use: top, a shorter score.short, or longer documents."
            )
        zero = int(((values == 0) & (uses > 0)).sum())
        if zero:
            logger.warning(
                f"dataset {name}: of the {int((uses > 0).sum()):,} documents that score keeps of source {source}, "
                f"{zero:,} have gain 0, as all of at most score.short tokens; lower score.keep to leave them out"
            )


def _row_builder(config: DatasetConfig, inputs: PackingInputs) -> RowBuilder:
    """Return the row builder: that of the strategy that moves chunks, else that of `packing`."""
    builder = config.chunk_strategy and config.chunk_strategy.build(config, inputs)
    return builder or RowBuilder(
        pack=partial(PACKERS[config.packing], pad=inputs.pad), masked=inputs.is_masked or config.packing == "best_fit"
    )


def _finish(config: DatasetConfig, inputs: PackingInputs) -> Finish:
    """Return the changes to packed rows: chunks move, then `attention` overrides, then all other strategies."""
    ordered = sorted(config.strategies, key=lambda strategy: not strategy.moves_chunks)
    steps = [(strategy.moves_chunks, strategy.finish(config, inputs)) for strategy in ordered]

    def finish(rows: Sequence[Row]) -> Sequence[Row]:
        for step in (step for moves_chunks, step in steps if step and moves_chunks):
            rows = step(rows)
        if config.attention is not None:
            rows = [replace(row, attention=config.attention) for row in rows]
        for step in (step for moves_chunks, step in steps if step and not moves_chunks):
            rows = step(rows)
        return rows

    return finish


def _write_rows(
    config: DatasetConfig, order: Order, builder: RowBuilder, tally: Tally, folder: Path, finish: Finish
) -> dict[str, Any]:
    most = _most_rows(config)
    num_rows = 0
    pieces = Lengths()
    is_masked = any(reader.is_masked for reader in order.readers.values())
    trained: list[int] = []  # trained tokens of each row
    sets_positions = any(strategy.sets_positions for strategy in config.strategies)
    writer_options = {"masked": builder.masked, "pieced": builder.chunked, "placed": sets_positions}
    # Close the packer before taking the counts: if the limit stopped it, it then counts the documents that it still
    # holds.
    with (
        RowWriter(folder, row_len=config.seq_len, **writer_options) as writer,
        closing(_pack(config, order, builder.pack, tally)) as rows,
        progress_bar("pack", most) as advance,
    ):
        for batch in _batches(islice(rows, most), max(1, tally.window // config.seq_len)):
            for row in finish(batch):
                writer.append(row)
                if tally.shares:
                    tally.shares.count(row)
                if is_masked and row.loss_mask is not None:
                    trained.append(num_trained(row.doc_lens, row.loss_mask))
            if not builder.counts_documents:
                pieces.add(np.concatenate([row.doc_lens for row in batch]))
            num_rows += len(batch)
            advance(len(batch), "")
    counts = _counts(config, order, builder, tally, num_rows, pieces)
    if tally.shares:
        counts["shares"] = tally.shares.realized()
    if is_masked:
        counts |= {"trained_tokens": sum(trained), "untrained_rows": trained.count(0)}
    return counts


def _pack(config: DatasetConfig, order: Order, pack: Packer, tally: Tally) -> RowStream:
    if (config.upsample or config.score or config.max_epochs > 1) and config.packing == "best_fit":
        # Best fit plans many documents at a time and groups equal lengths, so copies of a document would share a row.
        for stretch in order.stretches():
            yield from pack(stretch, config.seq_len, tally)
    else:
        yield from pack(order, config.seq_len, tally)


def _most_rows(config: DatasetConfig) -> int | None:
    return None if config.limit is None else -(-config.limit // config.seq_len)


def _check_suffices(config: DatasetConfig, shares: ShareKeeper, name: str, builder: RowBuilder) -> None:
    """Reject, before any work, shares that the sources cannot reach even if no token is lost."""
    if builder.borrows:
        return
    for source in shares.sources:
        if not source.left:
            of_length = f" of {format_size(config.seq_len)} tokens" if config.packing == "single_doc" else ""
            raise DataError(
                f"dataset {name}: source {source.name} has no document{of_length} that packing: {config.packing} can "
                f"use for its share of {source.goal:.3g}; add text, use a shorter seq_len, or remove the source."
            )
    most = _most_rows(config)
    if most and shares.missing[1] > TOLERANCE * shares.missing[0].goal * most * config.seq_len:
        raise DataError(_ran_out(config, shares, name, builder))


def _check_survived(config: DatasetConfig, counts: Mapping[str, Any], name: str, source: str) -> None:
    """Reject a dataset that ended far from its shares, because rows kept almost nothing of the source that ran out."""
    share = counts["shares"][source]
    if share["requested"] - share["realized"] > TOLERANCE + 1 / counts["rows"]:
        raise DataError(
            f"dataset {name}: source {source} has only {share['trained_tokens']:,} trained tokens with packing: "
            f"{config.packing}, a share of {share['realized']:.3g} instead of {share['requested']:.3g}; use a larger "
            "seq_len, packing: best_fit, max_epochs, or a lower share."
        )


def _ran_out(config: DatasetConfig, shares: ShareKeeper, name: str, builder: RowBuilder) -> str:
    """Describe which source has too few tokens for its share of the limit, how many are missing, and what to do."""
    assert config.limit is not None
    if builder.borrows:
        tokens = shares.num_rows * config.seq_len
        return (
            f"dataset {name}: documents of at least {builder.min_doc_len} tokens make {format_count(tokens)} tokens of "
            f"rows, and limit is {format_size(config.limit)}. Set max_epochs: "
            f"{math.ceil(config.max_epochs * config.limit / max(1, tokens))} to repeat them, add text, or set "
            f"limit: {tokens}."
        )
    source, missing = shares.missing
    needed = source.goal * shares.limit_tokens
    has = max(1.0, needed - missing)
    epochs = math.ceil(config.max_epochs * needed / has)
    costly = f" (repetitions beyond {MOST_EPOCHS:g} add little)" if epochs > MOST_EPOCHS else ""
    share = source.goal * has / needed
    return (
        f"dataset {name}: source {source.name} runs out: its share of {source.goal:.3g} of {format_size(config.limit)} "
        f"tokens needs {format_count(round(needed))} trained tokens, and it has about {format_count(round(has))}; "
        f"about {format_count(round(missing))} are missing. Set max_epochs: {epochs} to repeat it{costly}, lower its "
        f"share to {math.floor(1000 * share) / 1000:g}, add text, or set limit: {int(config.limit * has / needed)}."
    )


def _report_shares(name: str, shares: Mapping[str, Mapping[str, float]]) -> None:
    logger.info(f"dataset {name}: shares of trained tokens: {describe_shares(shares)}")
    off = {source: abs(entry["realized"] - entry["requested"]) for source, entry in shares.items()}
    worst = max(off, key=lambda source: off[source])
    if off[worst] > TOLERANCE:
        logger.warning(
            f"dataset {name}: the share of source {worst} is off by {off[worst]:.2%}: too few rows or too little text. "
            "Add text, or change the shares."
        )


def _batches(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    while batch := list(islice(rows, size)):
        yield batch


def _counts(
    config: DatasetConfig, order: Order, builder: RowBuilder, tally: Tally, num_rows: int, pieces: Lengths
) -> dict[str, Any]:
    row_tokens = num_rows * config.seq_len
    # Under `fit`, documents given back are not the last ones. The stream then ends with the limit, so they are few.
    drawn = order.drawn(0 if config.packing == "best_fit" else tally.given_back)
    for name, entry in drawn.items():
        tally.drop("downsampled", name, entry.dropped)
        tally.drop("low_gain", name, entry.low_gain)
        # Documents given back are already counted as unread.
        left_out = entry.dropped + entry.low_gain
        tally.drop("unread", name, order.readers[name].num_tokens - left_out - entry.read + entry.again)
    tokens_in = sum(reader.num_tokens for reader in order.readers.values())
    again = sum(entry.again for entry in drawn.values())
    assert tokens_in + tally.added + again == row_tokens + tally.dropped.total(), tally
    sources = {name: _source_counts(reader, tally, name, drawn[name]) for name, reader in order.readers.items()}
    counts = {
        "rows": num_rows,
        "tokens": row_tokens,
        "documents": order.documents_read - tally.given_back,
        "tokens_in": tokens_in,
        "tokens_added": tally.added + again,
        "dropped": _by_reason(tally.dropped),
        "padding": tally.padding,
        "fill_rate": 1 - tally.padding / row_tokens if row_tokens else None,
        "sources": sources,
    }
    if builder.added_tokens:
        counts["added_tokens"] = dict(builder.added_tokens)
    if config.chunk_strategy:
        name = config.chunk_strategy.name
        counts["strategy"] = {"name": name, "tokens_added": tally.added - tally.padding, **builder.cost}
    if config.upsample:
        counts["upsample"] = _upsample_counts(drawn, order.readers)
        for name, entry in drawn.items():
            sources[name] |= {"tokens_added": entry.again, "upsample": _upsample_counts({name: entry}, order.readers)}
    if config.score:
        for name, uses in order.gain_uses.items():
            lens = order.readers[name].lens
            sources[name]["score"] = describe_gains(order.gains[name], lens, uses, config.score.short)
        if not config.upsample:
            for name, entry in drawn.items():
                sources[name]["tokens_added"] = entry.again
    if not builder.counts_documents:
        return counts | {"lengths": pieces.histogram()}
    in_rows = sum(entry.documents for entry in tally.sources.values())
    truncated = sum(entry.truncated for entry in tally.sources.values())
    assert sum(entry["tokens"] for entry in sources.values()) + tally.padding == row_tokens
    for name, found in tally.sources.items():
        sources[name] |= {
            "documents": found.documents,
            "truncated": found.truncated,
            "lengths": found.lengths.histogram(),
        }
        assert found.lengths.num_tokens == sources[name]["tokens"], name
    return counts | {
        "truncated": truncated,
        "truncation_rate": truncated / in_rows if in_rows else None,
        "lengths": add_up(found.lengths.histogram() for found in tally.sources.values()),
    }


def _source_counts(reader: CorpusReader, tally: Tally, name: str, drawn: Drawn) -> dict[str, Any]:
    dropped = tally.source(name).dropped
    return {
        "documents_in": len(reader),
        "tokens_in": reader.num_tokens,
        "tokens": reader.num_tokens + drawn.again - dropped.total(),
        "dropped": _by_reason(dropped),
    }


def _upsample_counts(drawn: Mapping[str, Drawn], readers: Mapping[str, CorpusReader]) -> dict[str, Any]:
    """`before` is the share in the same mix of sources without upsampling."""
    used = sum(entry.used for entry in drawn.values())
    before = sum(entry.used * entry.long_in / max(1, readers[name].num_tokens) for name, entry in drawn.items())
    return {
        "tokens_added": sum(entry.again for entry in drawn.values()),
        "tokens_dropped": sum(entry.dropped for entry in drawn.values()),
        "long_share_before": before / used if used else None,
        "long_share_after": sum(entry.long for entry in drawn.values()) / used if used else None,
    }


def _by_reason(dropped: Counter[str]) -> dict[str, int]:
    return {reason: count for reason, count in sorted(dropped.items()) if count}


def _files_digest(folder: Path) -> str:
    return digest((read_manifest(folder) or {}).get("files"))


def _too_little(config: DatasetConfig, readers: Mapping[str, CorpusReader], dropped: Mapping[str, int]) -> str:
    length = format_size(config.seq_len)
    if "untrained" in dropped:
        return (
            f"no row of {length} holds a trained token, because the assistant's messages come later in the "
            "conversations; use a larger seq_len or packing: best_fit."
        )
    if config.packing == "single_doc":
        longest = {source: int(reader.lens.max(initial=0)) for source, reader in readers.items()}
        source = min(longest, key=lambda source: longest[source])
        return (
            f"packing: single_doc needs documents of at least {length} tokens, and the longest of source {source} has "
            f"{longest[source]}; use packing: concat or a shorter seq_len."
        )
    tokens = format_count(sum(reader.num_tokens for reader in readers.values()))
    if config.upsample and config.upsample.keep < 1:
        above = format_size(config.upsample.above)
        return (
            f"of {tokens} tokens, upsample keeps too few to fill one row of {length}; "
            f"keep more of the documents below {above}, or use a shorter seq_len."
        )
    return f"{tokens} tokens do not fill one row of {length}; add text or use a shorter seq_len."
