import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError, DataError
from unspool.evals import run
from unspool.evals.run import Scoring, score
from unspool.evals.suites.key_value import KeyValueEval
from unspool.evals.suites.niah import NiahEval
from unspool.evals.suites.perplexity import PerplexityEval

from .oracles import Killed, Oracle, Rambler, Silent


@pytest.fixture
def scoring(tmp_path: Path, documents: list[str]) -> Scoring:
    (tmp_path / "held").mkdir()
    for at, text in enumerate(documents):
        (tmp_path / "held" / f"{at}.txt").write_text(text)
    evals = [
        NiahEval.model_validate(
            {"suite": "niah", "lengths": [256, 512], "samples": 6, "depths": 3, "value": "words", "text": "held/*.txt"}
        ),
        KeyValueEval.model_validate({"suite": "key_value", "lengths": [256], "samples": 6, "value": "words"}),
        PerplexityEval.model_validate({"suite": "perplexity", "length": 256, "samples": 3, "text": "held/*.txt"}),
    ]
    return Scoring(model="base", model_hash="m", evals=evals, seed=0, out_dir=tmp_path / "scores/base", root=tmp_path)


def samples_of(scoring: Scoring) -> list[dict]:
    return [json.loads(line) for line in (scoring.out_dir / "samples.jsonl").read_text().splitlines()]


def test_an_oracle_scores_100_with_every_cell_filled(scoring, tokenizer):
    summary = score(scoring, Oracle(tokenizer))

    assert summary == json.loads((scoring.out_dir / "summary.json").read_text())
    assert summary["model"] == "base"
    recall = [cell for cell in summary["cells"] if cell["metric"] == "accuracy"]
    assert [(cell["suite"], cell["length"], cell["depth"], cell["value"], cell["n"]) for cell in recall] == [
        ("niah", 256, None, 1.0, 6),
        ("niah", 256, 0.0, 1.0, 2),
        ("niah", 256, 0.5, 1.0, 2),
        ("niah", 256, 1.0, 1.0, 2),
        ("niah", 512, None, 1.0, 6),
        ("niah", 512, 0.0, 1.0, 2),
        ("niah", 512, 0.5, 1.0, 2),
        ("niah", 512, 1.0, 1.0, 2),
        ("key_value", 256, None, 1.0, 6),
    ]
    losses = [cell for cell in summary["cells"] if cell["metric"] == "loss"]
    assert [(cell["from"], cell["to"], cell["value"], cell["n"]) for cell in losses] == [
        (0, 64, 32.0, 3 * 63),
        (64, 128, 95.5, 3 * 64),
        (128, 256, 191.5, 3 * 128),
    ]


@pytest.mark.parametrize("backend", [Silent, Rambler])
def test_models_that_say_nothing_or_everything_score_0(scoring, tokenizer, backend):
    cells = score(scoring, backend(tokenizer))["cells"]

    assert {cell["value"] for cell in cells if cell["metric"] == "accuracy"} == {0.0}


def test_samples_record_questions_and_answers(scoring, tokenizer):
    score(scoring, Oracle(tokenizer))

    samples = samples_of(scoring)
    assert len({(sample["suite"], sample["length"], sample["index"]) for sample in samples}) == len(samples) == 21
    assert len({sample["hash"] for sample in samples}) == len(samples)
    asked = [sample for sample in samples if sample["suite"] != "perplexity"]
    names = ["suite", "length", "depth", "index", "hash", "prompt_tokens", "reference", "output", "score"]
    longest = {name: max(s["length"] for s in asked if s["suite"] == name) for name in {s["suite"] for s in asked}}
    prompts = {True: ["prompt"], False: []}
    assert all(list(s) == names + prompts[s["length"] == longest[s["suite"]]] for s in asked)
    assert all(sample["prompt_tokens"] < sample["length"] for sample in asked)
    assert all(sample["depth"] is None for sample in samples if sample["suite"] == "key_value")
    assert [sample["index"] for sample in asked if sample["length"] == 512] == list(range(6))


def test_another_tokenizer_gives_other_prompts(scoring, tokenizer, coarse_tokenizer):
    score(scoring, Oracle(tokenizer))
    hashes = {sample["hash"] for sample in samples_of(scoring)}
    other = replace(scoring, out_dir=scoring.root / "other")
    short = [replace_lengths(config) for config in scoring.evals]

    score(replace(other, evals=short), Oracle(coarse_tokenizer))

    assert hashes.isdisjoint(sample["hash"] for sample in samples_of(other))


def replace_lengths(config):
    if isinstance(config, PerplexityEval):
        return config
    return config.model_copy(update={"lengths": [512]})


@pytest.mark.parametrize("after", [0, 7, 13, 16])
def test_a_killed_run_resumes_to_the_same_bytes(scoring, tokenizer, after):
    whole = replace(scoring, out_dir=scoring.root / "whole")
    score(whole, Oracle(tokenizer))
    with pytest.raises(KeyboardInterrupt):
        score(scoring, Killed(tokenizer, after))
    assert not scoring.out_dir.exists(), "half a folder must not look published"

    second = Oracle(tokenizer)
    score(scoring, second)

    assert second.contexts == 17 - after, "whole contexts should not be scored again"
    for name in ("samples.jsonl", "summary.json"):
        assert (scoring.out_dir / name).read_bytes() == (whole.out_dir / name).read_bytes()
    assert not scoring.out_dir.with_name("base.work").exists()


@pytest.mark.parametrize("cut", [1, 300])
def test_a_torn_last_line_is_dropped_and_redone(scoring, tokenizer, cut):
    whole = replace(scoring, out_dir=scoring.root / "whole")
    score(whole, Oracle(tokenizer))
    with pytest.raises(KeyboardInterrupt):
        score(scoring, Killed(tokenizer, 14))  # within kv, whose contexts give several lines
    torn = scoring.out_dir.with_name("base.work") / "samples.jsonl"
    torn.write_bytes(torn.read_bytes()[:-cut])

    score(scoring, Oracle(tokenizer))

    assert (scoring.out_dir / "samples.jsonl").read_bytes() == (whole.out_dir / "samples.jsonl").read_bytes()


def test_work_that_was_begun_with_other_settings_is_not_continued(scoring, tokenizer):
    with pytest.raises(KeyboardInterrupt):
        score(scoring, Killed(tokenizer, 5))

    backend = Oracle(tokenizer)
    score(replace(scoring, seed=1), backend)

    assert backend.contexts == 17


def test_scores_are_recomputed_only_if_something_changed(scoring, tokenizer):
    score(scoring, Oracle(tokenizer))

    again = Oracle(tokenizer)
    assert score(scoring, again) == json.loads((scoring.out_dir / "summary.json").read_text())
    assert again.contexts == 0

    for changed in (
        replace(scoring, model_hash="other"),
        replace(scoring, seed=1),
        replace(scoring, evals=scoring.evals[:2]),
    ):
        backend = Oracle(tokenizer)
        score(changed, backend)
        assert backend.contexts > 0
    (scoring.root / "held" / "0.txt").write_text("Other text, and enough of it to hide something in. " * 50)
    backend = Oracle(tokenizer)
    score(replace(scoring, evals=scoring.evals[:2]), backend)
    assert backend.contexts > 0


def test_the_manifest_names_what_the_scores_depend_on(scoring, tokenizer):
    score(scoring, Oracle(tokenizer))

    manifest = read_manifest(scoring.out_dir)
    assert manifest["kind"] == "scores"
    assert manifest["inputs"]["model"] == "m"
    assert set(manifest["inputs"]["text"]["held/*.txt"]) == {"0.txt", "1.txt"}
    assert manifest["settings"]["seed"] == 0
    assert manifest["counts"] == {"contexts": 17, "samples": 21}
    assert set(manifest["files"]) == {"samples.jsonl", "summary.json"}


def test_the_plan_is_printed_before_work_starts(scoring, tokenizer, monkeypatch):
    said = []
    monkeypatch.setattr(run.logger, "info", said.append)

    with pytest.raises(KeyboardInterrupt):
        score(scoring, Killed(tokenizer, 0))

    assert said == ["scores of base (not built yet): 17 contexts, 21 samples, 5.89K prompt tokens"]


def test_a_length_that_cannot_work_is_found_before_the_model_is_used(scoring, tokenizer):
    config = KeyValueEval.model_validate({"suite": "key_value", "lengths": [256, 16], "samples": 4, "value": "words"})
    backend = Oracle(tokenizer)

    with pytest.raises(ConfigError, match="length 16 is too short"):
        score(replace(scoring, evals=[config]), backend)
    assert backend.contexts == 0


def test_the_same_suite_and_length_twice_is_refused(scoring, tokenizer):
    with pytest.raises(ConfigError, match="suite niah at length 256 appears twice"):
        score(replace(scoring, evals=[*scoring.evals, scoring.evals[0]]), Oracle(tokenizer))


def test_text_that_is_missing_is_named(scoring, tokenizer):
    config = scoring.evals[0].model_copy(update={"text": "nowhere/*.txt"})

    with pytest.raises(ConfigError, match=r"nowhere/\*\.txt"):
        score(replace(scoring, evals=[config]), Oracle(tokenizer))


def test_a_loss_that_is_not_a_number_stops_the_run(scoring, tokenizer):
    class Broken(Oracle):
        def window_losses(self, ids: np.ndarray) -> np.ndarray:
            return np.where(np.arange(1, len(ids)) == 5, np.nan, 1.0)

    with pytest.raises(DataError, match="loss at position 5 is not finite"):
        score(replace(scoring, evals=scoring.evals[2:]), Broken(tokenizer))


def test_the_bundled_text_is_the_default(scoring, tokenizer):
    config = NiahEval.model_validate({"suite": "niah", "lengths": [512], "samples": 2})

    cells = score(replace(scoring, evals=[config]), Oracle(tokenizer))["cells"]

    assert (cells[0]["value"], cells[0]["n"]) == (1.0, 2)
