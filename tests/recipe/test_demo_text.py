"""The demo's training text drills no wording of a needle test, and no form that one of its own tests uses."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from unspool.data.facts import fact, pair_question, question
from unspool.data.tokenize.encoder import build_encoder
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.suites.needle_wordings import WORDINGS
from unspool.models.tokenizer import load_tokenizer
from unspool.recipe.load import LoadedRecipe, load_recipe
from unspool.studies.load import load_study

# An entry of a JSON object, complete or to be completed.
PAIR = re.compile(r'"[^"\n]*": "')
# Enough documents to meet every kind that a source generates.
GENERATED_TOKENS = 24 << 10


@pytest.fixture(autouse=True)
def few_sentences(monkeypatch):
    """Less prose around generated facts, to save time."""
    monkeypatch.setattr("unspool.data.sources.recall.PROSE_CHARS", 100_000)


def demo_and_study() -> list[LoadedRecipe]:
    """The demo, and one of each kind of run in the study that is built on it."""
    runs = {(str(run.loaded.recipe.sources), str(run.loaded.recipe.evals)): run for run in load_study("tiny").runs}
    return [load_recipe("tiny"), *(run.loaded for run in runs.values())]


def phrases() -> set[str]:
    """The longest fixed part of every statement, question and start of an answer."""
    parts = [
        [part.strip().lower() for part in re.split(r"\{\w+\}", template)]
        for wording in WORDINGS.values()
        for template in (wording.statement, wording.question, wording.prefix)
    ]
    return {max(part, key=len) for part in parts}


def drilled_phrases(text: str) -> set[str]:
    return {phrase for phrase in phrases() if phrase in text.lower()}


def tokenizer_of(loaded: LoadedRecipe):
    return load_tokenizer(str(loaded.path(loaded.recipe.model)))


def training_text(loaded: LoadedRecipe) -> str:
    """The text of all sources as a run reads it; of generated ones, the first part."""
    encoder, seed = build_encoder(tokenizer_of(loaded)), loaded.recipe.seed
    texts = []
    for configured in loaded.recipe.sources.values():
        source = configured.with_paths(loaded.path)
        if source.generated:
            source = source.model_copy(update={"tokens": GENERATED_TOKENS})
        for task in source.divide(source.units(Path()), seed):
            texts += [document.text for document in source.read(task, seed, encoder)]
    return "\n\n".join(texts)


def prompts(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    """One prompt of every test and length, with the name of the test."""
    tokenizer = tokenizer_of(loaded)
    plan = EvalPlan(loaded.recipe.evals, tokenizer, seed=loaded.recipe.seed, root=Path())
    for planned in plan.evals:
        for unit in {unit.length: unit for unit in planned.units}.values():
            made = planned.prepare(unit)
            ids = made if isinstance(made, np.ndarray) else [*made.context_ids, *made.questions[0].ids]
            yield planned.suite.name, tokenizer.decode(ids)


def drilled_forms(loaded: LoadedRecipe, text: str) -> set[str]:
    """The tests whose prompts use a form that the training text contains."""
    return {suite for suite, prompt in prompts(loaded) if PAIR.search(prompt) and PAIR.search(text)}


def test_phrases_and_forms_are_found_where_they_are():
    for wording in WORDINGS.values():
        asked, prefix = wording.ask("river", "word")
        for text in (wording.state("river", "garden", "word"), asked, prefix):
            assert drilled_phrases(f"It rained. {text}")
    assert drilled_phrases(fact("river", "garden", "word")) and drilled_phrases(question("river", "word"))
    assert PAIR.search(pair_question("river"))
    assert not PAIR.search('He said: "no". "Why?"')


def test_the_demo_drills_no_wording_and_no_form_of_its_tests():
    for loaded in demo_and_study():
        text = training_text(loaded)

        assert len(text) > 100_000
        assert not drilled_phrases(text)
        assert not drilled_forms(loaded, text)


@pytest.mark.parametrize("source", ["recall", "recall-short"])
def test_facts_in_prose_would_drill_the_needle_test(source):
    loaded = load_recipe("tiny", [f"sources.{source}.repeats=0"])
    assert drilled_phrases(training_text(loaded)) == {"the special magic", "what is the special magic"}


def test_a_test_of_json_objects_would_be_drilled():
    evals = "[{suite: key_value, lengths: [256], samples: 4, value: words}]"
    loaded = load_recipe("tiny", [f"evals={evals}"])
    assert drilled_forms(loaded, training_text(loaded)) == {"key_value"}
