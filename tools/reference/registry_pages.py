"""The pages of registries: sources, strategies, RoPE methods, suites, optimizers, loss weights and backends."""

from collections.abc import Iterable, Mapping
from importlib import import_module

from reference.keys import keys_table
from reference.markdown import code, fence, page, summary, table
from reference.recipe_page import example, link
from unspool.core.config import Config
from unspool.data.packing.config import STRATEGIES
from unspool.data.sources.registry import SOURCES
from unspool.evals.backends.base import BACKENDS
from unspool.evals.suite import Suite
from unspool.evals.suites import SUITES
from unspool.rope.methods import ROPE_METHODS
from unspool.training.losses.config import LOSSES
from unspool.training.optim.config import OPTIMIZERS

MEASURES = {
    "accuracy": "share of right answers",
    "score": "mean score from 0 to 1",
    "loss": "loss in nats per token, by position",
}


def registry(classes: Mapping[str, type[Config]], tag: str | None) -> Iterable[str]:
    """A list of the names with their summaries, then a section for each."""
    yield table(("name", "summary"), ((f"[`{name}`](#{name})", summary(cls)) for name, cls in classes.items()))
    for name, cls in classes.items():
        yield section(name, name, summary(cls), cls, tag)


def section(name: str, title: str, text: str, cls: type[Config], tag: str | None) -> str:
    parts = [f"## {title} {{ #{name} }}\n\n{text}\n", fence(example(f"{tag or 'dataset'}: {name}"), "yaml")]
    return "\n".join([*parts, keys_table(cls, name, link, tag=None if tag == "name" else tag)])


def sources_page() -> str:
    intro = "An entry of a recipe's `sources` is a mapping with a `kind`. `unspool inspect FILE` shows its documents."
    return page("Sources", intro, registry(SOURCES, "kind"))


def strategies_page() -> str:
    intro = (
        "A packing strategy is a key of a dataset. A dataset takes at most one strategy that moves chunks: "
        f"{', '.join(code(name) for name, cls in STRATEGIES.items() if cls.moves_chunks)}."
    )
    return page("Packing strategies", intro, registry(STRATEGIES, None))


def rope_methods_page() -> str:
    intro = (
        "The key `rope` of a stage names a method. `unspool rope` advises on a method and its settings; "
        "`unspool rope --trial` ranks several on a text; `unspool eval --rope` measures one without training."
    )
    return page("RoPE methods", intro, registry(ROPE_METHODS, "method"))


def optimizers_page() -> str:
    return page("Optimizers", "The key `optimizer` of a stage holds these settings.", registry(OPTIMIZERS, "name"))


def losses_page() -> str:
    intro = (
        "The key `loss` of a stage weighs the labels of a step. Its loss is the sum of weight · loss over all labels, "
        "divided by the sum of their weights. Both sums are over all ranks and micro-batches."
    )
    return page("Loss weights", intro, registry(LOSSES, "weights"))


def suites_page() -> str:
    intro = "An entry of a recipe's `evals` names a suite; so does `unspool eval --suite`."
    rows = ((f"[`{name}`](#{name})", suite.title, summary(suite.config)) for name, suite in SUITES.items())
    parts = [table(("name", "title", "summary"), rows)]
    for name, suite in SUITES.items():
        parts.append(section(name, f"{suite.title} ({code(name)})", summary(suite.config), suite.config, "suite"))
        parts.append(_suite_facts(suite))
    return page("Evaluation suites", intro, parts)


def _suite_facts(suite: Suite) -> str:
    facts = [f"Result: {MEASURES[suite.measure]}."]
    if suite.config.presets:
        facts.append(f"Presets: {', '.join(map(code, suite.config.presets))}.")
    text = " ".join(facts) + "\n"
    if not suite.tasks:
        return text
    rows = ((code(task.name), task.metric, str(task.answer_tokens)) for task in suite.tasks.values())
    return f"{text}\n" + table(("task", "metric", "answer tokens"), rows)


def backends_page() -> str:
    intro = "`unspool eval --backend NAME` and `unspool generate --backend NAME` choose what answers the prompts."
    return page(
        "Backends", intro, [table(("name", "summary"), ((code(name), backend_summary(name)) for name in BACKENDS))]
    )


def backend_summary(name: str) -> str:
    """The first line about a backend: of its mock class, of its module, or of the function that was registered."""
    build = BACKENDS[name]
    if not isinstance(build, str):
        return summary(build)
    module = import_module(build.partition(":")[0])
    return summary(getattr(module, "MOCKS", {}).get(name, module))
