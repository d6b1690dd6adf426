"""Read what training left behind: steps, validation, which rows were drawn, the positions of the model.

In: `stages/<stage>/`, or `<stage>.work` of one in progress; the recipe. Out: `Stage`, in the recipe's order.
Promise: a file still being written may end in half a line; a step that was repeated after a resume counts once.
"""

from pathlib import Path
from typing import Any

from unspool.base.artefact import MANIFEST
from unspool.base.errors import DataError
from unspool.report.reading import json_lines, json_object, number, published, size
from unspool.report.results import Stage, Step, Validation


def gather_stages(stages_dir: Path, recipe: dict[str, Any]) -> tuple[Stage, ...]:
    """Stages in the recipe's order; without a recipe, the published ones by name."""
    described = recipe.get("stages")
    entries: list[Any] = described if isinstance(described, list) else []
    entries = [entry for entry in entries if isinstance(entry, dict) and "name" in entry]
    if not entries:
        entries = [{"name": folder.name, "start": "model"} for folder in published(stages_dir)]
    stages: list[Stage] = []
    for entry in entries:
        stages.append(_stage(entry, stages_dir, stages[-1].name if stages else None))
    return tuple(stages)


def _stage(entry: dict[str, Any], stages_dir: Path, previous: str | None) -> Stage:
    name, start = str(entry["name"]), str(entry.get("start", "previous"))
    finished = (stages_dir / name / MANIFEST).is_file()
    folder = stages_dir / name if finished else stages_dir / f"{name}.work"
    config_file = folder / "model" / "config.json"
    mix, position = entry.get("mix"), entry.get("position")
    return Stage(
        name=name,
        parent={"previous": previous, "model": None}.get(start, start),
        context=size(entry.get("context")),
        planned_tokens=size(entry.get("tokens")),
        finished=finished,
        steps=_steps(folder / "metrics.jsonl", finished=finished),
        validation=_validation(folder / "validation.jsonl", finished=finished),
        mix=_shares(mix) if isinstance(mix, dict) else {},
        drawn=_drawn(folder / "ledger.jsonl", finished=finished),
        position=position if isinstance(position, dict) else {},
        config=json_object(config_file) if config_file.is_file() else None,
    )


def _shares(mix: dict[Any, Any]) -> dict[str, float]:
    """Shares as the recipe gives them; they may be weights that do not add up to 1."""
    known = {str(name): float(share) for name, share in mix.items() if isinstance(share, int | float)}
    total = sum(known.values())
    return {name: share / total for name, share in known.items()} if total > 0 else {}


def _steps(path: Path, *, finished: bool) -> tuple[Step, ...]:
    if not path.is_file():
        return ()
    # A resumed stage may repeat the steps after its last checkpoint: the later line is the one that counts.
    by_step = {step.step: step for step in (_step(raw, path, line) for line, raw in json_lines(path, finished))}
    return tuple(by_step[at] for at in sorted(by_step))


def _step(raw: dict[str, Any], path: Path, line: int) -> Step:
    try:
        return Step(
            step=int(raw["step"]),
            tokens=int(raw["tokens"]),
            loss=number(raw["loss"]),
            lr=number(raw.get("lr")),
            tokens_per_second=number(raw.get("tokens_per_second")),
            losses={str(name): number(value) for name, value in (raw.get("losses") or {}).items()},
            grad_norm=number(raw.get("grad_norm")),
            mfu=number(raw.get("mfu")),
            memory_gib=number(raw.get("memory_gib")),
            skipped=bool(raw.get("skipped")),
            wrong=str(raw.get("wrong") or ""),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: line {line} is not a training step ({error!r}).") from error


def _validation(path: Path, *, finished: bool) -> tuple[Validation, ...]:
    if not path.is_file():
        return ()
    found = (_validation_line(raw, path, line) for line, raw in json_lines(path, finished))
    by_step = {one.step: one for one in found}
    return tuple(by_step[at] for at in sorted(by_step))


def _validation_line(raw: dict[str, Any], path: Path, line: int) -> Validation:
    try:
        last = next((bucket for bucket in reversed(raw["buckets"]) if bucket["n"]), None)
        return Validation(
            step=int(raw["step"]),
            tokens=int(raw["tokens"]),
            loss=number(raw["loss"]),
            farthest=number(last["value"]) if last else None,
            span=(int(last["from"]), int(last["to"])) if last else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: line {line} is not a validation ({error!r}).") from error


def _drawn(path: Path, *, finished: bool) -> dict[str, int]:
    """How many rows of each set were trained on."""
    if not path.is_file():
        return {}
    by_step: dict[int, dict[str, int]] = {}
    for line, raw in json_lines(path, finished):
        try:
            by_step[int(raw["step"])] = {str(name): len(rows) for name, rows in raw["rows"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: line {line} is not an entry of the ledger ({error!r}).") from error
    total: dict[str, int] = {}
    for rows in by_step.values():
        for name, count in rows.items():
            total[name] = total.get(name, 0) + count
    return total
