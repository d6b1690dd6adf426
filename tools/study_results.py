"""Pack the results of a study's folder into a few small files, for a machine that may go away."""

import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unspool.core.errors import ConfigError
from unspool.evals.run import SAMPLES, SUMMARY
from unspool.studies.raw_results import collect

# Of a run that is not finished. Its weights are too large to keep, so it must be trained again.
UNFINISHED = ("run.json", "recipe.yaml", "stages/*/metrics.jsonl", "scores/*/*.jsonl", "scores/*/plan.json")
LONGPPL, SHORT = "longppl", "short"  # folders of scores next to the runs

BLOCK, TAR_END = 512, 10240  # bytes, of the tar format


def pack(study: Path, out: Path, *, most: int, files: int) -> dict[str, Any]:
    """Write finished-1.tar, … in the layout of docs/results, and unfinished.tar.gz with answers and logs so far.

    Scores of `run_study.py longppl` and `short` are in both: with the finished run, or as longppl/RUN and short/RUN.
    """
    if not study.is_dir():
        raise ConfigError(f"{study}: no such folder; give the folder of the study.")
    if out.exists() and any(path.suffix not in (".tar", ".gz") for path in out.iterdir()):
        raise ConfigError(f"{out} holds other files; give a new folder.")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="results-") as folder:
        finished = collect(study, Path(folder)) if any(study.glob("*/scores/*/manifest.json")) else []
        for number, names in enumerate(grouped(Path(folder), finished, most), start=1):
            with tarfile.open(out / f"finished-{number}.tar", "w") as archive:
                for name in names:
                    archive.add(Path(folder) / name, name)
    done = {*finished, *(name.rpartition("-s")[0] for name in finished)}  # a run's folder may lack the seed
    begun = sorted({path.parent.name for path in study.glob("*/recipe.yaml")} - done)
    with tarfile.open(out / "unfinished.tar.gz", "w:gz") as archive:
        left = {*unfinished_files(study, begun), *later_scores(study, finished)}
        for path in sorted({*left, *study.glob("runs.*"), *study.glob("failures/*.json")}):
            archive.add(path, path.relative_to(study))
    written = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    large = next((name for name, size in written.items() if size > most), None)
    if large is not None:
        raise ConfigError(f"{out / large}: {written[large]:,} bytes; use --max-mb above {written[large] / 2**20:.1f}.")
    if len(written) > files:
        raise ConfigError(f"{out}: {len(written)} files; use --max-files {len(written)}, or a larger --max-mb.")
    return {"finished": finished, "unfinished": begun, "files": written}


def unfinished_files(study: Path, names: list[str]) -> Iterator[Path]:
    for name in names:
        for pattern in UNFINISHED:
            yield from (study / name).glob(pattern)
        yield from study.glob(f"logs/{name}.log")


def later_scores(study: Path, finished: list[str]) -> Iterator[Path]:
    """Yield what `collect` leaves out of the scores next to the runs.

    That is all of a run that is not finished, and the key tokens of LongPPL, without which no other model can be
    compared with this one.
    """
    for path in (path for kind in (LONGPPL, SHORT) for path in study.glob(f"{kind}/*/*.json*")):
        if path.parent.name not in finished or (path.name == SAMPLES and chose_key_tokens(path.parent)):
            yield path


def chose_key_tokens(scores: Path) -> bool:
    facts = json.loads((scores / SUMMARY).read_text(encoding="utf-8"))
    return any(one["suite"] == LONGPPL and one["key_tokens"] is None for one in facts.get("suites", []))


def grouped(folder: Path, names: list[str], most: int) -> Iterator[list[str]]:
    """Group runs so that the archive of each group has at most `most` bytes."""
    group: list[str] = []
    used = TAR_END
    for name in names:
        # Each entry has a header, and its content is padded.
        sizes = [0, *(path.stat().st_size for path in (folder / name).iterdir())]
        size = sum(BLOCK + -(-size // BLOCK) * BLOCK for size in sizes)
        if group and used + size > most:
            yield group
            group, used = [], TAR_END
        group.append(name)
        used += size
    if group:
        yield group
