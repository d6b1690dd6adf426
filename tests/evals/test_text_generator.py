"""Questions about a text, on the shipped model: the answers of plain `transformers`, the text read once."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from factory import build_model, build_tokenizer
from unspool.core.errors import ConfigError
from unspool.evals.backends.base import BackendOptions
from unspool.evals.text_generator import GenerationOptions, TextGenerator, _text_pieces
from unspool.models.generation.cached import Sampling
from unspool.models.location import resolve_path

from .test_server import Talk, talk, url  # noqa: F401 (fixtures)

TINY = resolve_path("asset:tiny-base", Path())
BOOK = (
    "Once upon a time there was a king who had a daughter. She lived in a tower by the sea, and no one knew her name."
)
QUESTIONS = ["The king said", "The daughter asked him", "Then"]


def options(**changes) -> BackendOptions:
    return BackendOptions(**{"model": TINY, "device": torch.device("cpu"), "dtype": torch.float32} | changes)


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    return TextGenerator(options(), GenerationOptions(max_new_tokens=24))


def hot(seed: int) -> TextGenerator:
    return TextGenerator(options(), GenerationOptions(max_new_tokens=24, sampling=Sampling(temperature=1, seed=seed)))


def test_greedy_answers_equal_generate_of_transformers_streamed_or_not(generator):
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    texts = []
    for question in QUESTIONS:
        ids = tokenizer(f"{BOOK}\n\n{question}", return_tensors="pt")
        whole = plain.generate(**ids, do_sample=False, max_new_tokens=24)[0, ids["input_ids"].shape[1] :]
        pieces: list[str] = []

        answer = generator.ask(BOOK, question, on_text=pieces.append)

        assert answer.text == tokenizer.decode(whole, skip_special_tokens=True)
        assert "".join(pieces) == answer.text and len(pieces) > 5
        assert generator.ask(BOOK, question).text == answer.text
        assert (answer.prompt_tokens, answer.answer_tokens) == (ids["input_ids"].shape[1], 24)
        assert answer.finish_reason == "length"
        texts.append(answer.text)
    assert len(set(texts)) == len(texts), "equal answers would hide a mix-up"


def test_a_second_question_does_not_read_the_text_again(generator):
    generator.ask("Another text.", "Who?")
    read: list[int] = []
    hook = generator._backend.model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    first = generator.ask(BOOK, QUESTIONS[0])
    counted = [read.copy(), read.clear()][0]
    second = generator.ask(BOOK, QUESTIONS[1])
    hook.remove()

    assert counted[0] == first.prompt_tokens - first.cached_tokens > 25
    assert read[0] == second.prompt_tokens - second.cached_tokens < 10


def test_samples_follow_the_seed():
    first, again, other = (hot(seed).ask(BOOK, "Then").text for seed in (1, 1, 2))

    assert first == again != other


def test_a_prompt_beyond_the_context_is_refused_with_its_tokens_before_weights_are_loaded():
    long = TextGenerator(options())

    with pytest.raises(
        ConfigError, match=r"the prompt has \d,\d{3} tokens, but .*tiny-base has a context of 256\..*trunc"
    ):
        long.ask(BOOK * 40, "Who?")
    with pytest.raises(ConfigError, match="has a context of 256"):
        long.check(BOOK * 40)
    assert "model" not in vars(long._backend)
    with pytest.raises(ConfigError, match="and its answer up to 250 more, but"):
        TextGenerator(options(), GenerationOptions(max_new_tokens=250)).ask(BOOK, "Who?")


def test_a_text_beyond_the_context_loses_its_middle_and_keeps_the_question():
    text = "".join(f"Line {number} of the book. " for number in range(400))
    generator = TextGenerator(options(), GenerationOptions(max_new_tokens=16, beyond_context="truncate"))
    asked, ids, dropped = generator._encode_checked(text, "Who?")

    kept = asked.context + asked.question
    assert 256 - 16 - 4 <= len(ids) <= 256 - 16
    assert kept.startswith("Line 0 of the book. Line 1 of") and kept.endswith(" of the book. \n\nWho?")
    assert dropped > 1000 and "Line 399 " in kept and "Line 200 " not in kept
    answer = generator.ask(text, "Who?")
    assert (answer.dropped_tokens, answer.prompt_tokens) == (dropped, len(ids))
    with pytest.raises(ConfigError, match="has a context of 256"):
        generator.ask("A text.", "Who? " * 300)
    with pytest.raises(ConfigError, match="has a context of 256"):
        generator.ask("", "Who? " * 300)


def test_ask_reads_beyond_the_context():
    generator = TextGenerator(options(), GenerationOptions(max_new_tokens=2, beyond_context="ask"))

    assert generator.ask(BOOK * 12, "Who?").prompt_tokens > 256


def test_an_answer_has_room_up_to_the_context_by_default():
    answer = TextGenerator(options()).ask(" ".join([BOOK] * 7), "Who?")

    assert answer.prompt_tokens > 200
    assert answer.finish_reason == "stop" or answer.prompt_tokens + answer.answer_tokens == 256


@pytest.mark.parametrize("prompt", [("", ""), (" \n", "\t")])
def test_an_empty_prompt_is_refused(generator, prompt):
    with pytest.raises(ConfigError, match="the prompt is empty"):
        generator.ask(*prompt)


def test_bytes_that_are_not_text_are_refused(generator):
    with pytest.raises(ConfigError, match="bytes that are not UTF-8"):
        generator.ask(BOOK, "Who\udcff?")


def test_the_chat_template_is_used_if_there_is_one(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(tmp_path)
    build_model().save_pretrained(tmp_path)
    found = {}
    for chat in ("auto", "on", "off"):
        generator = TextGenerator(options(model=str(tmp_path)), GenerationOptions(max_new_tokens=4, chat=chat))
        found[chat] = tokenizer.decode(generator._encode_checked("A book", "Who?")[1], skip_special_tokens=True)

    assert found["auto"] == found["on"] == "[user]A book\n\nWho?[assistant]"
    assert found["off"] == "A book\n\nWho?"
    with pytest.raises(ConfigError, match="has no chat template"):
        TextGenerator(options(), GenerationOptions(chat="on")).ask(BOOK)


def test_a_server_gets_the_text_and_the_sampling_settings(url, talk):  # noqa: F811
    talk.answer = lambda path, body: f"asked at {path}"
    server = options(kind="openai", url=url, model_name="served", endpoint=None)
    settings = GenerationOptions(max_new_tokens=9, sampling=Sampling(temperature=0.5, seed=7))

    generator = TextGenerator(server, settings)
    talk.asked.clear()  # what was asked to find out about the server
    answer = generator.ask(BOOK, "Who?")

    assert answer.text == "asked at /v1/completions" and answer.finish_reason is None
    ((_, body, _),) = talk.asked
    assert body["prompt"] == f"{BOOK}\n\nWho?" and body["max_tokens"] == 9 and body["model"] == "served"
    assert (body["temperature"], body["seed"]) == (0.5, 7)
    with pytest.raises(ConfigError, match="has a context of 256"):
        generator.ask(BOOK * 40, "Who?")
    assert len(talk.asked) == 1


def test_a_server_of_a_chat_model_gets_a_message(url, talk, tmp_path):  # noqa: F811
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(tmp_path)
    server = options(kind="openai", url=url, model=str(tmp_path), endpoint=None)

    generator = TextGenerator(server)
    talk.asked.clear()
    assert generator.ask(BOOK, "Who?").text == "fine"
    ((path, body, _),) = talk.asked
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": f"{BOOK}\n\nWho?"}]
    assert (body["temperature"], body["max_tokens"]) == (0.0, 512)


def test_pieces_make_up_the_text_also_where_characters_take_several_tokens():
    tokenizer = build_tokenizer()
    text = "naïve 猫 🐈‍⬛ – é, \n end"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text), "whole characters would check nothing"
    for cut in range(len(ids) + 1):
        pieces = list(_text_pieces(tokenizer, ids[:cut], []))
        assert "".join(pieces) == tokenizer.decode(ids[:cut], skip_special_tokens=True)
        assert not any("\ufffd" in piece for piece in pieces[:-1])
