"""Prompts that share their start with the last one give what they would give alone, and read only the rest."""

import numpy as np
import pytest
import torch

from unspool.core.errors import ConfigError
from unspool.models.generation.cached import CachedGenerator, Sampling
from unspool.models.rotary import decide_by_document

from .test_greedy import made, plain
from .test_rotary_lengths import SETTINGS

BOOK = np.random.default_rng(1).integers(97, size=75)
ENDS = [np.random.default_rng(seed).integers(97, size=size) for seed, size in ((2, 5), (3, 1), (4, 12))]
NONE = np.zeros(0, dtype=np.int64)


@pytest.fixture
def read() -> list[int]:
    """Tokens of each pass, as the model got them."""
    return []


def watched(model, read: list[int]):
    model.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    return model


@pytest.mark.parametrize("kind", ["unspool", "harpe", "sdpa", "our window", "capped"])
def test_questions_on_one_text_equal_decoding_without_a_cache_and_read_it_once(kind, read):
    model = made(kind)
    prompts = [np.concatenate([BOOK, end]) for end in ENDS]
    wanted = [plain(model, prompt, NONE, 6) for prompt in prompts]
    assert len({tuple(ids) for ids in wanted}) == len(prompts), "equal answers would hide a mix-up"
    generator = CachedGenerator(watched(model, read), stop_ids=(), prefill_chunk=40)

    found = []
    for prompt in prompts:
        read.clear()
        found.append(list(generator.generate(prompt, max_new_tokens=6)))
        found_lens = [count for count in read if count > 1]
        assert sum(found_lens) <= (80 if len(found) == 1 else 12), read

    assert found == wanted
    # The same prompt again reads its last token only.
    read.clear()
    assert list(generator.generate(prompts[-1], max_new_tokens=6)) == wanted[-1]
    assert read == [1] * 6


def test_another_text_and_one_that_outgrows_the_cache_are_answered_right(monkeypatch):
    monkeypatch.setattr("unspool.models.generation.cached.SPARE_TOKENS", 0)
    model = made("unspool")
    generator = CachedGenerator(model, stop_ids=())
    long = np.concatenate([BOOK, *ENDS, BOOK[:40]])

    for prompt in (BOOK[:20], BOOK, BOOK[:70], long, BOOK[::-1], long[::-1], BOOK[:3]):
        assert list(generator.generate(prompt, max_new_tokens=4)) == plain(model, prompt, NONE, 4)


def test_a_pass_that_was_interrupted_leaves_the_cache_usable():
    model = made("unspool")
    generator = CachedGenerator(model, stop_ids=(), prefill_chunk=30)
    layer = model.model.layers[1]
    passes = []

    def interrupt(*_):
        passes.append(1)
        if len(passes) == 3:
            raise KeyboardInterrupt

    hook = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(generator.generate(BOOK, max_new_tokens=4))
    hook.remove()

    assert generator.reusable(BOOK) == 60
    assert list(generator.generate(BOOK, max_new_tokens=4)) == plain(model, BOOK, NONE, 4)


@pytest.mark.parametrize("rope", sorted(SETTINGS))
def test_keys_are_not_reused_where_the_length_of_the_prompt_changes_their_rotation(rope):
    model = made("unspool", rope_parameters=SETTINGS[rope], max_position_embeddings=64)
    decide_by_document(model)
    generator, alone = CachedGenerator(model, stop_ids=()), CachedGenerator(model, stop_ids=())
    short, long = BOOK[:10], BOOK
    list(generator.generate(short, max_new_tokens=2))

    assert generator.reusable(long) == 0
    assert generator.reusable(BOOK[:15]) >= 10, "lengths with the same frequencies share keys"
    assert list(generator.generate(long, max_new_tokens=4)) == list(alone.generate(long, max_new_tokens=4))


def test_a_stop_token_ends_the_answer_and_is_left_out():
    model = made("unspool")
    free = list(CachedGenerator(model, stop_ids=()).generate(BOOK, max_new_tokens=8))

    stopped = list(CachedGenerator(model, stop_ids={free[3]}).generate(BOOK, max_new_tokens=8))

    assert stopped == free[: free.index(free[3])]


def test_a_seed_gives_the_same_answer_whatever_was_asked_before():
    model = made("unspool")
    hot = {"max_new_tokens": 12, "sampling": Sampling(temperature=1.0, seed=3)}
    first = list(CachedGenerator(model, stop_ids=()).generate(BOOK, **hot))
    generator = CachedGenerator(model, stop_ids=())
    list(generator.generate(BOOK[:50], max_new_tokens=3, sampling=Sampling(temperature=2.0, seed=9)))

    assert list(generator.generate(BOOK, **hot)) == first
    other = Sampling(temperature=1.0, seed=4)
    assert list(generator.generate(BOOK, max_new_tokens=12, sampling=other)) != first
    # With hardly any probability mass allowed, only the most likely token is left.
    narrow = Sampling(temperature=1.0, top_p=1e-6, seed=3)
    assert list(generator.generate(BOOK, max_new_tokens=6, sampling=narrow)) == plain(model, BOOK, NONE, 6)


def test_samples_have_the_probabilities_of_the_model():
    model = made("unspool", initializer_range=0.1)
    with torch.no_grad():
        wanted = (model(input_ids=torch.from_numpy(BOOK)[None]).logits[0, -1] / 0.5).softmax(-1)
    generator = CachedGenerator(model, stop_ids=())
    draws = [
        next(generator.generate(BOOK, max_new_tokens=1, sampling=Sampling(temperature=0.5, seed=seed)))
        for seed in range(150)
    ]

    top = int(wanted.argmax())
    expected, sigma = 150 * float(wanted[top]), float((150 * wanted[top] * (1 - wanted[top])).sqrt())
    assert 0.02 < wanted[top] < 0.98, "a certain token would check nothing"
    assert abs(draws.count(top) - expected) < 4 * sigma


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.5}, {"seed": -1}]
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)
