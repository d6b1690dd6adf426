"""Results of a study as small files: every answer, recipe, list of inputs and training log, without weights.

    <folder>/<arm>-s<seed>/niah.jsonl.gz      one line per question or text window, one file per suite
                           recipe.yaml        with all defaults, without folders of this machine
                           run.json           versions, seconds by step, digests of all input files
                           log.jsonl.gz       one line per training step, with its stage

`collect` writes them from the folder of `unspool study` or `unspool run`; `read_runs` reads them.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from unspool.core.artifacts import digest_once, read_manifest, write_atomic
from unspool.core.errors import ConfigError, DataError, UnspoolError
from unspool.evals.run import SAMPLES, SUMMARY
from unspool.models.location import ASSET_PREFIX
from unspool.recipe.json_schema import value_at
from unspool.recipe.load import LoadedRecipe, load_recipe
from unspool.recipe.yaml_lines import CoreDumper
from unspool.studies.arm_scores import read_answers
from unspool.studies.shared_work import path_places

RECIPE, FACTS, LOG = "recipe.yaml", "run.json", "log.jsonl.gz"
BASE = "base"
RUN_NAME = re.compile(r"(.+?)(?:-s(\d+))?")
# Excerpts and choices that model, recipe and seed give again.
NOT_KEPT = ("prompt", "key_positions")
LOGS = re.compile(r"(log|metrics)\.jsonl(\.gz)?")
Sample = dict[str, Any]


# Writing


def collect(folder: Path, out: Path) -> list[str]:
    """Copy the results of all runs in a folder; return the names of the written runs.

    The base model's scores become the arm `base`. The last stage of a run has the run's name; an earlier stage that was
    scored has its own name after a dot. Scores of `unspool eval --out FOLDER/ANY/NAME` are added to the run NAME. Runs
    that are already in `out` are replaced.
    """
    runs = [path.parent for path in sorted([*folder.glob(RECIPE), *folder.glob(f"*/{RECIPE}")])]
    written: list[str] = []
    for run in runs:
        loaded = load_recipe(run / RECIPE)
        stages = [stage.name for stage in loaded.recipe.stages]
        for name in (BASE, *stages):
            scores = run / "scores" / name
            if read_manifest(scores) is not None:
                title = _title(run, loaded, name, alone=run == folder)
                if title not in written:  # the base model is scored once per seed
                    _write_run(run, loaded, name, out / title, later=_later_scores(folder, title))
                    written.append(title)
    if not written:
        raise ConfigError(f"{folder}: no scores found; name the folder of a study or of a run whose recipe has evals.")
    return written


def _title(run: Path, loaded: LoadedRecipe, stage: str, *, alone: bool) -> str:
    seed = loaded.recipe.seed
    arm = run.name.removesuffix(f"-s{seed}")
    if not loaded.recipe.stages and not alone:
        return f"{arm}-s{seed}"  # merged or untrained weights, which are the base of their run
    if stage == BASE or alone:
        return f"{stage}-s{seed}"
    return f"{arm}-s{seed}" if stage == loaded.recipe.stages[-1].name else f"{arm}.{stage}-s{seed}"


def _later_scores(folder: Path, run: str) -> list[Path]:
    """Find scores of a run that `unspool eval` wrote next to the runs, such as longppl/abf-s0."""
    return [path.parent for path in sorted(folder.glob(f"*/{run}/{SUMMARY}"))]


def _samples(scores: Path) -> Iterator[Sample]:
    """Yield the lines that are kept of a scores folder; short tasks alone have no lines but cells in the summary."""
    if not (scores / SAMPLES).is_file():
        cells = json.loads((scores / SUMMARY).read_text(encoding="utf-8"))["cells"]
        yield {"suite": "short", "task": None, "length": 0, "cells": cells}
        return
    prompts = {key: answer.prompt for part in (read_answers(scores) or {}).values() for key, answer in part.items()}
    for sample in _lines(scores / SAMPLES):
        # Questions on one context are one prompt; its name is needed only where it is not the question's own.
        question = sample.get("hash", "")  # short tasks have no questions
        prompt = prompts.get(question, "").partition(" ")[2]
        own = {} if prompt in ("", question) else {"context": prompt}
        yield {key: value for key, value in sample.items() if key not in NOT_KEPT} | own


def _write_run(run: Path, loaded: LoadedRecipe, stage: str, out: Path, *, later: Sequence[Path]) -> None:
    by_suite: dict[str, list[Sample]] = {}
    for scores in (run / "scores" / stage, *later):
        for sample in _samples(scores):
            by_suite.setdefault(sample["suite"], []).append(sample)
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("*.jsonl.gz"):
        path.unlink()
    for suite, samples in by_suite.items():
        _write_lines(out / f"{suite}.jsonl.gz", samples)
    log = [
        {"stage": name} | line
        for name in _stages(loaded, stage)
        for line in _log(run / "stages" / name / "metrics.jsonl")
    ]
    if log:
        _write_lines(out / LOG, log)
    write_atomic(out / RECIPE, _recipe_text(loaded))
    suites = sorted({sample["suite"] for scores in later for sample in _samples(scores)})
    facts = _facts(run, loaded, stage) | ({"scored_later": suites} if suites else {})
    write_atomic(out / FACTS, json.dumps(facts, indent=1) + "\n")


def _stages(loaded: LoadedRecipe, last: str) -> list[str]:
    """Return the stages that lead from the base model to this one."""
    stages = loaded.recipe.stages
    before = {stage.name: BASE if at == 0 else stages[at - 1].name for at, stage in enumerate(stages)}
    before |= {stage.name: stage.init for stage in stages if stage.init != "previous"}
    found: list[str] = []
    while last != BASE:
        found.insert(0, last)
        last = before[last]
    return found


def _log(path: Path) -> list[dict[str, Any]]:
    return list(_lines(path)) if path.is_file() else []


def _recipe_text(loaded: LoadedRecipe) -> str:
    """Return the recipe with the names of its inputs instead of their folders."""
    plain: dict[str, Any] = loaded.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    for place in path_places(loaded.recipe):
        holder: Any = value_at(place[:-1], plain)
        holder[place[-1]] = _without_folder(holder[place[-1]])
    plain.pop("out", None)
    return yaml.dump(plain, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=120)


def _without_folder(path: str) -> str:
    """`/data/books/*.zst` becomes `books/*.zst`; Hub ids and shipped files are unchanged."""
    return (
        path if path.startswith(ASSET_PREFIX) else "/".join(part for part in PurePath(path).parts[-2:] if part != "/")
    )


def _facts(run: Path, loaded: LoadedRecipe, stage: str) -> dict[str, Any]:
    notes = json.loads((run / FACTS).read_text(encoding="utf-8")) if (run / FACTS).is_file() else {}
    inputs = (read_manifest(run / "scores" / stage) or {}).get("inputs", {})
    texts = {_without_folder(name): digest for name, digest in (inputs.get("text") or {}).items()}
    return {
        "stage": stage,
        "stages": _stages(loaded, stage),
        "original_context": notes.get("original_context"),
        "versions": notes.get("versions", {}),
        "seconds": notes.get("seconds", {}),
        "inputs": {
            "model": inputs.get("model"),
            "texts": texts,
            "sources": {} if stage == BASE else {name: _files(run, loaded, name) for name in loaded.recipe.sources},
        },
    }


def _files(run: Path, loaded: LoadedRecipe, name: str) -> Any:
    """List a source's files with digests; the corpus's own digest if they are not on this machine."""
    source = loaded.recipe.sources[name].with_paths(loaded.path)
    try:
        files = source.input_files(source.units(Path()))
    except (UnspoolError, OSError):
        files = []
    if not files:
        return (read_manifest(run / "corpus" / name) or {}).get("inputs", {}).get("files")
    return [
        {"file": str(file.relative_to(unit.parent)), "bytes": file.stat().st_size, "sha256": digest_once(file)}
        for unit, file in files
    ]


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    # Without a time and a name in the header, equal lines give equal bytes.
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


# Reading


@dataclass(frozen=True, kw_only=True)
class Run:
    arm: str
    seed: int
    samples: Sequence[Sample]
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"


def read_runs(folder: Path) -> list[Run]:
    """Read all runs of a folder, sorted by name; a folder without -sSEED has seed 0."""
    found = []
    for run in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(path for path in run.glob("*.jsonl*") if not LOGS.fullmatch(path.name))
        samples = [sample for path in files for sample in _lines(path)]
        if samples:
            arm, seed = RUN_NAME.fullmatch(run.name).groups()  # type: ignore[union-attr]  # it matches any name
            found.append(Run(arm=arm, seed=int(seed or 0), samples=samples, folder=run))
    if not found:
        raise DataError(f"{folder}: no run with answers found; expected ARM-sSEED/SUITE.jsonl.gz.")
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    # Not splitlines(), which also splits at separators inside outputs.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error}); collect the results again.") from None
