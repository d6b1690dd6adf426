import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.core.errors import ConfigError
from unspool.data.facts import pair_question
from unspool.evals.heldout import Materials
from unspool.evals.prompts import Prompt, PromptQuestion, prompt_hash
from unspool.evals.suites.key_value import KeyValueEval, prompt

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def kv(**options) -> KeyValueEval:
    return KeyValueEval.model_validate({"suite": "key_value", "lengths": [512], "value": "words", **options})


def pairs_of(made: Prompt, materials: Materials) -> list[tuple[str, str]]:
    text = materials.tokenizer.decode(made.context_ids, skip_special_tokens=True)
    assert text.endswith("}\n")
    return json.loads(text, object_pairs_hook=list)


def asked_key(asked: PromptQuestion, materials: Materials) -> str:
    text = "\n" + materials.tokenizer.decode(asked.ids)
    key = text.split('"')[1]
    assert text == pair_question(key)
    return key


@given(length=st.integers(64, 8192), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_prompts_fill_their_length_and_never_exceed_it(materials, length, seed):
    made = prompt(kv(), materials, length=length, seed=seed, index=seed % 5)

    assert length - max(2, length // 100) <= made.tokens <= length


@given(length=st.integers(64, 4096), seed=st.integers(0, 1000), value=st.sampled_from(["uuid", "words"]))
@settings(max_examples=20, deadline=None)
def test_lengths_fit_or_are_refused_with_the_length_that_is_needed(coarse_materials, length, seed, value):
    config = kv(value=value)
    try:
        made = prompt(config, coarse_materials, length=length, seed=seed, index=0)
    except ConfigError as error:
        needed = int(re.search(r"need (\d+) tokens", str(error)).group(1))
        assert needed > length
        # Other lengths draw other pairs, some of them longer.
        prompt(config, coarse_materials, length=needed * 5 // 4, seed=seed, index=0)
    else:
        # A byte-level tokenizer may need three tokens to lengthen a key.
        assert length - max(3, length // 100) <= made.tokens <= length


def test_tiny_lengths_are_refused(materials):
    for length in (1, 16, 32):
        with pytest.raises(ConfigError, match=f"length {length} is too short"):
            prompt(kv(), materials, length=length, seed=0, index=0)


@pytest.mark.parametrize("value", ["words", "uuid"])
def test_the_context_is_one_object_with_distinct_keys_that_holds_every_answer(materials, value):
    made = prompt(kv(value=value), materials, length=2048, seed=0, index=0)

    pairs = pairs_of(made, materials)
    assert len(dict(pairs)) == len(pairs) > 8
    assert all(key != kept for key, kept in pairs)
    for asked in made.questions:
        key = asked_key(asked, materials)
        assert dict(pairs)[key] == asked.reference
        assert asked.depth is None
        assert UUID.fullmatch(key) and UUID.fullmatch(asked.reference) if value == "uuid" else "-" not in key


def test_queried_keys_are_spread_over_the_object(materials):
    for index in range(5):
        made = prompt(kv(), materials, length=2048, seed=0, index=index)
        keys = [key for key, _ in pairs_of(made, materials)]
        quarters = [4 * keys.index(asked_key(asked, materials)) // len(keys) for asked in made.questions]
        assert quarters == [0, 1, 2, 3]


def test_keys_are_joined_only_when_words_run_out(materials, words):
    short = pairs_of(prompt(kv(), materials, length=1024, seed=0, index=0), materials)
    plain = [key for key, _ in short if key in words]
    # All but the last few, which were lengthened to fill the prompt.
    assert len(plain) >= len(short) - 4

    few = Materials(tokenizer=materials.tokenizer, words=words[:8], documents=[])
    made = prompt(kv(), few, length=2048, seed=0, index=0)
    pairs = pairs_of(made, few)
    assert len(dict(pairs)) == len(pairs) > 8 + 64
    first_half = [key for key, _ in pairs[: len(pairs) // 2]]
    assert 0 < sum(key in words for key in first_half) < 8, "plain words should stand anywhere"


def test_context_and_question_tokenise_as_the_joined_text_does(materials, coarse_materials):
    for material in (materials, coarse_materials):
        made = prompt(kv(), material, length=1024, seed=0, index=0)
        text = material.tokenizer.decode(made.context_ids, skip_special_tokens=True)
        for asked in made.questions:
            joined = material.tokenizer(text + material.tokenizer.decode(asked.ids))["input_ids"]
            assert joined == [*made.context_ids.tolist(), *asked.ids.tolist()]


def test_samples_are_met_exactly_when_questions_do_not_divide_them(materials):
    config = kv(samples=6)
    prompts = [prompt(config, materials, length=512, seed=0, index=at) for at in range(2)]

    assert [len(made.questions) for made in prompts] == [4, 2]


def test_prompts_depend_on_seed_index_and_tokenizer_only(materials, coarse_materials):
    def name(material: Materials, **options: int) -> str:
        made = prompt(kv(), material, **{"length": 1024, "seed": 0, "index": 0, **options})
        return prompt_hash(made.context_ids, made.questions[0].ids)

    assert name(materials) == name(materials)
    others = [name(materials, seed=1), name(materials, index=1), name(materials, length=1100), name(coarse_materials)]
    assert len({name(materials), *others}) == 5
