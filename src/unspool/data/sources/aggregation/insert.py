"""Insert tasks into a document.

What is inserted depends on the seed, the document's id and its text alone, so workers and shards do not matter. Without
the inserted blocks, the text is the original one, byte for byte.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from unspool.core.formatting import join_words
from unspool.core.rng import rng_for
from unspool.data.sources.aggregation.config import Aggregation
from unspool.data.sources.aggregation.passages import write_passages
from unspool.data.sources.aggregation.sections import FEWEST_PARAGRAPHS, group_sections, split_paragraphs
from unspool.data.sources.aggregation.word_counts import write_word_counts

# Keys of the counts, besides the names of the tasks.
DOCUMENTS, UNSUITABLE = "documents", "documents_unsuitable"


def insert_tasks(config: Aggregation, doc_id: str, text: str, seed: int) -> tuple[str, Counter[str]]:
    """Return the document with its tasks, and how many of each kind; most documents are unchanged if `share` is small.

    A document without four paragraphs, lines or sentences, or without repeated words or phrases, is unsuitable.
    """
    rng = rng_for(seed, "aggregation", doc_id)
    if rng.random() >= config.share:
        return text, Counter()
    parts = sections_with_tasks(config, text, rng)
    counts = Counter(name for _, name, block in parts if block)
    if not counts:
        return text, Counter({UNSUITABLE: 1})
    return "".join(section + block for section, _, block in parts), counts + Counter({DOCUMENTS: 1})


def describe_tasks(counts: Mapping[str, int]) -> str:
    """Describe the summed counts of many documents."""
    names = [name for name in sorted(counts) if name not in (DOCUMENTS, UNSUITABLE)]
    inserted = join_words([f"{counts[name]:,} {name}" for name in names]) or "none"
    changed, unsuitable = counts.get(DOCUMENTS, 0), counts.get(UNSUITABLE, 0)
    skipped = f"; {unsuitable:,} too short or without repeated words" if unsuitable else ""
    return f"inserted tasks into {changed:,} document{'s' * (changed != 1)}: {inserted}{skipped}"


def sections_with_tasks(config: Aggregation, text: str, rng: np.random.Generator) -> list[tuple[str, str, str]]:
    """Return each section of a text, the name of the document's task, and the block to insert; "" inserts none."""
    names = sorted(config.tasks)
    shares = np.array([config.tasks[name] for name in names])
    name = names[int(rng.choice(len(names), p=shares / shares.sum()))]
    paragraphs = split_paragraphs(text)
    if len(paragraphs) < FEWEST_PARAGRAPHS:
        return [(text, name, "")]
    parts: list[tuple[str, str, str]] = []
    held: list[str] = []
    for paragraphs_of_section in group_sections(paragraphs, config.section, rng):
        # "This part" in a task is the text since the task before it. So a section without a task joins the next one.
        held += paragraphs_of_section
        section = "".join(held)
        if name == "word_counts":
            task = write_word_counts(section, config.questions, rng)
        else:
            task = write_passages(section, held, rng)
        if task is not None:
            parts.append((section, name, _block(section, task)))
            held = []
    return [*parts, ("".join(held), name, "")] if held else parts


def _block(section: str, task: str) -> str:
    """Put empty lines around a task."""
    gap = "" if section.endswith("\n\n") else "\n" if section.endswith("\n") else "\n\n"
    return f"{gap}{task}\n\n"
