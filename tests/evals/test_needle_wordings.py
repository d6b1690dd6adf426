"""Needles in several wordings, with distractors, in strata of depth."""

import re
from collections import Counter
from importlib.resources import files

import numpy as np
import pytest

from unspool.evals.prompts import encode, prompt_hash
from unspool.evals.suites.needle_wordings import WORDING_SETS, WORDINGS
from unspool.evals.suites.niah import SUITE, Design, NiahEval, depth_grid, prompt

# Computed before wordings, distractors and placement existed.
GOLDEN = "a07b980677c1a1f69bcea067feaa14cfaa686edd93d5f6e9f85c1168bb0dedf7"
GRID = {"wordings": ["all"], "distractors": [0, 3, 10], "placement": "strata", "samples": 90}


def niah(**options) -> NiahEval:
    return NiahEval.model_validate({"suite": "niah", "lengths": [2048], **options})


def statements(text: str, wording: str) -> list[tuple[str, str]]:
    """All keys and values that are stated in a wording."""
    names = {"kind": "(?:number|word)", "key": r"(?P<key>\S+)", "value": r"(?P<value>[^\s,.]+)"}
    pattern = re.sub(r"\\{(\w+)\\}", lambda match: names[match[1]], re.escape(WORDINGS[wording].statement))
    return [(found["key"], found["value"]) for found in re.finditer(pattern, text)]


def test_the_default_prompts_are_those_of_the_published_numbers(materials):
    made = prompt(niah(), materials, length=512, seed=0, index=3)

    assert prompt_hash(made.context_ids, made.questions[0].ids) == GOLDEN


def test_each_wording_is_in_one_set():
    sets = [WORDING_SETS[name] for name in ("development", "heldout", "heldout-2")]
    assert [len(one) for one in sets] == [3, 3, 3]
    assert [name for one in sets for name in one] == list(WORDINGS)
    assert WORDING_SETS["all"] == sets[0] + sets[1], "as in the published numbers"
    assert niah(wordings=["heldout", "magic"]).wordings == [*WORDING_SETS["heldout"], "magic"]
    with pytest.raises(
        ValueError, match="wording 'heldot' is not known; known: development, heldout, all, heldout-2, magic"
    ):
        niah(wordings=["heldot"])


def test_no_training_text_and_no_recipe_uses_a_held_out_wording():
    """Phrases of at least three words of a held-out statement or question occur nowhere else in the package."""
    package = files("unspool")
    others = [path for path in package.rglob("*") if path.suffix in (".py", ".yaml", ".txt", ".j2")]
    texts = {path.name: path.read_text() for path in others if path.name != "needle_wordings.py"}
    assert len(texts) > 200
    for name in WORDING_SETS["heldout"] + WORDING_SETS["heldout-2"]:
        for template in (WORDINGS[name].statement, WORDINGS[name].question, WORDINGS[name].prefix):
            phrases = [part.strip(" ?.,") for part in re.split(r"\{\w+\}", template)]
            long = [part for part in phrases if len(part.split()) >= 3]
            assert long, "a phrase to search for"
            assert [file for file, text in texts.items() for part in long if part in text] == []
    # Only the planned studies (docs/results/plan.md) score held-out wordings, once and at the end.
    users = {path for path in package.rglob("*.yaml") if re.search(r"wordings:.*\b(heldout|all)\b", path.read_text())}
    planned = {"utk-small.yaml", "harpe-small.yaml", "prolong-small.yaml", "newer-small.yaml"}
    assert {(path.parent.parent.name, path.name) for path in users} <= {("studies", name) for name in planned}


@pytest.mark.parametrize("value", ["numbers", "words"])
@pytest.mark.parametrize("wording", WORDINGS)
def test_the_question_asks_for_one_needle_and_every_distractor_has_another_key_and_value(materials, wording, value):
    config = niah(wordings=[wording], distractors=[10], placement="strata", value=value)
    made = prompt(config, materials, length=2048, seed=5, index=7)
    text = materials.tokenizer.decode(made.context_ids, skip_special_tokens=True)
    [asked] = made.questions

    found = statements(text, wording)
    assert len(found) == 11
    assert len({part for pair in found for part in pair}) == 22
    question = materials.tokenizer.decode(asked.ids)
    kind = "number" if value == "numbers" else "word"
    stated = [pair for pair in found if "".join(WORDINGS[wording].ask(pair[0], kind)) == question]
    assert [answer for _, answer in stated] == [asked.reference]
    if value == "numbers":
        assert text.count(asked.reference) == 1, "the value occurs nowhere else"
    assert made.tokens <= 2048


def test_a_base_model_that_continues_the_answer_writes_the_statement_again():
    """Prefix and value together state the fact, so that a correct continuation begins with the value."""
    for wording in WORDINGS.values():
        question, prefix = wording.ask("KEY", "number")
        assert question.endswith("?") and "KEY" in question and "KEY" in prefix
        assert prefix.startswith(" ") and not prefix.endswith(" ")
        assert "VALUE" not in question + prefix


@pytest.mark.parametrize("length", [512, 4096])
def test_in_strata_no_needle_lies_at_the_start_or_next_to_the_question(materials, length):
    config = niah(placement="strata", samples=40, depths=5)
    depths = Counter()
    for index in range(40):
        made = prompt(config, materials, length=length, seed=1, index=index)
        text = materials.tokenizer.decode(made.context_ids, skip_special_tokens=True)
        statement = re.search(r"The special magic number for \S+ is \d+\.", text)
        before, after = (len(encode(materials.tokenizer, part)) for part in re.split(re.escape(statement[0]), text))
        assert before > 0.02 * length and after > 0.02 * length
        depth = before / (before + after)
        assert abs(depth - made.questions[0].depth) <= 0.1 + 0.02, "the stratum that is reported holds it"
        depths[made.questions[0].depth] += 1
    assert depth_grid(config) == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert set(depths) == set(depth_grid(config)) and min(depths.values()) >= 7


def test_every_combination_of_depth_wording_and_distractors_is_asked_equally_often():
    config = niah(**GRID)
    designs = Counter(Design.of(config, index) for index in range(90))

    assert len(designs) == 5 * 6 * 3 and set(designs.values()) == {1}
    several = niah(**GRID | {"needles": 3, "samples": 54})
    assert Counter((one.wording, one.distractors) for one in (Design.of(several, at) for at in range(18))) == Counter(
        {(wording, count): 1 for wording in WORDING_SETS["all"] for count in (0, 3, 10)}
    )


def _scored(config: NiahEval, score) -> list[dict]:
    samples = []
    for index in range(config.samples):
        design = Design.of(config, index)
        labels = {"needle_wording": design.wording, "distractors": design.distractors}
        found = {"suite": "niah", "length": 2048, "depth": design.depth, "index": index, **labels}
        samples.append({**found, "score": float(score(design))})
    return samples


def test_scores_are_reported_by_wording_and_number_of_distractors():
    config = niah(**GRID | {"samples": 180})
    cells = SUITE.cells(config, _scored(config, lambda design: design.wording != "ship" and design.distractors < 10))
    by_task = {cell["task"]: cell for cell in cells if "task" in cell}

    assert cells[0]["n"] == 180 and cells[0]["value"] == pytest.approx(5 / 6 * 2 / 3)
    assert {name: cell["n"] for name, cell in by_task.items()} == {
        **{f"wording {name}": 30 for name in WORDING_SETS["all"]},
        **{f"{count} distractors": 60 for count in (0, 3, 10)},
    }
    assert by_task["wording ship"]["value"] == 0 and by_task["10 distractors"]["value"] == 0
    assert by_task["3 distractors"]["value"] == pytest.approx(5 / 6)
    assert all(cell["low"] <= cell["value"] <= cell["high"] for cell in cells if cell["n"])


def test_intervals_leave_out_the_differences_between_strata():
    config = niah(**GRID | {"samples": 900})
    depends = SUITE.cells(config, _scored(config, lambda design: design.distractors < 3))[0]
    rng = np.random.default_rng(0)
    chance = SUITE.cells(config, _scored(config, lambda design: rng.random() < 1 / 3))[0]

    assert depends["value"] == pytest.approx(1 / 3)
    assert depends["high"] - depends["low"] < 0.75 * (chance["high"] - chance["low"])


def test_an_entry_with_the_one_wording_of_before_records_nothing_new():
    assert SUITE.labels_of(niah(), 3) == {}
    assert SUITE.labels_of(niah(**GRID), 5) == {"needle_wording": "record", "distractors": 0}
