import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from unspool.core.errors import ConfigError, DataError
from unspool.data.facts import question
from unspool.evals.heldout import Materials
from unspool.evals.prompts import Prompt, encode, prompt_hash
from unspool.evals.suites.niah import NiahEval, depth_grid, prompt

FACT = re.compile(r"The special magic (number|word) for (\S+) is (\S+)\.")


def niah(**options) -> NiahEval:
    return NiahEval.model_validate({"suite": "niah", "lengths": [512], **options})


def context_text(made: Prompt, materials: Materials) -> str:
    return materials.tokenizer.decode(made.context_ids, skip_special_tokens=True)


@given(length=st.integers(64, 8192), seed=st.integers(0, 1000), value=st.sampled_from(["numbers", "words"]))
@settings(max_examples=25, deadline=None)
def test_prompts_fill_their_length_and_never_exceed_it(materials, length, seed, value):
    made = prompt(niah(value=value), materials, length=length, seed=seed, index=seed % 20)

    assert length - max(2, length // 100) <= made.tokens <= length


@given(length=st.integers(64, 1024), seed=st.integers(0, 1000), needles=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_lengths_fit_or_are_refused_with_the_length_that_is_needed(coarse_materials, length, seed, needles):
    config = niah(needles=needles)
    try:
        made = prompt(config, coarse_materials, length=length, seed=seed, index=0)
    except ConfigError as error:
        needed = int(re.search(r"need (\d+) tokens", str(error)).group(1))
        assert needed > length
        # Other lengths draw other words, some of them longer.
        prompt(config, coarse_materials, length=needed * 5 // 4, seed=seed, index=0)
    else:
        assert length - max(2, length // 100) <= made.tokens <= length


def test_tiny_lengths_are_refused(materials):
    for length in (1, 16, 32):
        with pytest.raises(ConfigError, match=f"length {length} is too short"):
            prompt(niah(), materials, length=length, seed=0, index=0)


def test_every_fact_is_in_the_context_once_and_has_a_question(materials):
    made = prompt(niah(needles=5, samples=20), materials, length=1024, seed=3, index=1)

    facts = FACT.findall(context_text(made, materials))
    assert len(facts) == 5
    assert len({key for _, key, _ in facts}) == len({value for _, _, value in facts}) == 5
    by_key = {key: value for _, key, value in facts}
    for asked in made.questions:
        text = materials.tokenizer.decode(asked.ids)
        key = re.search(r"number for (\S+)\?", text).group(1)
        assert text == question(key, "number")
        assert by_key[key] == asked.reference
    assert [asked.depth for asked in made.questions] == sorted(asked.depth for asked in made.questions)


def test_words_as_values_never_repeat_a_key(materials):
    made = prompt(niah(needles=6, value="words"), materials, length=2048, seed=0, index=0)

    facts = FACT.findall(context_text(made, materials))
    assert len({word for _, key, value in facts for word in (key, value)}) == 12


def test_one_needle_walks_over_all_depths(materials):
    config = niah(samples=10, depths=5)
    prompts = [prompt(config, materials, length=1024, seed=0, index=index) for index in range(10)]

    assert depth_grid(config) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [made.questions[0].depth for made in prompts] == depth_grid(config) * 2


@pytest.mark.parametrize("depths", [1, 2, 5, 11])
@pytest.mark.parametrize("length", [128, 2048])
def test_the_recorded_depth_is_the_position_of_the_fact(materials, depths, length):
    config = niah(depths=depths, samples=depths)
    for index in range(depths):
        made = prompt(config, materials, length=length, seed=1, index=index)
        text = context_text(made, materials)
        before, *_, after = FACT.split(text)
        num_before, num_after = (len(encode(materials.tokenizer, part)) for part in (before, after))
        share = num_before / (num_before + num_after)
        assert abs(share - made.questions[0].depth) <= 0.5 / max(1, depths - 1) + 0.02


def test_facts_are_inserted_between_sentences(materials):
    config = niah(samples=20)
    for index in range(20):
        text = context_text(prompt(config, materials, length=2048, seed=2, index=index), materials)
        before = text[: FACT.search(text).start()]
        assert not before or re.search(r"[.!?]\s+$", before) or index % 5 == 4, before[-30:]


def test_text_without_sentences_still_spreads_the_depths(tokenizer, words):
    endless = Materials(tokenizer=tokenizer, words=words, documents=["ba" * 5000])
    config = niah(samples=5)

    depths = [prompt(config, endless, length=512, seed=0, index=index).questions[0].depth for index in range(5)]

    assert depths == depth_grid(config)


def test_short_text_is_repeated_to_fill_long_contexts(tokenizer, words):
    short = Materials(tokenizer=tokenizer, words=words, documents=["One short line about nothing much.\n"])

    made = prompt(niah(), short, length=4096, seed=0, index=0)

    assert made.tokens >= 4096 - 40


def test_prose_is_consecutive_text_of_the_documents(materials):
    made = prompt(niah(depths=2), materials, length=512, seed=4, index=0)

    prose = FACT.sub("", context_text(made, materials)).strip()
    source = "\n\n".join(text.strip() for text in materials.documents)
    assert prose in source + "\n\n" + source


def test_context_and_question_tokenise_as_the_joined_text_does(materials, coarse_materials):
    for material in (materials, coarse_materials):
        made = prompt(niah(needles=3, samples=3), material, length=1024, seed=0, index=0)
        text = context_text(made, material)
        for asked in made.questions:
            joined = material.tokenizer(text + material.tokenizer.decode(asked.ids))["input_ids"]
            assert joined == [*made.context_ids.tolist(), *asked.ids.tolist()]


def test_questions_get_no_space_from_tokenizers_that_add_one(training_text, words, documents):
    metaspace = Tokenizer(models.BPE())
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    metaspace.decoder = decoders.Metaspace(prepend_scheme="first")
    metaspace.train_from_iterator([text[:2000] for text in training_text], trainers.BpeTrainer(vocab_size=300))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=metaspace)
    spaced = Materials(tokenizer=tokenizer, words=words, documents=documents)

    made = prompt(niah(), spaced, length=2048, seed=0, index=0)

    assert "".join(tokenizer.convert_ids_to_tokens(made.questions[0].ids)).startswith("What")


def test_text_that_spells_a_control_token_stays_text(tokenizer, words):
    tricky = Materials(tokenizer=tokenizer, words=words, documents=["A line with <end> in it. " * 50])

    made = prompt(niah(), tricky, length=512, seed=0, index=0)

    assert tokenizer.eos_token_id not in made.context_ids


def test_bos_comes_first_exactly_where_the_tokenizer_adds_it(materials, coarse_materials):
    begin = materials.tokenizer.bos_token_id
    made = prompt(niah(), materials, length=512, seed=0, index=0)
    assert made.context_ids[0] == begin
    assert begin not in made.context_ids[1:]

    bare = prompt(niah(), coarse_materials, length=512, seed=0, index=0)
    assert coarse_materials.tokenizer.decode(bare.context_ids[:4])[0].isalpha()


def test_samples_are_met_exactly_when_needles_do_not_divide_them(materials):
    config = niah(samples=7, needles=3)
    prompts = [prompt(config, materials, length=512, seed=0, index=at) for at in range(3)]

    assert [len(made.questions) for made in prompts] == [3, 3, 1]


def test_prompts_depend_on_seed_index_and_tokenizer_only(materials, coarse_materials):
    def name(material: Materials, **options: int) -> str:
        made = prompt(niah(), material, **{"length": 512, "seed": 0, "index": 0, **options})
        return prompt_hash(made.context_ids, made.questions[0].ids)

    assert name(materials) == name(materials)
    others = [name(materials, seed=1), name(materials, index=1), name(materials, length=513), name(coarse_materials)]
    assert len({name(materials), *others}) == 5


def test_empty_text_is_refused(tokenizer, words):
    with pytest.raises(DataError, match="haystack text is empty"):
        prompt(niah(), Materials(tokenizer=tokenizer, words=words, documents=[" \n"]), length=512, seed=0, index=0)


def test_ids_are_unsigned_so_that_hashes_are_stable(materials):
    made = prompt(niah(), materials, length=512, seed=0, index=0)

    assert made.context_ids.dtype == made.questions[0].ids.dtype == np.uint32
