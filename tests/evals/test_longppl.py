"""LongPPL against plain Python, and on a model whose key tokens are known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import unspool
from unspool.core.errors import ConfigError
from unspool.evals.backends.base import Backend
from unspool.evals.suites.longppl import SUITE, LongPPLEval, choose_key_tokens, short_losses


class Copying(Backend):
    """Predicts a token well if it occurred in the context, at any distance, and badly if not."""

    def __init__(self) -> None:
        self.contexts: list[int] = []

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        seen: set[int] = set()
        losses = []
        self.contexts.append(len(ids) - 1)
        for at, token in enumerate(ids.tolist()):
            if at:
                losses.append(0.1 if token in seen else 5.0)
            seen.add(token)
        return np.array(losses)


def config(**options) -> LongPPLEval:
    return LongPPLEval.model_validate({"suite": "longppl", "length": 64, "short_context": 16, **options})


def tokens_with_repeats(length: int) -> tuple[np.ndarray, list[int]]:
    """Distinct tokens, some repeated near by and some from far away; and the positions of the far repeats."""
    ids = np.arange(length, dtype=np.uint32)
    near, far = [20, 33, 47], [30, 41, 55, 63]
    for at in near:
        ids[at] = ids[at - 3]
    for number, at in enumerate(far):
        ids[at] = ids[1 + number]
    return ids, far


def test_key_tokens_are_those_that_only_the_long_context_predicts():
    ids, far = tokens_with_repeats(64)
    backend = Copying()
    long = backend.window_losses(ids)[15:]
    short = short_losses(backend, ids, 16)

    assert len(long) == len(short) == 48
    assert choose_key_tokens(config(), long, short).tolist() == far
    assert choose_key_tokens(config(min_gain=10), long, short).tolist() == []
    assert choose_key_tokens(config(min_log_prob=-0.05), long, short).tolist() == []


@pytest.mark.parametrize(("length", "short_context"), [(64, 16), (65, 16), (100, 8), (31, 9)])
def test_short_contexts_are_almost_full_and_never_longer(length, short_context):
    """Against plain Python: every token with its own context of the length that its block has."""
    rng = np.random.default_rng(length)
    ids = rng.integers(40, size=length).astype(np.uint32)
    backend = Copying()
    found = short_losses(backend, ids, short_context)

    stride = max(1, short_context // 4)
    expected = []
    for at in range(short_context, length):
        stop = min(at - (at - short_context) % stride + stride, length)
        context = ids[stop - short_context - 1 : at]
        assert short_context - stride <= len(context) <= short_context
        expected.append(0.1 if ids[at] in context else 5.0)
    assert found.tolist() == expected


def test_the_loss_is_the_mean_over_key_tokens_of_all_windows():
    samples = [
        {"suite": "longppl", "length": 64, "score": 1.0, "key_tokens": 1, "tokens": 48},
        {"suite": "longppl", "length": 64, "score": 3.0, "key_tokens": 3, "tokens": 48},
        {"suite": "longppl", "length": 64, "score": None, "key_tokens": 0, "tokens": 48},
    ]
    [cell] = SUITE.cells(config(), samples)

    assert cell["value"] == pytest.approx(2.5) and cell["perplexity"] == pytest.approx(math.exp(2.5))
    assert (cell["n"], cell["tokens"], cell["from"], cell["to"]) == (4, 144, 16, 64)
    assert cell["low"] < 2.5 < cell["high"]
    [none] = SUITE.cells(config(), samples[2:])
    assert none["value"] is None and none["n"] == 0


@pytest.mark.parametrize(("length", "short"), [("128K", 4096), ("32K", 4096), ("2K", 256), (64, 8)])
def test_short_contexts_suit_the_length(length, short):
    assert config(length=length, short_context=None).short == short


def test_a_length_that_leaves_no_long_context_is_refused():
    with pytest.raises(ValueError, match="length 64 is less than twice short_context 33"):
        config(short_context=33)


OWN = {"short_context": 64, "min_gain": 0.3, "min_log_prob": -6.0}
SMALL = {"lengths": [512], "samples": 3, "suite_settings": OWN}


def on_key_tokens_of(folder: Path, **options):
    own = {**OWN, "key_tokens": str(folder)}
    return unspool.evaluate("asset:tiny-base", "longppl", **{**SMALL, "suite_settings": own, **options})


def test_two_models_are_scored_on_the_key_tokens_of_one(tmp_path):
    first = unspool.evaluate("asset:tiny-base", "longppl", out=tmp_path / "first", **SMALL)
    second = on_key_tokens_of(tmp_path / "first")
    [own], [given] = first.summary["cells"], second.summary["cells"]

    assert own["n"] > 0 and own["tokens"] == 3 * (512 - 64)
    assert given["value"] == pytest.approx(own["value"]) and given["n"] == own["n"]
    assert [entry["comparable"] for entry in (*first.summary["suites"], *second.summary["suites"])] == [False, True]

    samples = [json.loads(line) for line in (tmp_path / "first" / "samples.jsonl").read_text().splitlines()]
    assert sum(len(sample["key_positions"]) for sample in samples) == own["n"]


def test_key_tokens_of_other_windows_are_refused(tmp_path):
    unspool.evaluate("asset:tiny-base", "longppl", out=tmp_path / "first", **SMALL)
    with pytest.raises(ConfigError, match="lacks 3 of 3 windows; score its model with the same tokenizer"):
        on_key_tokens_of(tmp_path / "first", seed=1)
    with pytest.raises(ConfigError, match=r"samples\.jsonl is missing"):
        on_key_tokens_of(tmp_path / "nowhere")


def test_settings_that_no_suite_has_are_refused():
    """They used to be ignored."""
    with pytest.raises(ConfigError, match=r"unknown setting 'sampels'; did you mean 'samples'\?"):
        unspool.evaluate("asset:tiny-base", "longppl", [512], sampels=3)
    with pytest.raises(ConfigError, match=r"'min_gain' is a key of longppl; pass it as `suite_settings=\{'min_gain'"):
        unspool.evaluate("asset:tiny-base", "longppl", [512], min_gain=3)
    with pytest.raises(ConfigError, match=r"longppl has no key 'min_gian'; did you mean 'min_gain'\?"):
        unspool.evaluate("asset:tiny-base", "longppl", [512], suite_settings={"min_gian": 1})
    with pytest.raises(ConfigError, match="'samples' has its own argument"):
        unspool.evaluate("asset:tiny-base", "longppl", [512], suite_settings={"samples": 1})
