"""Account for every record of a corpus: kept as a document, quarantined, or skipped for a counted reason."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unspool.core.errors import DataError
from unspool.core.formatting import one_line
from unspool.data.sources.base import Bad, Document, Filtered, Item

QUARANTINE = "quarantine.jsonl"
LEFT_OUT = "left_out.jsonl"
# If this many records are unreadable, and more than are readable, the field or format is wrong.
HOPELESS = 1000


@dataclass
class Ledger:
    """Counts of the records of one task, or of a whole corpus."""

    records: int = 0
    filtered: Counter[str] = field(default_factory=Counter)  # by reason
    bad: list[Bad] = field(default_factory=list)
    left_out: list[tuple[str, str, str]] = field(default_factory=list)  # document, part of it, reason
    tasks: Counter[str] = field(default_factory=Counter)  # tasks inserted into documents, by name, and their documents

    def clear(self) -> None:
        self.records = 0
        self.filtered.clear()
        self.bad.clear()
        self.left_out.clear()
        self.tasks.clear()

    def add(self, item: Item) -> None:
        self.records += 1
        if isinstance(item, Filtered):
            self.filtered[item.reason] += 1
        elif isinstance(item, Bad):
            self.bad.append(item)
            if len(self.bad) >= HOPELESS and 2 * len(self.bad) > self.records:
                raise DataError(
                    f"{len(self.bad):,} of the first {self.records:,} records cannot be read; {describe_bad(self.bad)} "
                    "Check the source's kind and fields."
                )
        elif isinstance(item, Document):
            self.left_out += [(item.id, part, reason) for part, reason in item.left_out]

    def save(self, path: Path) -> None:
        """Write the counts of a task, after its documents are written."""
        bad = [[entry.file, entry.record, entry.reason, entry.detail] for entry in self.bad]
        content: dict[str, Any] = {"records": self.records, "filtered": self.filtered, "bad": bad}
        content |= {"left_out": self.left_out, **({"tasks": self.tasks} if self.tasks else {})}
        path.write_text(json.dumps(content, ensure_ascii=True))

    def publish(self, folder: Path) -> None:
        """Write the readable lists into a corpus folder, unless they are empty."""
        quarantine = [
            {"file": entry.file, "record": entry.record, "reason": entry.reason, "detail": entry.detail}
            for entry in self.bad
        ]
        left_out = [{"document": document, "part": part, "reason": reason} for document, part, reason in self.left_out]
        for name, entries in ((QUARANTINE, quarantine), (LEFT_OUT, left_out)):
            path = folder / name
            path.unlink(missing_ok=True)
            if entries:
                path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))

    def counts(self, *, documents: int) -> dict[str, Any]:
        """Return the counts for the manifest. Records that are missing for no other reason were beyond the limit."""
        rest = self.records - documents - len(self.bad) - self.filtered.total()
        assert rest >= 0, (self.records, documents, len(self.bad), self.filtered)
        filtered = self.filtered + Counter({"limit": rest})
        return {
            "records": self.records,
            "quarantined": dict(sorted(Counter(entry.reason for entry in self.bad).items())),
            "filtered": dict(sorted(filtered.items())),
            "left_out": dict(sorted(Counter(reason for _, _, reason in self.left_out).items())),
            **({"tasks": dict(sorted(self.tasks.items()))} if self.tasks else {}),
        }


def load_ledgers(paths: Iterable[Path]) -> Ledger:
    """Load and merge the ledgers of several tasks, in the given order."""
    whole = Ledger()
    for path in paths:
        content = json.loads(path.read_text())
        whole.records += content["records"]
        whole.filtered.update(content["filtered"])
        whole.tasks.update(content.get("tasks", {}))
        whole.bad += [Bad(*entry) for entry in content["bad"]]
        whole.left_out += [(document, part, reason) for document, part, reason in content["left_out"]]
    return whole


def check_bad_share(ledger: Ledger, *, name: str, max_bad: float, listed: Path) -> None:
    """Raise DataError if a larger share of the records is unreadable than the source allows."""
    if len(ledger.bad) <= max_bad * ledger.records:
        return
    percent = 100 * len(ledger.bad) / ledger.records
    raise DataError(
        f"corpus {name}: {len(ledger.bad):,} of {ledger.records:,} records ({percent:.3g}%) cannot be read, more than "
        f"max_bad={max_bad:g} allows; {describe_bad(ledger.bad)} All are listed in {listed}. "
        f"Repair the input, or raise sources.{name}.max_bad; finished tasks are kept."
    )


def describe_bad(bad: list[Bad]) -> str:
    """Describe the number of bad records by reason, and the first one."""
    reasons = Counter(entry.reason for entry in bad).most_common()
    first = bad[0]
    counted = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
    return f"{counted}; the first is {one_line(f'{first.file}, {first.record}: {first.detail}')}."
