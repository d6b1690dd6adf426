"""The model card of an exported model, as Markdown: description, training, scores and loading code.

Every number comes from the run or from the check on export. Unknown facts are omitted or marked as unknown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from unspool.core.formatting import MISSING, join_words
from unspool.core.sizes import format_count, format_size
from unspool.core.table import markdown_lines
from unspool.data.packing.describe import packing_mode, strategy_titles
from unspool.reporting.measures import format_positions, format_with_interval
from unspool.reporting.run_results import BASE, Cell, ModelScores, RunResults, Stage
from unspool.reporting.suite_titles import suite_title
from unspool.rope.tables import describe_divided, is_divided


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison with plain `transformers`."""

    name: str
    tokens: int
    last_position: int
    dtype: str
    error: float
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    name: str
    config: dict[str, Any]  # config.json as written
    checks: Sequence[Check]
    versions: dict[str, str]
    licence: str | None = None  # from the base model's card
    base_id: str | None = None  # Hub id of the base model
    results: RunResults | None = None
    stage: str | None = None

    @property
    def own_code(self) -> bool:
        return "auto_map" in self.config

    @property
    def context(self) -> int:
        return int(self.config["max_position_embeddings"])


def render_card(facts: CardFacts) -> str:
    recipe = yaml.safe_load(facts.results.recipe_text or "") if facts.results else None
    recipe = recipe if isinstance(recipe, dict) else {}
    parts = [
        _front_matter(facts),
        _what(facts, recipe),
        _loading(facts),
        _stages(facts, recipe),
        _scores(facts),
        _checks(facts.checks),
        _recipe(facts),
        _versions(facts),
        _licence(facts),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _front_matter(facts: CardFacts) -> str:
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if facts.base_id:
        head["base_model"] = facts.base_id
    if facts.licence:
        head["license"] = facts.licence
    head["tags"] = ["long-context", "unspool", *(["custom_code"] if facts.own_code else [])]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---"


def _what(facts: CardFacts, recipe: dict[str, Any]) -> str:
    known = facts.results.original_context if facts.results else None
    grown = f", extended from {format_size(known)}" if known and known < facts.context else ""
    origin = _base_model(facts, recipe)
    lines = [
        f"# {facts.name}",
        "",
        f"A causal language model with a context length of {format_size(facts.context)} tokens{grown}. "
        "It was trained with Unspool.",
        "",
        f"- Base model: {origin or 'not recorded'}",
        f"- Architecture: {facts.config.get('plain_type', facts.config['model_type'])}",
        f"- Position encoding: {describe_positions(facts.config)}",
        f"- Weights: {facts.config['dtype']}",
    ]
    return "\n".join(lines)


def _base_model(facts: CardFacts, recipe: dict[str, Any]) -> str | None:
    if isinstance(recipe.get("model"), dict):
        return f"none; trained from random initialization (size {recipe['model'].get('size', MISSING)})"
    named = facts.base_id or (facts.results.base_model if facts.results else None)
    return f"`{named}`" if named else None


def describe_positions(config: dict[str, Any]) -> str:
    """Describe the RoPE settings of a config.json in one phrase."""
    bases = config.get("head_bases")
    if bases:
        by_layer = isinstance(bases[0], list)
        shown = ", ".join(f"{base:g}" for base in (bases[0] if by_layer else bases))
        return f"RoPE with a base per KV head (HARPE): {shown}" + ("; the order differs by layer" if by_layer else "")
    rope = config.get("rope_parameters") or {}
    kinds = {name: part for name, part in rope.items() if isinstance(part, dict)}
    if kinds:
        return "; ".join(f"{name.replace('_', ' ')}: {_describe_rope(part)}" for name, part in kinds.items())
    return _describe_rope(rope)


def _describe_rope(rope: dict[str, Any]) -> str:
    if rope.get("rope_type") == "longrope" and is_divided(rope):
        return f"RoPE, {describe_divided(rope)}"
    base, kind = rope.get("rope_theta"), rope.get("rope_type", "default")
    text = "RoPE" + (f", base {base:g}" if base else "") + (f", scaling {kind}" if kind != "default" else "")
    others = {name: value for name, value in rope.items() if name not in ("rope_type", "rope_theta")}
    shown = [f"{name} {value:g}" for name, value in others.items() if isinstance(value, (int, float))]
    return text + (f" ({', '.join(shown)})" if shown else "")


def _loading(facts: CardFacts) -> str:
    allow = ", trust_remote_code=True" if facts.own_code else ""
    code = f"""## How to use it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{facts.name}"  # folder of this model card
tokenizer = AutoTokenizer.from_pretrained(folder{allow})
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto"{allow})
```
"""
    if facts.own_code:
        return code + (
            "\nA `transformers` config cannot express one RoPE base per head. The code that computes it is next to the "
            "weights (`modeling_harpe.py`). It needs transformers 5.17 or later and `trust_remote_code=True`; loading "
            "fails without them. vLLM, SGLang and llama.cpp refuse this model, because they do not know its "
            "`model_type` and architecture. Do not rename these fields to force loading: the model would use wrong "
            "positions. Serve it with `transformers`."
        )
    return code + f"\nWith vLLM: `vllm serve {facts.name} --max-model-len {facts.context}`."


def lineage(stages: Sequence[Stage], last: str | None) -> list[Stage]:
    """Stages from the base model to `last`, in order."""
    by_name = {stage.name: stage for stage in stages}
    found: list[Stage] = []
    while last in by_name and by_name[last] not in found:
        found.insert(0, by_name[last])
        last = found[0].parent
    return found


def _stages(facts: CardFacts, recipe: dict[str, Any]) -> str:
    stages = lineage(facts.results.stages, facts.stage) if facts.results else []
    if not stages:
        return ""
    entries = {entry["name"]: entry for entry in recipe.get("stages") or [] if isinstance(entry, dict)}
    rows: list[list[str]] = []
    used: dict[str, None] = {}
    for stage in stages:
        entry = entries.get(stage.name, {})
        mix = entry.get("mix") or {}
        used |= dict.fromkeys(mix)
        context = format_size(stage.context_length) if stage.context_length else MISSING
        tokens = format_count(stage.tokens) if stage.steps else MISSING
        shares = ", ".join(f"{name} {share:g}" for name, share in mix.items()) or MISSING
        rows.append([stage.name, context, tokens, _describe_rope_entry(entry.get("rope")), shares])
    table = markdown_lines(["stage", "context", "tokens", "RoPE", "datasets (share of tokens)"], rows)
    datasets = recipe.get("datasets") or {}
    data = [f"- {name}: {_describe_dataset(datasets[name])}" for name in used if isinstance(datasets.get(name), dict)]
    return "\n".join(["## Training", "", *table, *(["", "Datasets:", "", *data] if data else [])])


def _describe_rope_entry(entry: Any) -> str:
    """Describe a stage's RoPE settings from the recipe."""
    if not isinstance(entry, dict):
        return "unchanged"
    given = ", ".join(f"{name} {value}" for name, value in entry.items() if name != "method" and value is not None)
    return str(entry.get("method", "unchanged")) + (f" ({given})" if given else "")


def _describe_dataset(entry: dict[str, Any]) -> str:
    source = entry.get("from")
    names = join_words(list(source)) if isinstance(source, dict) else str(source)
    length = format_size(entry["seq_len"]) if isinstance(entry.get("seq_len"), int) else entry.get("seq_len", MISSING)
    return ", ".join(
        [f"{names}, in rows of {length} (packed: {packing_mode(entry) or MISSING})", *strategy_titles(entry)]
    )


def _scores(facts: CardFacts) -> str:
    models = {model.name: model for model in facts.results.models} if facts.results else {}
    after = models.get(facts.stage or "")
    if after is None:
        return ""
    before = models.get(BASE)
    columns = ("", "at", *(("before",) if before else ()), "after", "n")
    note = "Recall in percent and loss in nats per token, with 95% intervals."
    return "\n".join(["## Scores", "", *markdown_lines(columns, list(_score_rows(before, after))), "", note])


def _score_rows(before: ModelScores | None, after: ModelScores) -> Iterator[list[str]]:
    earlier = {_place(cell): cell for cell in before.cells} if before else {}
    for cell in after.cells:
        if cell.depth is not None:
            continue
        place = format_positions(cell.start or 0, cell.stop) if cell.stop is not None else format_size(cell.length)
        shown = [format_with_interval(earlier.get(_place(cell)))] if before else []
        kind = "Loss by position" if cell.is_loss else suite_title(cell.suite)
        yield [kind, place, *shown, format_with_interval(cell), f"{cell.n:,}"]


def _place(cell: Cell) -> tuple[Any, ...]:
    return cell.suite, cell.metric, cell.length, cell.depth, cell.start, cell.stop


def _checks(checks: Sequence[Check]) -> str:
    rows = [
        [
            check.name,
            *(f"{check.tokens:,}", f"{check.last_position:,}", check.dtype),
            *(f"{check.error:.1e}", f"{check.tolerance:.0e}"),
        ]
        for check in checks
    ]
    lines = [
        "## Export check",
        "",
        "A fresh process with plain `transformers` computed the same logits as the trained model. The error is the "
        "largest absolute difference divided by the largest logit.",
        "",
        *markdown_lines(["check", "tokens", "last position", "computed in", "error", "tolerance"], rows),
    ]
    return "\n".join(lines)


def _recipe(facts: CardFacts) -> str:
    text = facts.results.recipe_text if facts.results else None
    return f"## Recipe\n\n````yaml\n{text.strip()}\n````" if text else ""


def _versions(facts: CardFacts) -> str:
    trained = facts.results.versions if facts.results else {}
    names = dict.fromkeys([*facts.versions, *trained])
    rows = [[name, facts.versions.get(name, MISSING), trained.get(name, MISSING)] for name in names]
    return "\n".join(["## Versions", "", *markdown_lines(["", "exported with", "trained with"], rows)])


def _licence(facts: CardFacts) -> str:
    named = f"`{facts.licence}`, like the base model." if facts.licence else "See the base model."
    return f"## Licence\n\n{named}"
