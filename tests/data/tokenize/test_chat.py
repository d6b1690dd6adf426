"""Of a conversation, exactly the assistant's words and what ends its turn are trained on."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenize.chat_families import FAMILIES, VARIANTS, chat_encoder, chat_tokenizer, runs
from unspool.data.sources.base import Message
from unspool.data.sources.files import Unreadable
from unspool.data.tokenize import chat
from unspool.data.tokenize.chat import Encoded

U, A, S = "user", "assistant", "system"
ALL = [*FAMILIES]


def talk(*turns: tuple[str, str]) -> list[Message]:
    return [Message(role, content) for role, content in turns]


TALKS = {
    "single turn": talk((U, "the mill?"), (A, "an old mill")),
    "several turns": talk((U, "one"), (A, "the river"), (U, "two"), (A, "runs past"), (U, "three"), (A, "corn")),
    "a system prompt": talk((S, "nobody has corn"), (U, "why?"), (A, "since the war")),
    "an empty answer": talk((U, "say nothing"), (A, ""), (U, "again"), (A, "the mill")),
    "space around an answer": talk((U, "go"), (A, "  the river \n"), (U, "on"), (A, "\n\nruns\n\n\n")),
    "control tokens spelled out": talk(
        (U, "a <|im_end|> b </s> c <|eot_id|> d <end_of_turn> e"),
        (A, "<|im_start|>user\nno<|im_end|></s><|eot_id|><end_of_turn><|im_end|>"),
        (U, "[INST] x [/INST]"),
        (A, "[INST] y [/INST] z </s>"),
    ),
    "all kinds of characters": talk(
        (U, "你好 👍🏽"), (A, "é e\u0301 naïve 你好，世界 👩‍👩‍👧 \u200b שָׁלוֹם ½ ２"), (U, "…"), (A, "👍")
    ),
    "a user's last word": talk((U, "one"), (A, "the river"), (U, "bye")),
    "an answer as the question": talk((U, "the mill"), (A, "the mill"), (U, "the mill"), (A, "the mill")),
    "only newlines": talk((U, "\n"), (A, "\n"), (U, "\n\n"), (A, " ")),
}


def check(name: str, messages: list[Message], encoded: Encoded) -> None:
    family = (FAMILIES | VARIANTS)[name]
    assert len(encoded.tokens) == len(encoded.loss_mask)
    expected = [family.trained(message) for message in messages if message.role == A]
    assert runs(name, encoded) == expected
    # Each control token that the template writes is one token, and none of the text's is.
    template_only = chat_encoder(name).template.render(
        [Message(message.role, "x") for message in chat_encoder(name).template.merge(messages)]
    )
    for control in family.controls:
        number = chat_tokenizer(name).convert_tokens_to_ids(control)
        assert int((encoded.tokens == number).sum()) == template_only.count(control), control


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", TALKS)
def test_just_the_answers_and_their_ends_are_trained_on(name, kind):
    check(name, TALKS[kind], chat_encoder(name).encode(TALKS[kind]))


words = st.text(
    st.one_of(
        st.sampled_from("the mill\n\n  \t.é你👍<|>[]/"),
        st.characters(
            exclude_categories=["Cs", "Cc"], exclude_characters=[chr(code) for code in range(0xFDD0, 0xFDF0)]
        ),
    ),
    max_size=12,
)
controls = st.sampled_from(sorted({control for family in FAMILIES.values() for control in family.controls}))
contents = st.lists(words | controls, max_size=4).map("".join)
conversations = st.builds(
    lambda system, pairs, last: [
        *([Message(S, system)] if system else []),
        *(Message(role, text) for pair in pairs for role, text in zip((U, A), pair, strict=True)),
        *([Message(U, last)] if last is not None else []),
    ],
    st.none() | contents,
    st.lists(st.tuples(contents, contents), min_size=1, max_size=3),
    st.none() | contents,
)


@pytest.mark.parametrize("name", ALL)
@given(messages=conversations)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_same_holds_for_any_conversation(name, messages):
    check(name, messages, chat_encoder(name).encode(messages))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", [kind for kind in TALKS if kind not in ("control tokens spelled out",)])
def test_text_and_tokens_are_those_of_transformers(name, kind):
    messages = chat_encoder(name).template.merge(TALKS[kind])
    encoded, plain = chat_encoder(name).encode(messages), [message._asdict() for message in messages]
    tokenizer = chat_tokenizer(name)

    assert encoded.text == tokenizer.apply_chat_template(plain, tokenize=False)
    theirs = tokenizer.apply_chat_template(plain, tokenize=True, return_dict=False)
    cut_elsewhere = kind in ("space around an answer", "only newlines") and not FAMILIES[name].pieces
    assert cut_elsewhere or encoded.tokens.tolist() == theirs


def test_an_answer_begins_where_the_prompt_ends_also_in_tokens():
    # "assistant\n" and "\n\nruns": whole, the newlines are one token, which nobody could ask for after the prompt.
    messages = talk((U, "go"), (A, "\n\nruns"))
    tokenizer, encoded = chat_tokenizer("qwen2.5"), chat_encoder("qwen2.5").encode(messages)
    prompt = tokenizer.apply_chat_template([messages[0]._asdict()], add_generation_prompt=True, return_dict=False)

    assert encoded.tokens[: len(prompt)].tolist() == prompt
    assert not encoded.loss_mask[: len(prompt)].any()
    assert encoded.loss_mask[len(prompt)]


# What templates do


def test_a_system_prompt_goes_before_the_first_question_where_there_is_no_such_role():
    encoded = chat_encoder("gemma").encode(TALKS["a system prompt"])
    assert encoded.text.startswith("<bos><start_of_turn>user\nnobody has corn\n\nwhy?<end_of_turn>")


def test_generation_marks_are_used_and_the_newline_after_a_turn_is_not_trained_on():
    messages = TALKS["several turns"]
    encoded = chat_encoder("marked").encode(messages)
    check("marked", messages, encoded)
    theirs = chat_tokenizer("marked").apply_chat_template(
        [message._asdict() for message in messages], return_dict=True, return_assistant_tokens_mask=True
    )
    newline = chat_tokenizer("marked").convert_tokens_to_ids("Ċ")
    assert encoded.tokens.tolist() == theirs["input_ids"]
    differing = np.array(theirs["assistant_masks"], dtype=bool) != encoded.loss_mask
    assert set(encoded.tokens[differing].tolist()) == {newline}


@pytest.mark.parametrize("kind", ["several turns", "a system prompt", "an empty answer", "a user's last word"])
def test_a_system_prompt_that_moves_does_not_mislead(kind):
    messages = talk((S, "nobody has corn"), *TALKS[kind])
    messages = messages if messages[1].role == U else messages[1:]
    check("mistral-system-last", messages, chat_encoder("mistral-system-last").encode(messages))


def test_reasoning_that_is_left_out_later_is_not_trained_on_there():
    thought = "<think>\nlong\n</think>\n\n"
    messages = talk((U, "one"), (A, f"{thought}the river"), (U, "two"), (A, f"{thought}runs past"))
    encoded = chat_encoder("reasoning").encode(messages)
    assert runs("reasoning", encoded) == ["the river<|im_end|>", f"{thought}runs past<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("mistral", talk((U, "a"), (U, "b"), (A, "c")), "template"),
        ("gemma", talk((A, "a"), (U, "b"), (A, "c")), "template"),
        ("gemma", talk((S, "a"), (A, "c")), "template"),
        ("llama3", talk((U, "a\ufdd0"), (A, "c")), "noncharacter"),
    ],
)
def test_what_a_template_refuses_is_unreadable_with_a_reason(name, messages, reason):
    with pytest.raises(Unreadable) as error:
        chat_encoder(name).encode(messages)
    assert error.value.reason == reason


# The checks above can fail


def broken(name: str, kind: str = "several turns") -> None:
    with pytest.raises(AssertionError):
        check(name, TALKS[kind], chat_encoder(name).encode(TALKS[kind]))


@pytest.mark.parametrize("name", ALL)
def test_a_mask_that_is_off_by_one_would_be_noticed(name, monkeypatch):
    whole = chat._tokenize
    for shift in (-1, 1):
        monkeypatch.setattr(chat, "_tokenize", lambda *args, by=shift: (whole(*args)[0], np.roll(whole(*args)[1], by)))
        broken(name)


@pytest.mark.parametrize("name", ALL)
def test_a_mask_on_the_users_words_would_be_noticed(name, monkeypatch):
    whole = chat._tokenize
    monkeypatch.setattr(chat, "_tokenize", lambda *args: (whole(*args)[0], ~whole(*args)[1]))
    broken(name)


@pytest.mark.parametrize("name", ALL)
def test_tokens_shifted_by_a_second_bos_would_be_noticed(name, monkeypatch):
    whole = chat._tokenize

    def doubled(*args):
        tokens, mask = whole(*args)
        return np.concatenate([tokens[:1], tokens])[: len(tokens)], mask

    monkeypatch.setattr(chat, "_tokenize", doubled)
    broken(name)


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2", "gemma"])
def test_training_on_the_newline_after_a_turn_would_be_noticed(name, monkeypatch):
    mark_trained = chat.mark_trained
    monkeypatch.setattr(chat, "mark_trained", lambda *args: mark_trained(*args).replace("\ufdd1\n", "\n\ufdd1"))
    monkeypatch.setattr(chat, "_turn_end", lambda text, start, stop: stop)
    broken(name)


@pytest.mark.parametrize("name", ALL)
def test_text_that_is_taken_for_control_tokens_would_be_noticed(name, monkeypatch):
    monkeypatch.setattr(chat.ChatEncoder, "_hide", lambda self, message: message)
    broken(name, "control tokens spelled out")


def test_a_token_across_the_border_would_be_noticed(monkeypatch):
    whole = chat._offsets
    monkeypatch.setattr(chat, "_offsets", lambda definition, text, cuts: whole(definition, text, []))
    broken("qwen2.5", "space around an answer")


def test_nfc_is_all_that_a_tokenizer_changes():
    # The tests above compare texts after it.
    assert (
        unicodedata.normalize("NFC", TALKS["all kinds of characters"][1].content)
        != TALKS["all kinds of characters"][1].content
    )
