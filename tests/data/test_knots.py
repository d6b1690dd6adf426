"""Which ids the knots get, in tokenizers that have reserved entries and in those that have not."""

import copy
import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from unspool.data.strategies.utk.special_tokens import (
    ALL_KNOTS,
    KNOTS,
    add_knots,
    knot_ids,
    knot_names,
    spare_ids,
    trained_ids,
)
from unspool.data.tokenize.encoder import build_encoder
from unspool.data.tokenize.fast import ENGINES
from unspool.models.tokenizer import load_tokenizer

from .conftest import build_tokenizer, prose

RESERVED = {
    "Llama 3": "<|reserved_special_token_{}|>",
    "Gemma": "<unused{}>",
    "Mistral": "[control_{}]",
    "Mistral Nemo": "<SPECIAL_{}>",
    "Phi": "<|dummy_{}|>",
    "Phi 3": "<|placeholder{}|>",
    "Qwen 1": "<|extra_{}|>",
    "gpt-oss": "<|reserved_{}|>",
    "Baichuan": "<reserved_{}>",
    "InternLM": "[UNUSED_TOKEN_{}]",
    "Falcon 3": ">>UNUSED_{}<<",
    "DeepSeek": "<｜place▁holder▁no▁{}｜>",
}
COUNT = 30


def reserved(pattern: str, count: int = COUNT, **special: str) -> PreTrainedTokenizerFast:
    """The small byte-level tokenizer with reserved entries after its vocabulary, and one token after those."""
    backend = build_tokenizer(bos=True).backend_tokenizer
    names = [pattern.format(number) for number in range(count)]
    backend.add_special_tokens([AddedToken(name, special=True) for name in (*names, "<|last|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "<|end|>", **special})


def in_vocabulary(kind: str) -> PreTrainedTokenizerFast:
    """Tokenizers whose reserved entries are part of the model, as Gemma's and BERT's are."""
    names = ["[UNK]", "</s>", *(f"<unused{number}>" for number in range(COUNT)), *"abcdefghij", "ab", "cd"]
    numbers = {name: number for number, name in enumerate(names)}
    model = {
        "BPE": lambda: models.BPE(vocab=numbers, merges=[("a", "b"), ("c", "d")], unk_token="[UNK]"),
        "WordPiece": lambda: models.WordPiece(vocab=numbers, unk_token="[UNK]"),
        "WordLevel": lambda: models.WordLevel(vocab=numbers, unk_token="[UNK]"),
        "Unigram": lambda: models.Unigram([(name, -float(number)) for name, number in numbers.items()], unk_id=0),
    }[kind]()
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="[UNK]")


def ids_of(tokenizer: PreTrainedTokenizerFast, pattern: str) -> list[int]:
    """Of reserved entries, the highest number first."""
    return [tokenizer.convert_tokens_to_ids(pattern.format(number)) for number in reversed(range(COUNT))]


# Names


def test_there_are_nine_knots_for_up_to_three_pieces_and_two_more_for_each_further_one():
    assert KNOTS == knot_names(2) == knot_names(3)
    assert [len(knot_names(hops)) for hops in range(2, 9)] == [9, 9, 11, 13, 15, 17, 19]
    assert knot_names(8) == ALL_KNOTS
    assert ALL_KNOTS[5:9] == ("<|knot:h1|>", "<|knot:t1|>", "<|knot:h2|>", "<|knot:t2|>")


# Added at the end


def test_knots_are_added_once_in_a_fixed_order_and_found_again(tokenizer):
    size = len(tokenizer)
    ids = knot_ids(tokenizer)
    assert list(ids.values()) == list(range(size, size + 9))
    assert knot_ids(tokenizer) == ids
    assert len(tokenizer) == size + 9
    assert tokenizer.convert_ids_to_tokens(list(ids.values())) == list(KNOTS)


@pytest.mark.parametrize("build", [build_tokenizer, lambda: reserved(RESERVED["Llama 3"])])
def test_ids_do_not_depend_on_the_number_or_order_of_requests(build):
    all_at_once, step_by_step = knot_ids(build(), 8), build()
    for hops in (2, 5, 3, 8):
        found = knot_ids(step_by_step, hops)
        assert found == {name: all_at_once[name] for name in knot_names(hops)}
    assert add_knots(step_by_step, []) == {}


@pytest.mark.parametrize("count", [0, len(ALL_KNOTS) - 1])
def test_too_few_reserved_entries_are_left_alone(count):
    tokenizer = reserved(RESERVED["Gemma"], count)
    size = len(tokenizer)
    assert list(knot_ids(tokenizer).values()) == list(range(size, size + 9))
    assert len(spare_ids(tokenizer)) == count


# In place of reserved entries


@pytest.mark.parametrize("pattern", RESERVED.values(), ids=RESERVED)
def test_reserved_entries_become_knots_from_the_highest_number_down(pattern):
    tokenizer = reserved(pattern)
    size, free = len(tokenizer), ids_of(tokenizer, pattern)
    text = tokenizer(prose(50, seed=1)).input_ids

    ids = knot_ids(tokenizer)

    assert list(ids.values()) == free[:9]
    assert len(tokenizer) == size
    assert tokenizer.convert_ids_to_tokens(list(ids.values())) == list(KNOTS)
    assert tokenizer.convert_ids_to_tokens(free[9]) == pattern.format(COUNT - 10), "the others keep their names"
    assert pattern.format(COUNT - 1) not in tokenizer.get_vocab()
    assert tokenizer(prose(50, seed=1)).input_ids == text
    assert tokenizer.convert_tokens_to_ids("<|last|>") == size - 1


@pytest.mark.parametrize("kind", ["BPE", "WordPiece", "WordLevel", "Unigram"])
def test_reserved_entries_inside_the_vocabulary_become_knots(kind, tmp_path):
    tokenizer = in_vocabulary(kind)
    size, free = len(tokenizer), ids_of(tokenizer, "<unused{}>")
    text = tokenizer("ab cd a j").input_ids

    ids = knot_ids(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)

    for each in (tokenizer, again):
        assert list(knot_ids(each).values()) == list(ids.values()) == free[:9]
        assert len(each) == size
        assert each("ab cd a j").input_ids == text
        assert each("ab<|knot:S|>cd").input_ids[1:-1] == [ids["<|knot:S|>"]]


def test_reserved_entries_that_are_in_use_are_never_taken():
    name = RESERVED["Llama 3"].format
    tokenizer = reserved(RESERVED["Llama 3"], eos_token=name(29), pad_token=name(28))
    tokenizer.chat_template = "{{ '" + name(27) + "' }}{% if tools %}" + name(25) + "{% endif %}"
    begin = tokenizer.convert_tokens_to_ids(name(26))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name(26)} $A", special_tokens=[(name(26), begin)]
    )
    ids = knot_ids(tokenizer)
    assert list(ids.values()) == ids_of(reserved(RESERVED["Llama 3"]), RESERVED["Llama 3"])[5:14]
    assert tokenizer.eos_token == name(29)
    assert tokenizer("").input_ids == [begin]


def test_chat_templates_may_be_several():
    tokenizer = reserved(RESERVED["Gemma"])
    tokenizer.chat_template = {"default": "x", "tool_use": "<unused29>"}
    assert tokenizer.convert_tokens_to_ids("<unused28>") == knot_ids(tokenizer)["<|knot:D|>"]


@pytest.mark.parametrize("name", ["<extra_id_{}>", "<|im_{}|>", "<0x{}>", "token_{}", "<|speaker_{}|>", "[{}]", "<{}>"])
def test_other_numbered_tokens_are_not_treated_as_reserved(name):
    assert spare_ids(reserved(name)) == []


def test_trained_ids_are_the_vocabulary_without_spare_entries():
    tokenizer = reserved(RESERVED["Phi"])
    free = set(ids_of(tokenizer, RESERVED["Phi"]))
    assert set(trained_ids(tokenizer).tolist()) == set(range(len(tokenizer))) - free
    ids = knot_ids(tokenizer)
    assert set(ids.values()) <= set(trained_ids(tokenizer).tolist()), "a knot that is there may have been trained"


# Saved and loaded


@pytest.mark.parametrize("hops", [3, 8])
@pytest.mark.parametrize("build", [build_tokenizer, lambda: reserved(RESERVED["Gemma"])], ids=["added", "reserved"])
def test_a_saved_tokenizer_has_the_same_knots(build, hops, tmp_path):
    tokenizer = build()
    ids = knot_ids(tokenizer, hops)
    tokenizer.save_pretrained(tmp_path)

    for again in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert again.convert_tokens_to_ids(list(ids)) == list(ids.values())
        assert len(again) == len(tokenizer)
        assert knot_ids(again, hops) == ids
        assert again.get_vocab() == tokenizer.get_vocab()
        assert set(ids.values()) <= set(again.added_tokens_decoder)
        assert all(again.added_tokens_decoder[number].special for number in ids.values())


def test_a_separate_list_of_special_tokens_does_not_restore_old_names(tmp_path):
    names = [RESERVED["Gemma"].format(number) for number in range(COUNT)]
    reserved(RESERVED["Gemma"], extra_special_tokens=names).save_pretrained(tmp_path / "plain")
    assert "<unused29>" in (tmp_path / "plain" / "tokenizer_config.json").read_text()
    tokenizer = load_tokenizer(str(tmp_path / "plain"))
    size = len(tokenizer)

    ids = knot_ids(tokenizer)
    tokenizer.save_pretrained(tmp_path / "knotted")

    again = AutoTokenizer.from_pretrained(tmp_path / "knotted")
    assert len(again) == size
    assert "<unused29>" not in again.get_vocab()
    assert knot_ids(again) == ids


def test_entries_saved_by_an_older_transformers_are_also_renamed(tmp_path):
    """It repeats all special tokens in tokenizer_config.json."""
    reserved(RESERVED["Llama 3"]).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    tokenizer = load_tokenizer(str(tmp_path))
    listed = {
        str(number): json.loads(json.dumps(token.__getstate__()))
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": listed}))
    tokenizer = load_tokenizer(str(tmp_path))
    size, ids = len(tokenizer), knot_ids(tokenizer)

    tokenizer.save_pretrained(tmp_path / "knotted")

    again = AutoTokenizer.from_pretrained(tmp_path / "knotted")
    assert (len(again), knot_ids(again)) == (size, ids)
    assert knot_ids(copy.deepcopy(again)) == ids


# Text


@pytest.mark.parametrize("route", ["tokenizers", *ENGINES])
@pytest.mark.parametrize("build", [build_tokenizer, lambda: reserved(RESERVED["Llama 3"])], ids=["added", "reserved"])
def test_a_text_that_spells_a_knot_or_a_reserved_entry_is_only_text(build, route):
    plain = build()
    text = "a <|knot:D|> b<|knot:/S|>" + RESERVED["Llama 3"].format(3) + RESERVED["Llama 3"].format(29) + " c"
    expected = build_encoder(plain).encode_plain([text])[0].tolist()
    tokenizer = copy.deepcopy(plain)
    ids = knot_ids(tokenizer)

    found = replace(build_encoder(tokenizer), route=route).encode_plain([text])[0].tolist()

    assert not set(found) & {*ids.values(), *spare_ids(plain)}
    assert found == expected, "and the same text as before the knots came"
    assert ids["<|knot:D|>"] in tokenizer(text).input_ids, "the tokenizer by itself would take it for a knot"
