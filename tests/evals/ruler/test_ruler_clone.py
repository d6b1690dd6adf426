"""`reference`: RULER from a user's clone, or from prompt files that its scripts wrote."""

import json
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unspool.core.errors import UnspoolError
from unspool.evals.backends.mock import Oracle
from unspool.evals.heldout import PlanInputs
from unspool.evals.run import Scoring, score
from unspool.evals.suite import Ask
from unspool.evals.suites.ruler import SUITE, published, ruler_clone
from unspool.evals.suites.ruler.haystacks import WordPairs

from .standin import write_clone

LENGTH = 2048


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_clone(tmp_path / "RULER", monkeypatch)


def entry(reference: Path, *tasks: str, **options: Any) -> Any:
    words = {"wonderwords": str(reference / "wonderwords")} if (reference / "wonderwords").is_dir() else {}
    settings = {"suite": "ruler", "lengths": [LENGTH], "tasks": tasks, "samples": 2, "reference": str(reference)}
    return SUITE.config.model_validate({**settings, "paths": words, **options})


def scored(config: Any, tmp_path: Path, tokenizer: Any) -> dict[str, Any]:
    scoring = Scoring(model="m", model_hash="m", evals=[config], seed=42, out_dir=tmp_path / "out", root=tmp_path)
    (found,) = score(scoring, Oracle(tokenizer))["suites"]
    return found


def write_prompts(clone: Path, folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, *tasks: str) -> list[str]:
    """Write prompts as RULER's scripts do, and return them; their words become the known ones."""
    reference = SUITE.chosen_reference(entry(clone, *tasks), Path())
    sources = SUITE.load(tokenizer, reference.paths, reference.wording)
    known, texts = {}, []
    for task in tasks:
        asks = [Ask(length=LENGTH, seed=42, index=at, mode="reference") for at in range(3)]
        built = [SUITE.tasks[task].build(sources, ask) for ask in asks]
        rows = [
            {"index": 0, "input": one.context + one.question, "outputs": one.references, "answer_prefix": one.prefix}
            for one in built
        ]
        (folder / str(LENGTH) / "data" / task).mkdir(parents=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / str(LENGTH) / "data" / task / "validation.jsonl").write_text(lines)
        monkeypatch.setitem(ruler_clone.KNOWN_PROMPTS, task, (10, 4, 4, ""))
        known[task] = (10, 4, 4, ruler_clone.prompt_marks(task, built[0]))
        texts += [row["input"] + row["answer_prefix"] for row in rows]
    monkeypatch.setattr(ruler_clone, "KNOWN_PROMPTS", known)
    return texts


def test_a_clone_gives_words_and_data_and_makes_scores_comparable(
    clone: Path, tmp_path: Path, shipped_tokenizer
) -> None:
    found = scored(entry(clone), tmp_path, shipped_tokenizer)

    assert found["comparable"] is True
    assert found["comparability"] == "comparable with published numbers: wording and data of NVIDIA/RULER c3f5e3b"
    assert found["benchmark"] == {"repo": "NVIDIA/RULER", "version": "c3f5e3b", "from": "clone", "differs": []}
    assert found["mode"] == "reference" and found["means"][0]["tasks"] == 13
    lines = (tmp_path / "out" / "samples.jsonl").read_text().split("\n")
    prompts = {sample["task"]: sample["prompt"] for line in lines if line and (sample := json.loads(line))}
    assert prompts["niah_single_1"]["start"].startswith("A number is in it.\nRain fell. It grew dark.\n")
    assert prompts["niah_multivalue"]["start"].startswith("Some numbers are in it.\nSentence 0 is here.")
    assert "Document 1:\n" in prompts["qa_2"]["start"] and "VAR " in prompts["vt"]["start"]


def test_without_a_reference_the_result_says_that_it_is_not_comparable(tmp_path: Path, shipped_tokenizer) -> None:
    own = SUITE.config.model_validate({"suite": "ruler", "lengths": [LENGTH], "tasks": ["vt"], "samples": 1})
    found = scored(own, tmp_path, shipped_tokenizer)

    assert found["comparable"] is False and found["benchmark"] is None
    assert found["comparability"].startswith("not comparable with published numbers: wording and data are not")


def test_changed_files_are_named_and_make_scores_incomparable(clone: Path, tmp_path: Path, shipped_tokenizer) -> None:
    script, squad = clone / ruler_clone.SYNTHETIC / "qa.py", clone / ruler_clone.SQUAD
    script.write_text(script.read_text() + "# another line\n")
    squad.write_text(squad.read_text() + " ")
    found = scored(entry(clone, "vt", "qa_1"), tmp_path, shipped_tokenizer)

    assert found["comparable"] is False
    assert found["comparability"] == (
        "not comparable with published numbers: scripts/data/synthetic/qa.py and "
        "scripts/data/synthetic/json/squad.json differ from NVIDIA/RULER c3f5e3b"
    )
    # Only files that the chosen tasks need count.
    assert SUITE.chosen_reference(entry(clone, "vt"), Path()).differs == ()


def test_essays_are_known_in_any_order_and_others_are_not(clone: Path) -> None:
    path = clone / ruler_clone.ESSAYS
    sentences = json.loads(path.read_text())["text"].split(". ")
    halves = sentences[1500:] + sentences[:1500]
    path.write_text(json.dumps({"text": ". ".join(halves)}))
    assert SUITE.chosen_reference(entry(clone, "niah_single_2"), Path()).differs == ()

    path.write_text(json.dumps({"text": ". ".join(halves[:1500])}))
    assert SUITE.chosen_reference(entry(clone, "niah_single_2"), Path()).differs == (ruler_clone.ESSAYS,)


def test_line_ends_of_a_checkout_do_not_matter(clone: Path) -> None:
    script = clone / ruler_clone.SYNTHETIC / "niah.py"
    script.write_bytes(script.read_bytes().replace(b"\n", b"\r\n"))

    assert SUITE.chosen_reference(entry(clone, "niah_multikey_3"), Path()).differs == ()


def test_prompt_files_are_used_unchanged(
    clone: Path, tmp_path: Path, shipped_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_prompts(clone, tmp_path / "prompts", shipped_tokenizer, monkeypatch, "vt", "niah_multiquery")
    reference = SUITE.chosen_reference(entry(tmp_path / "prompts", "vt", "niah_multiquery"), Path())

    read = [one.context + one.prefix for task in ("vt", "niah_multiquery") for one in reference.prompts[task, LENGTH]]
    assert read == written
    found = scored(entry(tmp_path / "prompts", "vt", "niah_multiquery", samples=100), tmp_path, shipped_tokenizer)
    assert found["comparability"] == (
        "comparable with published numbers: prompts that scripts of NVIDIA/RULER c3f5e3b wrote"
    )
    assert found["means"][0]["n"] == 6  # three of each: no more than the files have


def test_prompt_files_in_other_words_are_named(
    clone: Path, tmp_path: Path, shipped_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts(clone, tmp_path / "prompts", shipped_tokenizer, monkeypatch, "vt")
    path = tmp_path / "prompts" / str(LENGTH) / "data" / "vt" / "validation.jsonl"
    path.write_text(path.read_text().replace("Follow the", "[INST] Follow the"))

    assert SUITE.chosen_reference(entry(tmp_path / "prompts", "vt"), Path()).differs == (
        f"{LENGTH}/data/vt/validation.jsonl",
    )


@pytest.mark.parametrize(
    ("damage", "tasks", "message"),
    [
        (ruler_clone.SQUAD, ["qa_1"], r"squad.json is missing; run download_qa_dataset.sh there, .* or remove qa_1"),
        (
            ruler_clone.ESSAYS,
            ["niah_single_2", "vt"],
            r"PaulGrahamEssays.json is missing; .* remove niah_single_2\.",
        ),
        (f"{ruler_clone.SYNTHETIC}/niah.py", ["niah_single_1"], r"niah.py is missing; pass a complete clone"),
        (
            ruler_clone.CONSTANTS,
            ["vt"],
            r"neither a clone of NVIDIA/RULER .* nor a folder of its prompts: for vt at 2K",
        ),
    ],
)
def test_a_missing_file_is_one_sentence(clone: Path, damage: str, tasks: list[str], message: str) -> None:
    (clone / damage).unlink()

    with pytest.raises(UnspoolError, match=message) as error:
        SUITE.chosen_reference(entry(clone, *tasks), Path())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "tasks", "message"),
    [
        (ruler_clone.WORDS, "version https://git-lfs.github.com/spec/v1\n", ["cwe"], "is a Git LFS pointer"),
        (ruler_clone.CONSTANTS, "TASKS = {", ["vt"], "constants.py: cannot be read as Python"),
        (ruler_clone.CONSTANTS, "TASKS = {}", ["vt"], "constants.py has no texts of variable_tracking"),
        (f"{ruler_clone.SYNTHETIC}/niah.py", "", ["niah_single_1"], "niah.py assigns no text to needle"),
        (
            f"{ruler_clone.SYNTHETIC}/qa.py",
            "DOCUMENT_PROMPT = 'text'",
            ["qa_1"],
            r"qa_1, document: \{document\} is missing",
        ),
        (ruler_clone.ESSAYS, "[]", ["niah_single_2"], "is not RULER's file of essays"),
    ],
)
def test_a_damaged_file_is_refused(clone: Path, name: str, content: str, tasks: list[str], message: str) -> None:
    (clone / name).write_text(content)

    with pytest.raises(UnspoolError, match=message):
        SUITE.chosen_reference(entry(clone, *tasks), Path())


def test_missing_packages_are_named(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruler_clone, "find_spec", lambda name: None)
    with pytest.raises(UnspoolError, match="pip install wonderwords"):
        SUITE.chosen_reference(entry(clone, "cwe", paths={}), Path())

    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(UnspoolError, match="pip install nltk"):
        SUITE.chosen_reference(entry(clone, "niah_single_2"), Path())


def test_samples_are_the_same_in_any_order() -> None:
    def samples(indices: list[int]) -> dict[int, Any]:
        draws = published.Draws(42)
        run = published.Run(draws, lambda index: (draws.random.random() + draws.numpy.rand(), index))
        return {at: run.sample(at) for at in indices}

    assert samples([0, 1, 2, 3]) == samples([3, 1, 0, 2])


def test_word_pairs_are_sorted_and_different() -> None:
    firsts, seconds = ["far", "far-off", "a", "Zed", "far"], ["off-x", "x", "off", "y", "-"]
    pairs = WordPairs(firsts, seconds)

    assert list(pairs) == sorted({f"{first}-{second}" for first, second in product(firsts, seconds)})
    assert random.Random(3).sample(pairs, 5) == random.Random(3).sample(list(pairs), 5)


def test_a_bos_token_does_not_change_the_prompts_as_ruler_does_not_count_it(clone: Path, shipped_tokenizer) -> None:
    config = entry(clone, "niah_multikey_3", chat="off")
    inputs = PlanInputs(tokenizer=shipped_tokenizer, seed=42, root=Path(), heldout_tokens={}, context=None)
    plan = SUITE.plan(config, inputs)
    question = plan.question(plan.question_ids[0])
    # As if the tokenizer put three tokens before every text.
    plan.encoder.__dict__["opening"] = np.zeros(3, dtype=np.uint32)

    assert plan.question(plan.question_ids[0]) == question
    assert plan.prompt_line(plan.question_ids[0])["prompt_tokens"] == len(plan.encoder.ids(question, chat=False))


@pytest.mark.slow
@pytest.mark.skipif("UNSPOOL_RULER" not in os.environ, reason="UNSPOOL_RULER names no clone of NVIDIA/RULER")
def test_prompts_and_scores_are_those_of_rulers_own_scripts() -> None:
    script = Path(__file__).parents[3] / "tools" / "parity" / "ruler.py"
    options = ["--lengths", "4096", "--samples", "3", "--tasks", "niah_single_2,vt,cwe,fwe,qa_1,qa_2"]
    command = [sys.executable, str(script), os.environ["UNSPOOL_RULER"], *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert "unequal prompts or scores: 0" in done.stdout, done.stderr
