"""Generate one set of conversations: begun ahead, finished in order, checked, balanced, published.

In: a `SynthConfig`, documents, generators. Out: folder with `conversations-00000.jsonl.zst` …, `rejected.ndjson` and a
manifest whose counts add up: asked = kept + rejected (by reason) + failed.
Promise: killed at any moment and run again, it ends with the same bytes, and asks for nothing that it has a reply to.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zstandard

from unspool.core.artifacts import Draft, digest, publish
from unspool.core.progress import Advance, progress_bar
from unspool.synthesis.config import KINDS, SynthConfig
from unspool.synthesis.conversation import Maker, Outcome, Tools
from unspool.synthesis.generator_prompts import Pair
from unspool.synthesis.journal import Journal, Line
from unspool.synthesis.kind_balance import Job, Known, Schedule, balanced
from unspool.synthesis.near_duplicates import NearCopies

# Conversations as compressed JSON lines, in files of a size that can be read side by side.


SHARD_BYTES = 64 << 20  # before compression


def write_shards(folder: Path, records: Iterable[bytes]) -> int:
    """Write `conversations-00000.jsonl.zst` …; returns how many files."""
    number = -1
    room = 0
    file: Any = None
    try:
        for record in records:
            if file is None or room <= 0:
                if file is not None:
                    file.close()
                number += 1
                # `close` ends the frame, so that a reader can tell a whole file from one that breaks off.
                raw = (folder / f"conversations-{number:05d}.jsonl.zst").open("wb")
                file = zstandard.ZstdCompressor(level=3).stream_writer(raw)
                room = SHARD_BYTES
            file.write(record)
            room -= len(record)
    finally:
        if file is not None:
            file.close()
    return number + 1


KIND = "synth"
REJECTED = "rejected.ndjson"  # no ending that a chat source would read


class Generation:
    """The state of a run: what was finished, and in which order what comes next."""

    def __init__(self, name: str, tools: Tools, journal: Journal) -> None:
        self._name, self._tools, self._journal = name, tools, journal
        self._config = tools.config
        self._schedule = Schedule(self._config, tools.documents, tools.templates, seed=tools.seed)
        self._near = NearCopies(self._config.checks.near)
        self._maker = Maker(tools)
        self._waiting: list[Job] = []  # chosen before the kill, not finished
        self._replay()

    @property
    def tokens(self) -> int:
        return sum(self._schedule.tokens.values())

    def run(self) -> None:
        total = self._config.tokens
        pool = ThreadPoolExecutor(self._config.ahead, thread_name_prefix="make")
        with progress_bar(f"synth {self._name}", total) as advance:
            advance(self.tokens if total else len(self._journal.lines), self._note())
            try:
                self._run(pool, advance)
            except BaseException:
                self._tools.asking.close()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        pool.shutdown()

    def _run(self, pool: ThreadPoolExecutor, advance: Advance) -> None:
        flying = [(job, pool.submit(self._maker.make, job)) for job in self._waiting]
        while True:
            for job in self._fill(len(flying)):
                flying.append((job, pool.submit(self._maker.make, job)))
            if not flying:
                return
            job, future = flying.pop(0)
            tokens = self._finish(job, future.result())
            advance(tokens if self._config.tokens else 1, self._note())

    def _fill(self, flying: int) -> Iterator[Job]:
        while flying < self._config.ahead and (job := self._schedule.next_job()) is not None:
            flying += 1
            yield job

    def _note(self) -> str:
        kept = sum(self._schedule.kept.values())
        return f"{kept} kept of {len(self._journal.lines)}"

    def _finish(self, job: Job, outcome: Outcome) -> int:
        """Decide what depends on the order, and write it down; returns the tokens that were kept."""
        reason = outcome.reason
        is_new = job.known is None
        said = _said(outcome.pair)
        if reason is None and is_new and self._near.has_like(said):
            reason = "near_copy"
        if reason is None and not self._schedule.accepts(job.kind, outcome.tokens):
            reason = "surplus"
        line = _line(job, outcome, reason, self._tools)
        self._journal.add(line, None if reason else _example(self._name, job, outcome, self._tools))
        self._take_in(job, line)
        return outcome.tokens if reason is None else 0

    def _take_in(self, job: Job, line: Line) -> None:
        """What a finished job changes, now and when a killed run goes on."""
        if line["reason"] == "surplus":
            self._schedule.close(job.kind)
        if not line["kept"]:
            self._schedule.settle(job, None)
            return
        pair = Pair(line["question"], line["answer"])
        if job.known is None:
            self._near.add(_said(pair))
        known = Known(pair=pair, turn=job.turn, requests=tuple(line["requests"]))
        self._schedule.settle(job, line["tokens"], known)

    def _replay(self) -> None:
        """Choose what was chosen before the kill, in the same order, and take in what became of it."""
        waiting: list[Job] = []
        for line in self._journal.lines:
            waiting += self._fill(len(waiting))
            job = waiting.pop(0)
            assert (job.number, job.kind) == (line["n"], line["kind"]), "the journal is of another schedule"
            self._take_in(job, line)
        self._waiting = waiting


def generate(name: str, tools: Tools, out_dir: Path, *, inputs: dict[str, Any], settings: dict[str, Any]) -> None:
    """Make the set and publish it; a work folder that was begun for the same inputs and settings is gone on with."""
    work = out_dir.with_name(out_dir.name + ".work")
    with Journal(work, digest([inputs, settings])) as journal:
        with _closing(tools):
            Generation(name, tools, journal).run()
        with publish(out_dir, kind=KIND, inputs=inputs, settings=settings) as draft:
            _write(draft, journal, tools)
    for path in sorted(work.iterdir()):
        path.unlink()
    work.rmdir()


@contextmanager
def _closing(tools: Tools) -> Iterator[None]:
    try:
        yield
    finally:
        tools.asking.close()
        if tools.judge is not None:
            tools.judge.close()


def _write(draft: Draft, journal: Journal, tools: Tools) -> None:
    dropped = balanced(journal.lines, tools.config)
    kept = ((line, data) for line, data in journal.examples() if line["n"] not in dropped)
    write_shards(draft.folder, (data for _, data in kept))
    lines = [{**line, "kept": False, "reason": "surplus"} if line["n"] in dropped else line for line in journal.lines]
    refused = [line for line in lines if not line["kept"]]
    listed = [{key: line[key] for key in ("n", "kind", "document", "reason", "failed", "detail")} for line in refused]
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in listed)
    (draft.folder / REJECTED).write_text(text, encoding="utf-8")
    draft.counts.update(counts_of(lines, tools.config))
    draft.counts["documents"] = {"used": len({line["document"] for line in lines if line["kept"]})}
    draft.counts["documents"] |= {"long": len(tools.documents), "too_short": tools.documents.num_short}
    draft.counts["wording"] = _wording(lines, tools)


def counts_of(lines: Sequence[Line], config: SynthConfig) -> dict[str, Any]:
    """asked = kept + rejected + failed, for every kind and in all."""
    kinds = {}
    tokens = sum(line["tokens"] for line in lines if line["kept"])
    for kind in (kind for kind in KINDS if kind in config.parts):
        mine = [line for line in lines if line["kind"] == kind]
        kept = [line for line in mine if line["kept"]]
        refused = [line for line in mine if not line["kept"]]
        own = sum(line["tokens"] for line in kept)
        kinds[kind] = {
            "asked": len(mine),
            "kept": len(kept),
            "rejected": dict(sorted(Counter(line["reason"] for line in refused if not line["failed"]).items())),
            "failed": dict(sorted(Counter(line["reason"] for line in refused if line["failed"]).items())),
            "tokens": own,
            "share": own / tokens if tokens else None,
            "wanted_share": config.parts[kind],
        }
    return {
        "asked": len(lines),
        "kept": sum(line["kept"] for line in lines),
        "rejected": sum(not line["kept"] and not line["failed"] for line in lines),
        "failed": sum(line["failed"] for line in lines),
        "tokens": tokens,
        "wanted_tokens": config.tokens,
        "kinds": kinds,
    }


def _wording(lines: Sequence[Line], tools: Tools) -> dict[str, dict[str, list[int]]]:
    """How often each wording was used."""
    uses: dict[str, dict[str, list[int]]] = {
        kind: {name: [0] * len(texts) for name, texts in lists.items()}
        for kind, lists in tools.templates.lists.items()
        if kind in tools.config.parts
    }
    for line in lines:
        if line["kept"]:
            for name, number in line["wording"].items():
                uses[line["kind"]][name][number] += 1
    return uses


def _said(pair: Pair | None) -> str:
    return "" if pair is None else f"{pair.question}\n{pair.answer}"


def _line(job: Job, outcome: Outcome, reason: str | None, tools: Tools) -> Line:
    source, document = tools.documents.name(job.turn.document)
    line: Line = {
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
        line |= {"question": outcome.pair.question, "answer": outcome.pair.answer, "requests": list(outcome.requests)}
        line["wording"] = job.chosen.ids
    return line


def _example(name: str, job: Job, outcome: Outcome, tools: Tools) -> dict[str, Any]:
    """A record that sources of kind `chat` read; all but `messages` is for people and audits."""
    source, document = tools.documents.name(job.turn.document)
    return {
        "messages": [{"role": message.role, "content": message.content} for message in outcome.messages],
        "id": f"{name}:{job.number}",
        "kind": job.kind,
        "tokens": outcome.tokens,
        "provenance": {
            "source": source,
            "document": document,
            **outcome.shown,
            "wording": job.chosen.ids,
            "generator": getattr(tools.config.generator, "model", tools.config.generator.kind),
            "requests": list(outcome.requests),
            "pair_reused": job.known is not None,
        },
    }
