"""The recipe: the config classes of all packages, combined and checked against each other.

Each class checks itself; this module checks references between classes, lengths that must divide, and folder names.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from unspool.core.artifacts import WORK_ENDINGS
from unspool.core.config import Config, did_you_mean
from unspool.core.formatting import clip
from unspool.core.sizes import format_size, parse_size
from unspool.data.corpus.config import EngineConfig
from unspool.data.packing.config import STRATEGIES, AnyDataset
from unspool.data.packing.known_mixes import expand_mix
from unspool.data.sources.registry import SOURCES, AnySource
from unspool.evals.config import Eval
from unspool.models.config import NewModel
from unspool.recipe.yaml_lines import CoreDumper, Place, Problem
from unspool.synthesis.config import SynthConfig
from unspool.training.config import StageConfig

FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
# Both names are reserved: they are values of `init:`, and `scores/base` holds the base model's scores.
RESERVED_STAGES = ("previous", "base")


class Recipe(Config):
    """A whole run: from sources to scores."""

    name: str = Field(min_length=1, description="Name of the run: letters, digits, '-', '_' and '.'.")
    seed: int = Field(0, ge=0, description="Seed of all random draws.")
    model: Annotated[str, Field(min_length=1)] | NewModel = Field(
        description="Hub id, folder, .gguf file or asset:NAME. A mapping with `size`, `tokenizer` and "
        "`context_length` creates a model with random weights."
    )
    out: Path = Field(
        default_factory=lambda fields: Path("runs", fields.get("name", "")),
        description="Folder for all results. Default: runs/NAME.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device to compute on. `auto` uses a GPU if there is one."
    )
    engine: EngineConfig = Field(
        EngineConfig.model_validate({}), description="Where documents are prepared, and with how many processes."
    )
    sources: dict[str, AnySource] = Field(description="Sources of documents, by name.")
    datasets: dict[str, AnyDataset] = Field(description="Datasets of packed rows, by name.")
    stages: list[StageConfig] = Field(description="Training stages, in order.")
    evals: list[Eval] = Field([], description="Suites to score, before training and after the stages.")
    synth: dict[str, SynthConfig] = Field(
        {}, description="Sets of conversations that `unspool synth` generates, by name."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        data = self.model_dump(mode="json", by_alias=True)
        found = [f"{'.'.join(map(str, problem.place))}: {problem.text}" for problem in reference_problems(data)]
        if found:
            raise ValueError(" ".join(found))
        return self


def reference_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Find inconsistencies in a recipe's plain data.

    The data may have other problems, since all problems of a file are reported together. Values of the wrong type are
    skipped here; their class rejects them.
    """
    sources, rows = _entries(data.get("sources")), _entries(data.get("datasets"))
    stages = [_entries(stage) for stage in _items(data.get("stages"))]
    stage_names = [_text(stage.get("name")) for stage in stages]
    yield from _name_problems(_text(data.get("name")), list(sources), list(rows), stage_names)
    yield from _synth_problems(_entries(data.get("synth")), sources)
    for name, entry in rows.items():
        wanted = _entries(entry).get("from")
        with suppress(ValueError):  # the dataset's class rejects an unknown mix
            wanted = expand_mix(wanted)
        for source in [wanted] if isinstance(wanted, str) else _entries(wanted):
            if source not in sources:
                place = ("datasets", name, "from") if isinstance(wanted, str) else ("datasets", name, "from", source)
                yield Problem(place=place, text=_unknown("source", source, list(sources)))
        replacing = _entries(_entries(entry).get("replace")).get("with")
        if isinstance(replacing, str) and replacing not in sources:
            yield Problem(
                place=("datasets", name, "replace", "with"), text=_unknown("source", replacing, list(sources))
            )
    yield from _score_problems(rows, is_new=isinstance(data.get("model"), dict))
    for index, stage in enumerate(stages):
        yield from _mix_problems(index, stage, rows)
        yield from _validation_problems(index, stage, rows)
        yield from _distillation_problems(index, stage, rows, is_new=isinstance(data.get("model"), dict))
        yield from _init_problems(index, stage.get("init", "previous"), stage_names)
    for index, entry in enumerate(_items(data.get("evals"))):
        for at, name in enumerate(_items(_entries(entry).get("after"))):
            if isinstance(name, str) and name not in ("base", *stage_names):
                text = _unknown("stage", name, ["base", *stage_names])
                yield Problem(place=("evals", index, "after", at), text=text)


def _name_problems(
    name: str, source_names: list[str], row_names: list[str], stage_names: list[str]
) -> Iterator[Problem]:
    named: list[tuple[Place, str]] = [(("name",), name)] if name else []
    named += [(("sources", name), name) for name in source_names]
    named += [(("datasets", name), name) for name in row_names]
    named += [(("stages", index, "name"), name) for index, name in enumerate(stage_names) if name]
    for place, given in named:
        yield from folder_problems(given, place)
    for index, given in enumerate(stage_names):
        if given in RESERVED_STAGES:
            text = f"{given!r} is reserved; choose another name for the stage."
            yield Problem(place=("stages", index, "name"), text=text)
        if given and given in stage_names[:index]:
            text = f"{given!r} is already the name of stages.{stage_names.index(given)}; give each stage a unique name."
            yield Problem(place=("stages", index, "name"), text=text)


def _synth_problems(sets: Mapping[str, Any], sources: Mapping[str, Any]) -> Iterator[Problem]:
    for name, entry in sets.items():
        yield from folder_problems(name, ("synth", name))
        wanted = _entries(entry).get("from")
        for source in [wanted] if isinstance(wanted, str) else _items(wanted):
            place = ("synth", name, "from")
            if source not in sources:
                yield Problem(place=place, text=_unknown("source", str(source), list(sources)))
            elif (kind := SOURCES.get(_text(_entries(sources[source]).get("kind")))) and kind.is_chat:
                text = f"source {source!r} holds conversations; give a source of documents."
                yield Problem(place=place, text=text)


def _score_problems(rows: Mapping[str, Any], *, is_new: bool) -> Iterator[Problem]:
    """Reject scores by a new model, and two ways to score one source: a run keeps one set of scores for each."""
    first: dict[str, tuple[str, list[Any]]] = {}
    for name, entry in rows.items():
        score = _entries(_entries(entry).get("score"))
        if not score:
            continue
        if is_new and not score.get("model"):
            text = "missing; the recipe's model is new and cannot score, so name a trained model."
            yield Problem(place=("datasets", name, "score", "model"), text=text)
        given = [score.get("model"), *(_size(score.get(key)) for key in ("long", "short"))]
        wanted = _entries(entry).get("from")
        with suppress(ValueError):  # the dataset's class rejects an unknown mix
            wanted = expand_mix(wanted)
        sources = [wanted] if isinstance(wanted, str) else list(_entries(wanted))
        sources += [_text(_entries(_entries(entry).get("replace")).get("with"))]
        for source in [each for each in sources if not score.get("sources") or each in score["sources"]]:
            other, before = first.setdefault(source, (name, given))
            if before != given:
                text = f"datasets.{other} scores source {source!r} with other settings"
                yield Problem(
                    place=("datasets", name, "score"),
                    text=f"{text}; give both the same model, long and short, or add the source under a second name.",
                )


def _mix_problems(index: int, stage: Mapping[str, Any], rows: Mapping[str, Any]) -> Iterator[Problem]:
    context = _size(stage.get("context_length"))
    for name in _entries(stage.get("mix")):
        place = ("stages", index, "mix", name)
        length = _size(_entries(rows.get(name)).get("seq_len"))
        if name not in rows:
            yield Problem(place=place, text=_unknown("dataset", name, list(rows)))
        elif context and length and context % length:
            text = f"rows of length {format_size(length)} do not divide the context length of {format_size(context)}"
            yield Problem(place=place, text=f"{text}; change datasets.{name}.seq_len or stages.{index}.context_length.")
        else:
            yield from _pose_problems(index, stage, name, _entries(rows.get(name)))


def _validation_problems(index: int, stage: Mapping[str, Any], rows: Mapping[str, Any]) -> Iterator[Problem]:
    name = _entries(stage.get("validation")).get("dataset")
    place = ("stages", index, "validation", "dataset")
    if not isinstance(name, str) or not name:
        return
    context, length = _size(stage.get("context_length")), _size(_entries(rows.get(name)).get("seq_len"))
    if name not in rows:
        yield Problem(place=place, text=_unknown("dataset", name, list(rows)))
    elif context and length and length > context:
        text = f"rows of length {format_size(length)} exceed the context length of {format_size(context)}"
        yield Problem(place=place, text=f"{text}; change datasets.{name}.seq_len or stages.{index}.context_length.")


def _distillation_problems(
    index: int, stage: Mapping[str, Any], rows: Mapping[str, Any], *, is_new: bool
) -> Iterator[Problem]:
    refit = _entries(stage.get("attention_distillation"))
    if not refit:
        return
    begins = stage.get("init", "previous") == "base" or (index == 0 and stage.get("init", "previous") == "previous")
    if is_new and begins:
        text = "a new model has no attention to preserve; remove attention_distillation from its first stage."
        yield Problem(place=("stages", index, "attention_distillation"), text=text)
    wanted = refit.get("datasets")
    names = [wanted] if isinstance(wanted, str) and wanted else list(_entries(wanted))
    place: Place = ("stages", index, "attention_distillation", "datasets")
    lengths = {name: _size(_entries(rows.get(name)).get("seq_len")) for name in names}
    longest = max((length for length in lengths.values() if length), default=None)
    for name, length in lengths.items():
        at = place if isinstance(wanted, str) else (*place, name)
        if name not in rows:
            yield Problem(place=at, text=_unknown("dataset", name, list(rows)))
        elif _entries(rows[name]).get("pose"):
            text = "its positions (pose) exceed the original context length, with nothing to preserve; use other rows."
            yield Problem(place=at, text=text)
        elif length and longest and longest % length:
            text = f"rows of length {format_size(length)} do not divide the longest of attention_distillation.datasets"
            yield Problem(place=at, text=f"{text}, {format_size(longest)}; change datasets.{name}.seq_len.")
    for key in ("batch_tokens", "during_batch_tokens"):
        batch = _size(refit.get(key))
        if longest and batch and batch % longest:
            text = (
                f"must be a multiple of the seq_len of attention_distillation.datasets, {format_size(longest)} tokens."
            )
            yield Problem(place=("stages", index, "attention_distillation", key), text=text, show_value=True)


def _pose_problems(index: int, stage: Mapping[str, Any], name: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
    place = ("stages", index, "mix", name)
    context, target = _size(stage.get("context_length")), _size(_entries(entry.get("pose")).get("target"))
    if not target:
        return
    if context and context < target:
        text = f"its rows have positions up to {format_size(target)}, beyond the stage's context length of"
        way_out = f"lower datasets.{name}.pose.target or raise stages.{index}.context_length."
        yield Problem(place=place, text=f"{text} {format_size(context)}; {way_out}")
    moves_chunks = any(entry.get(key) for key, strategy in STRATEGIES.items() if strategy.moves_chunks)
    is_full = entry.get("attention") == "full" or moves_chunks
    if stage.get("attention") == "full" and not is_full:
        text = "its positions restart in every document (pose), but the stage attends across documents"
        way_out = f"set datasets.{name}.attention: full, or remove stages.{index}.attention."
        yield Problem(place=place, text=f"{text}; {way_out}")


def _init_problems(index: int, start: Any, stage_names: list[str]) -> Iterator[Problem]:
    earlier = [name for name in stage_names[:index] if name]
    if not isinstance(start, str) or start in ("previous", "base", *earlier):
        return
    text = _unknown("init", start, ["previous", "base", *earlier])
    if start in stage_names:
        text = f"stage {start!r} does not come before this one; start from previous, base or an earlier stage."
    yield Problem(place=("stages", index, "init"), text=text)


def folder_problems(name: str, place: Place) -> Iterator[Problem]:
    """Reject a name that cannot be a folder name."""
    if not FOLDER_NAME.fullmatch(name) or name.endswith(WORK_ENDINGS):
        allowed = "begin with a letter or digit, use at most 100 letters, digits, '-', '_' and '.'"
        text = f"{clip(name, 120)!r} cannot name a folder; {allowed}, and do not end in {', '.join(WORK_ENDINGS)}."
        yield Problem(place=place, text=text)


def _entries(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _size(value: Any) -> int | None:
    try:
        return parse_size(value)
    except ValueError:
        return None


def _unknown(kind: str, name: str, known: list[str]) -> str:
    return f"{kind} {name!r} is not known{did_you_mean(name, known)} Known: {', '.join(known) or 'none'}."


def dump_recipe(recipe: Recipe) -> str:
    """Dump the recipe as YAML with every default; loading it gives an equal recipe."""
    plain: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    return yaml.dump(plain, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=120)
