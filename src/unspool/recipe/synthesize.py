"""`unspool.synthesize`: long conversations about documents, written by a language model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError
from unspool.core.lock import lock_run
from unspool.core.result import Result
from unspool.core.sizes import format_count
from unspool.recipe.load import Overrides, load_recipe
from unspool.synthesis.config import REJECT_REASONS

if TYPE_CHECKING:
    from unspool.recipe.synthesis import Synthesis
    from unspool.synthesis.scheduler import Estimate

SHARE_TOLERANCE = 0.01  # a larger difference between requested and realized shares is printed


@dataclass(frozen=True, kw_only=True)
class SynthResult(Result):
    """The sets of conversations that `synthesize` wrote, or estimates of their requests, by name.

    Example:
        >>> import unspool
        >>> unspool.SynthResult().to_dict()
        {}
    """

    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # counts; `folder` is the set's folder
    estimates: "Mapping[str, Estimate]" = field(
        default_factory=dict
    )  # instead of sets, if only estimates were requested

    def to_dict(self) -> dict[str, Any]:
        return {name: found.plain() for name, found in self.estimates.items()} | dict(self.sets)

    def print(self, console: Console) -> None:
        for name, found in self.estimates.items():
            console.print(f"{name}: {found}", highlight=False, soft_wrap=True)
        for name, counts in self.sets.items():
            console.print(kinds_table(name, counts))
            if counts["rejected"] or counts["failed"]:
                console.print(reasons_table(counts))
            for line in notes(counts):
                console.print(line, highlight=False, soft_wrap=True)


def synthesize(
    recipe: str | Path, overrides: Overrides = None, *, only: Sequence[str] = (), estimate: bool = False
) -> SynthResult:
    """Generate long instruction data from the `synth` section of a recipe.

    A generator (a server, a local model or a mock) reads parts of long documents and writes questions with answers,
    RAG conversations and summaries. Each is checked, and those that pass become conversations for a source of kind
    chat. A killed call resumes: replies are cached, so no request is sent twice.

    Args:
        recipe: A recipe file, or the name of a bundled recipe.
        overrides: Changes to the recipe, such as `{"synth.long.tokens": "2M"}`.
        only: Names of the sets to generate; all by default.
        estimate: Only estimate the requests, their cost and time; the sources are tokenized for it.

    Returns:
        Counts of every set with its folder, or the estimates.

    Raises:
        ConfigError: The recipe is wrong or has no `synth` section, or an input is missing.

    Example:
        >>> import unspool
        >>> try:
        ...     unspool.synthesize("tiny")
        ... except unspool.ConfigError as error:
        ...     print(str(error).split(",")[0])
        tiny has no `synth` section
    """
    loaded = load_recipe(recipe, overrides)
    if not loaded.recipe.synth:
        raise ConfigError(
            f"{recipe} has no `synth` section, so there is nothing to generate; see docs/how-to/synthetic-data.md."
        )
    from unspool.recipe.prepare import check_generators
    from unspool.recipe.synthesis import Synthesis  # import late, since it loads torch: recipe errors appear at once

    with lock_run(loaded.recipe.out):
        synthesis = Synthesis(loaded, only)
        if not estimate:
            check_generators(loaded, synthesis.sets)
            _check_evals(synthesis)
        synthesis.corpora()
        if estimate:
            return SynthResult(estimates=synthesis.estimates())
        return SynthResult(sets=synthesis.make())


def _check_evals(synthesis: "Synthesis") -> None:
    """Reject evaluations whose texts cannot be built, if a set is decontaminated against them."""
    from unspool.evals.eval_plan import EvalPlan

    waiting = [config for name, config in synthesis.sets.items() if read_manifest(synthesis.folder(name)) is None]
    if any(config.decontaminate.evals for config in waiting):
        seed = synthesis.recipe.seed
        EvalPlan(synthesis.loaded.evals(), synthesis.tokenizer, seed=seed, root=Path()).check()


def kinds_table(name: str, result: Mapping[str, Any]) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("kind")
    for column in ("requested", "kept", "rejected", "failed", "tokens", "share", "requested share"):
        table.add_column(column, justify="right")
    for kind, entry in result["kinds"].items():
        table.add_row(
            kind,
            str(entry["asked"]),
            str(entry["kept"]),
            str(sum(entry["rejected"].values())),
            str(sum(entry["failed"].values())),
            format_count(entry["tokens"]),
            "–" if entry["share"] is None else f"{entry['share']:.1%}",
            f"{entry['wanted_share']:.1%}",
        )
    totals = [str(result[column]) for column in ("asked", "kept", "rejected", "failed")]
    table.add_row("total", *totals, format_count(result["tokens"]), "", "", style="bold")
    return table


def reasons_table(result: Mapping[str, Any]) -> Table:
    table = Table(title="not kept", title_justify="left")
    table.add_column("reason")
    table.add_column("count", justify="right")
    table.add_column("meaning")
    counts: Counter[str] = Counter()
    for entry in result["kinds"].values():
        counts.update(entry["rejected"])
        counts.update({f"failed: {kind}": count for kind, count in entry["failed"].items()})
    for reason, count in counts.most_common():
        table.add_row(reason, str(count), REJECT_REASONS.get(reason, "no reply after all attempts"))
    return table


def notes(result: Mapping[str, Any]) -> list[str]:
    """Lines below the tables: requests, missed targets, and how to read the result."""
    lines = []
    requests = result.get("requests")
    if requests:
        errors = ", ".join(f"{count} {kind}" for kind, count in sorted(requests["errors"].items())) or "none"
        lines.append(
            f"{requests['sent']} requests sent, {requests['cached']} replies from the cache, "
            f"{format_count(requests['prompt_tokens'])} prompt and {format_count(requests['reply_tokens'])} reply "
            f"tokens; failed attempts: {errors}"
        )
    wanted = result["wanted_tokens"]
    if wanted and result["tokens"] < wanted * (1 - SHARE_TOLERANCE):
        lines.append(
            f"the documents were used up at {format_count(result['tokens'])} of {format_count(wanted)} tokens; "
            "raise per_document, lower min_tokens, or add sources"
        )
    for kind, entry in result["kinds"].items():
        if entry["share"] is not None and abs(entry["share"] - entry["wanted_share"]) > SHARE_TOLERANCE:
            lines.append(f"{kind} has {entry['share']:.1%} of the tokens instead of {entry['wanted_share']:.1%}")
    lines.append(f"{result['folder']}: read it as {{kind: chat, path: {result['folder']}}}")
    return lines
