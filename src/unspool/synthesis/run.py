"""Generate one set of conversations and publish it as a folder for `chat` sources.

The folder has `conversations-00000.jsonl.zst` …, `rejected.ndjson` and a manifest whose counts add up: asked = kept +
rejected (by reason) + failed. A killed and restarted run ends with the same bytes, and sends no request that has a
cached reply.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zstandard

from unspool.core.artifacts import Draft, digest, open_work, publish, remove
from unspool.core.checked_lines import CheckedLines, intact_lines
from unspool.core.errors import DataError
from unspool.core.progress import progress_bar
from unspool.synthesis.config import REJECT_REASONS, SynthConfig
from unspool.synthesis.conversation import ConversationBuilder, Outcome, SynthInputs
from unspool.synthesis.quality import NearDuplicates
from unspool.synthesis.scheduler import Job, JournalEntry, KeptPair, Scheduler, surplus
from unspool.synthesis.templates import Pair

KIND = "synth"
REJECTED = "rejected.ndjson"  # suffix that chat sources ignore
SHARD_BYTES = 64 << 20  # before compression
JOURNAL, EXAMPLES = "journal.jsonl", "examples.jsonl"


class Journal:
    """Finished jobs and kept conversations of a set, on disk: `with Journal(folder, key) as journal`.

    A conversation is written before its entry. On opening, everything after the last complete and undamaged entry is
    cut off, so that a killed run leaves no duplicates and no gaps. Conversations that were cut off are rebuilt from
    cached replies.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        open_work(folder, key, label=f"synth {folder.stem}", describe=_describe_work)
        self.entries, lines, examples = _read_entries(folder)
        self._journal = CheckedLines(folder / JOURNAL, lines)
        self._examples = CheckedLines(folder / EXAMPLES, examples)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._journal.close()
        self._examples.close()

    def add(self, entry: JournalEntry, example: dict[str, Any] | None) -> None:
        if example is not None:
            self._examples.append((json.dumps(example, ensure_ascii=False) + "\n").encode())
        self._journal.append((json.dumps(entry) + "\n").encode())
        self.entries.append(entry)

    def examples(self) -> Iterator[tuple[JournalEntry, bytes]]:
        """Yield every kept conversation with its entry, in order."""
        with (self.folder / EXAMPLES).open("rb") as file:
            for entry in (entry for entry in self.entries if entry["kept"]):
                yield entry, file.readline()


def _describe_work(folder: Path) -> str | None:
    try:
        entries = (folder / JOURNAL).read_bytes().count(b"\n")
    except OSError:
        return None
    return f"{entries} conversations" if entries else None


def _read_entries(folder: Path) -> tuple[list[JournalEntry], list[bytes], list[bytes]]:
    """(entries, their lines, conversations), up to the first damaged entry or conversation."""
    examples = intact_lines(folder / EXAMPLES)
    entries: list[JournalEntry] = []
    lines: list[bytes] = []
    kept = 0
    for line in intact_lines(folder / JOURNAL):
        entry = json.loads(line)
        if entry["kept"] and kept == len(examples):
            break
        kept += entry["kept"]
        entries.append(entry)
        lines.append(line)
    return entries, lines, examples[:kept]


class Generation:
    """Builds conversations in threads and finishes them in order."""

    def __init__(self, name: str, inputs: SynthInputs, journal: Journal) -> None:
        self._name, self._inputs, self._journal = name, inputs, journal
        self._config = inputs.config
        self._scheduler = Scheduler(self._config, inputs.documents, inputs.templates, seed=inputs.seed)
        self._duplicates = NearDuplicates(self._config.checks.near)
        self._started = self._replay()

    def run(self) -> None:
        total = self._config.tokens
        builder = ConversationBuilder(self._inputs)
        pool = ThreadPoolExecutor(self._config.ahead, thread_name_prefix="conversation")
        in_flight: list[tuple[Job, Future[Outcome]]] = [(job, pool.submit(builder.build, job)) for job in self._started]
        with progress_bar(f"synth {self._name}", total) as advance:
            advance(sum(self._scheduler.tokens.values()) if total else len(self._journal.entries), self._note())
            try:
                while True:
                    jobs = self._next_jobs(len(in_flight))
                    in_flight += [(job, pool.submit(builder.build, job)) for job in jobs]
                    if not in_flight:
                        break
                    job, future = in_flight.pop(0)
                    tokens = self._finish(job, future.result())
                    advance(tokens if total else 1, self._note())
            except BaseException:
                self._inputs.generator.close()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        pool.shutdown()

    def _next_jobs(self, in_flight: int) -> Iterator[Job]:
        while in_flight < self._config.ahead and (job := self._scheduler.next_job()) is not None:
            in_flight += 1
            yield job

    def _note(self) -> str:
        return f"{sum(self._scheduler.kept.values())} kept of {len(self._journal.entries)}"

    def _finish(self, job: Job, outcome: Outcome) -> int:
        """Check against earlier conversations and write the result. Returns the number of kept tokens."""
        reason = outcome.reason
        if reason is None and job.reused is None and self._duplicates.has_similar(_pair_text(outcome.pair)):
            reason = "near_copy"
        if reason is None and not self._scheduler.accepts(job.kind, outcome.tokens):
            reason = "surplus"
        entry = _entry(job, outcome, reason, self._inputs)
        self._journal.add(entry, None if reason else _example(self._name, job, outcome, self._inputs))
        self._apply(job, entry)
        return outcome.tokens if reason is None else 0

    def _apply(self, job: Job, entry: JournalEntry) -> None:
        """Update the state with a finished job of this process or of an earlier one."""
        if entry["reason"] == "surplus":
            self._scheduler.close(job.kind)
        if not entry["kept"]:
            self._scheduler.finish(job, None)
            return
        pair = Pair(entry["question"], entry["answer"])
        if job.reused is None:
            self._duplicates.add(_pair_text(pair))
        kept_pair = KeptPair(pair=pair, visit=job.visit, requests=tuple(entry["requests"]))
        self._scheduler.finish(job, entry["tokens"], kept_pair)

    def _replay(self) -> list[Job]:
        """Schedule the jobs of the journal again. Returns jobs that were started but not finished."""
        started: list[Job] = []
        for entry in self._journal.entries:
            started += self._next_jobs(len(started))
            job = started.pop(0)
            assert (job.number, job.kind) == (entry["n"], entry["kind"]), "the journal belongs to another schedule"
            self._apply(job, entry)
        return started


def generate(
    name: str, inputs: SynthInputs, out_dir: Path, *, input_hashes: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Generate a set and publish it. Resumes from its work folder if `input_hashes` and `settings` are equal."""
    work = out_dir.with_name(out_dir.name + ".work")
    with Journal(work, digest([input_hashes, settings])) as journal:
        with ExitStack() as stack:
            for client in (inputs.generator, inputs.judge):
                if client is not None:
                    stack.callback(client.close)
            Generation(name, inputs, journal).run()
        if not any(entry["kept"] for entry in journal.entries):
            # Without its journal, the next run repeats failed requests and takes all other replies from the cache.
            remove(work)
            raise DataError(_nothing_kept(name, journal.entries))
        with publish(out_dir, kind=KIND, inputs=input_hashes, settings=settings) as draft:
            _write(draft, journal, inputs)
    remove(work)


def _nothing_kept(name: str, entries: Sequence[JournalEntry]) -> str:
    reasons = Counter((entry["reason"], entry["failed"]) for entry in entries).most_common()
    counted = "; ".join(
        f"{count} failed: {reason}" if failed else f"{count} {reason} ({REJECT_REASONS[reason]})"
        for (reason, failed), count in reasons
    )
    detail = next((entry["detail"].rstrip(".") for entry in entries if entry["detail"]), None)
    return (
        f"synth {name}: none of {len(entries)} conversations was kept, so nothing was written: {counted}. "
        f"{f'The first: {detail}. ' if detail else ''}Use another generator, relax `checks`, or fix the failure; "
        "cached replies are not requested again."
    )


def _write(draft: Draft, journal: Journal, inputs: SynthInputs) -> None:
    dropped = surplus(journal.entries, inputs.config)
    write_shards(draft.folder, (data for entry, data in journal.examples() if entry["n"] not in dropped))
    entries = [
        {**entry, "kept": False, "reason": "surplus"} if entry["n"] in dropped else entry for entry in journal.entries
    ]
    fields = ("n", "kind", "document", "reason", "failed", "detail")
    rejected = [{field: entry[field] for field in fields} for entry in entries if not entry["kept"]]
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in rejected)
    (draft.folder / REJECTED).write_text(text, encoding="utf-8")
    draft.counts.update(count(entries, inputs.config))
    draft.counts["documents"] = {
        "used": len({entry["document"] for entry in entries if entry["kept"]}),
        "long": len(inputs.documents),
        "too_short": inputs.documents.num_short,
    }
    draft.counts["wording"] = _template_uses(entries, inputs)


def write_shards(folder: Path, records: Iterable[bytes]) -> int:
    """Write `conversations-00000.jsonl.zst` …. Returns the number of files."""
    number, left = -1, 0
    file: Any = None
    try:
        for record in records:
            if left <= 0:
                if file is not None:
                    file.close()
                number, left = number + 1, SHARD_BYTES
                # `close` ends the frame, so that readers can detect a truncated file.
                raw = (folder / f"conversations-{number:05d}.jsonl.zst").open("wb")
                file = zstandard.ZstdCompressor(level=3).stream_writer(raw)
            file.write(record)
            left -= len(record)
    finally:
        if file is not None:
            file.close()
    return number + 1


def count(entries: Sequence[JournalEntry], config: SynthConfig) -> dict[str, Any]:
    """Counts with asked = kept + rejected + failed, for every kind and in total."""
    kinds = {}
    tokens = sum(entry["tokens"] for entry in entries if entry["kept"])
    for kind, share in config.token_shares.items():
        of_kind = [entry for entry in entries if entry["kind"] == kind]
        kept = [entry for entry in of_kind if entry["kept"]]
        rejected = [entry for entry in of_kind if not entry["kept"]]
        kind_tokens = sum(entry["tokens"] for entry in kept)
        kinds[kind] = {
            "asked": len(of_kind),
            "kept": len(kept),
            "rejected": dict(sorted(Counter(entry["reason"] for entry in rejected if not entry["failed"]).items())),
            "failed": dict(sorted(Counter(entry["reason"] for entry in rejected if entry["failed"]).items())),
            "tokens": kind_tokens,
            "share": kind_tokens / tokens if tokens else None,
            "wanted_share": share,
        }
    return {
        "asked": len(entries),
        "kept": sum(entry["kept"] for entry in entries),
        "rejected": sum(not entry["kept"] and not entry["failed"] for entry in entries),
        "failed": sum(entry["failed"] for entry in entries),
        "tokens": tokens,
        "wanted_tokens": config.tokens,
        "kinds": kinds,
    }


def _template_uses(entries: Sequence[JournalEntry], inputs: SynthInputs) -> dict[str, dict[str, list[int]]]:
    uses: dict[str, dict[str, list[int]]] = {
        kind: {name: [0] * len(texts) for name, texts in lists.items()}
        for kind, lists in inputs.templates.lists.items()
        if kind in inputs.config.token_shares
    }
    for entry in entries:
        if entry["kept"]:
            for name, index in entry["wording"].items():
                uses[entry["kind"]][name][index] += 1
    return uses


def _pair_text(pair: Pair | None) -> str:
    return "" if pair is None else f"{pair.question}\n{pair.answer}"


def _entry(job: Job, outcome: Outcome, reason: str | None, inputs: SynthInputs) -> JournalEntry:
    source, document = inputs.documents.name(job.visit.document)
    entry: JournalEntry = {
        "n": job.number,
        "kind": job.kind,
        "document": f"{source}/{document}",
        "kept": reason is None,
        "reason": reason,
        "failed": outcome.is_failure,
        "detail": outcome.detail,
        "tokens": outcome.tokens,
    }
    if reason is None:
        assert outcome.pair is not None
        entry |= {"question": outcome.pair.question, "answer": outcome.pair.answer, "requests": list(outcome.requests)}
        entry["wording"] = job.choice
    return entry


def _example(name: str, job: Job, outcome: Outcome, inputs: SynthInputs) -> dict[str, Any]:
    """A record for `chat` sources, which read `messages`. Other fields are for people and audits."""
    source, document = inputs.documents.name(job.visit.document)
    return {
        "messages": [{"role": message.role, "content": message.content} for message in outcome.messages],
        "id": f"{name}:{job.number}",
        "kind": job.kind,
        "tokens": outcome.tokens,
        "provenance": {
            "source": source,
            "document": document,
            **outcome.shown,
            "wording": job.choice,
            "generator": getattr(inputs.config.generator, "model", inputs.config.generator.kind),
            "requests": list(outcome.requests),
            "pair_reused": job.reused is not None,
        },
    }
