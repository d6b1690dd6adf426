"""Our scores of answers with citations beside the public scripts: HELMET's `eval_alce.py` and ALCE's `eval.py`.

Runs if UNSPOOL_HELMET and UNSPOOL_ALCE name checkouts of princeton-nlp/HELMET and princeton-nlp/ALCE. Entailment is a
random function of the texts, and sentences are split by ours: neither the model nor NLTK's data is needed.
"""

import hashlib
import importlib.util
import json
import logging
import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from unspool.evals.scoring.citations import Script, citations, claims_of, qampari, sentences, str_em

CHECKOUTS: dict[Script, tuple[str, str]] = {
    "helmet": ("UNSPOOL_HELMET", "eval_alce.py"),
    "alce": ("UNSPOOL_ALCE", "eval.py"),
}
ITEMS = 1000
QUESTION = "Who was there?"
DOCUMENTS = [{"title": f"title {at}", "text": f"text {at}"} for at in range(4)]
# "a" and "The" normalize to nothing.
NAMES = ("Ada", "The Eve", "Bob Ray", "Zoe", "Cy", "U.S.", "a", "Dr. No", "New York", "The", "Ödön", "7.5")
Public = Callable[[str, list[list[str]], bool], dict[str, float]]


def entails(premise: str, claim: str) -> bool:
    return hashlib.sha256(f"{premise}|{claim}".encode()).digest()[0] < 110


def random_item(rng: random.Random) -> tuple[str, list[list[str]]]:
    """Return an output over several lines, and entities with aliases."""
    answers = [[rng.choice(NAMES) + rng.choice(("", "!", " II")) for _ in range(rng.randint(1, 3))] for _ in range(8)]
    answers = answers[: rng.randint(1, 8)]
    marks, ends = ("", " [1]", "[2][3]", " [9]", " [0]", " |", " [1][2][3][4]"), (", ", ", ", ",", "\n", "\n\n", ". ")
    words = [rng.choice((rng.choice(rng.choice(answers)), rng.choice(NAMES))) for _ in range(rng.randint(0, 14))]
    listed = "".join(word + rng.choice(marks) + rng.choice(ends) for word in words)
    return rng.choice(("", "\n", " ")) + listed + rng.choice(
        ("", ".", ",", "\n\nQuestion: who?\n", "<|im_end|>")
    ), answers


@pytest.fixture(params=list(CHECKOUTS))
def script(request: pytest.FixtureRequest) -> Script:
    chosen: Script = request.param
    if not os.environ.get(CHECKOUTS[chosen][0]):
        pytest.skip(f"{CHECKOUTS[chosen][0]} names no checkout")
    return chosen


@pytest.fixture
def public(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Public:
    """Load a public script; returns what its `main` writes for one output, from 0 to 1."""
    variable, name = CHECKOUTS[script]
    folder = os.environ[variable]
    for module in ("nltk", "rouge_score", "rouge", "pytrec_eval", "tqdm", "transformers"):
        monkeypatch.setitem(sys.modules, module, MagicMock())
    monkeypatch.delitem(sys.modules, "utils", raising=False)
    monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location("public_script", Path(folder) / name)
    assert spec is not None
    assert spec.loader is not None
    loaded: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    del sys.modules["utils"]
    loaded.logger.setLevel(logging.ERROR)
    loaded.tqdm, loaded.sent_tokenize = list, sentences
    loaded.autoais_model = "replaced by the function below"
    loaded._run_nli_autoais = lambda premise, claim: int(entails(premise, claim))

    def score(output: str, answers: list[list[str]], is_list: bool) -> dict[str, float]:
        path = tmp_path / ("qampari.json" if is_list else "asqa.json")
        pairs = None if is_list else [{"short_answers": aliases} for aliases in answers]
        item = {"output": output, "question": QUESTION, "docs": DOCUMENTS, "answers": answers, "qa_pairs": pairs}
        path.write_text(json.dumps({"data": [item]}))
        monkeypatch.setattr(sys, "argv", [name, "--f", str(path), "--citations", "--no_rouge"])
        loaded.main()
        found = json.loads(path.with_name(f"{path.name}.score").read_text())
        return {metric: value / 100 for metric, value in found.items() if isinstance(value, int | float)}

    return score


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # means of nothing
def test_scores_are_those_of_the_public_script(script: Script, public: Public) -> None:
    rng = random.Random(22)
    premises = [f"Title: {one['title']}\n{one['text']}" for one in DOCUMENTS]
    lines_matter = 0
    for _ in range(ITEMS):
        output, answers = random_item(rng)
        theirs, found = public(output, answers, True), qampari(output, answers, script)
        for ours, metric in {"precision": "prec", "recall": "rec", "recall_top5": "rec_top5"}.items():
            assert found[ours] == pytest.approx(theirs[f"qampari_{metric}"], abs=1e-9), (output, answers)
        lines_matter += found != qampari(output, answers, "alce" if script == "helmet" else "helmet")
        texts = public(output, answers, False)
        assert str_em(output, answers, "reference", script) == pytest.approx(texts["str_em"]), (output, answers)
        for is_list, expected in ((True, theirs), (False, texts)):
            claims = claims_of(output, question=QUESTION if is_list else None, script=script)
            scored = citations(claims, premises, entails, "reference")
            if scored is None:  # left out of the mean, here of nothing
                assert expected["citation_rec"] == 0 or math.isnan(expected["citation_rec"])
            else:
                assert scored.recall == pytest.approx(expected["citation_rec"]), output
                assert scored.precision == pytest.approx(expected["citation_prec"]), output
    assert lines_matter > ITEMS / 4
