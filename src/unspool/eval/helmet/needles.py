"""HELMET's three needle tasks: RULER's, with less room for the answer and never through the chat template.

In: sources, an `Ask`. Out: `Asked`. Modes and texts are RULER's (docs/ruler.md); `haystack` is its path of that name.
"""

from dataclasses import replace

from unspool.eval import ruler
from unspool.eval.helmet.sources import Sources
from unspool.eval.task import Ask, Asked

ANSWER_TOKENS = {"niah_multikey_2": 50, "niah_multikey_3": 100, "niah_multivalue": 50}


def build(name: str, sources: Sources, ask: Ask) -> Asked:
    task = ruler.SUITE.tasks[name]
    paths = {key: path for key, path in sources.paths.items() if key == "haystack"}
    wording = sources.wording.of(ruler.SUITE.wording)
    theirs = sources.once("ruler", lambda: ruler.SUITE.load(sources.tokenizer, paths, wording))
    # RULER keeps more room for an answer than HELMET lets it have.
    asked = task.build(theirs, replace(ask, overhead=ask.overhead + ANSWER_TOKENS[name] - task.answer_tokens))
    return replace(asked, meta={**asked.meta, "mode": ask.mode, "generated": "haystack" not in paths})
