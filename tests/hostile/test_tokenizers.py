"""Damaged and malicious tokenizers and chat templates: one sentence, exit code 2, no code of the folder runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from factory import build_tokenizer
from unspool.core.errors import ConfigError
from unspool.data.tokenize import chat_template
from unspool.data.tokenize.chat import build_chat_encoder
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.models.tokenizer import load_tokenizer

from .model_folders import TEXT, Damage, check_sentence, content, evaluate, run

# Tokenizers


def change_tokenizer(change: Callable[[Tokenizer], Any]) -> Damage:
    def damage(folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        change(tokenizer)
        tokenizer.save(str(folder / "tokenizer.json"))

    return damage


def add_specials(tokenizer: Tokenizer) -> Tokenizer:
    """Tokens up to number 320."""
    count = 321 - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<{number}>", special=True) for number in range(count)])
    return tokenizer


def begin_texts(tokenizer: Tokenizer) -> None:
    last = tokenizer.id_to_token(320)
    tokenizer.post_processor = TemplateProcessing(single=f"{last} $A", special_tokens=[(last, 320)])


TOKENIZERS: dict[str, tuple[Damage, str]] = {
    "no file": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer could be loaded"),
    "an empty table": (content("tokenizer.json", b"{}"), "no tokenizer could be loaded"),
    "not JSON": (content("tokenizer.json", b"\x00\x01"), "no tokenizer could be loaded"),
    "settings that are a list": (content("tokenizer_config.json", b"[]"), "no tokenizer could be loaded"),
    "more tokens than embeddings": (
        change_tokenizer(lambda tokenizer: tokenizer.add_tokens([f"word{number}" for number in range(40)])),
        "ordinary tokens have no embedding",
    ),
    "texts begin with a token without embedding": (
        change_tokenizer(lambda tokenizer: begin_texts(add_specials(tokenizer))),
        "the text holds token 320, and the model has embeddings for 0 to 299 only",
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_is_damaged_or_of_another_model_is_refused(name, folder):
    damage, said = TOKENIZERS[name]
    damage(folder)

    check_sentence(evaluate(folder), said)


def test_special_tokens_that_the_text_does_not_hold_need_no_embedding(folder):
    """Text models of multimodal families have them."""
    change_tokenizer(add_specials)(folder)

    done = evaluate(folder)

    assert done.exit_code == 0, done.output


def test_training_on_a_token_without_embedding_is_refused(folder, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    (tmp_path / "data").mkdir()
    for number in range(9):
        (tmp_path / "data" / f"{number}.txt").write_text(TEXT[: 30 + number])
    recipe.write_text(
        f"""
name: hostile
model: {folder}
out: {tmp_path / "run"}
sources: {{book: {{kind: text, path: {tmp_path / "data"}}}}}
datasets: {{long: {{from: book, seq_len: 32, packing: concat}}}}
stages:
- {{name: one, context_length: 32, mix: {{long: 1.0}}, tokens: 64, batch_tokens: 64, lr: 1.0e-3}}
"""
    )
    change_tokenizer(add_specials)(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    last = load_tokenizer(str(folder)).convert_ids_to_tokens(320)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": last}))

    check_sentence(run("run", recipe), "stage one: dataset long contains token 320, but the model has embeddings for")

    assert not (tmp_path / "run" / "stages" / "one").exists()


# Chat templates

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATES = {
    "not closed": "{% for m in messages %}",
    "no such filter": "{{ messages | evil }}" + TURNS,
    "refuses everything": "{{ raise_exception('no') }}",
    "reads attributes of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}" + TURNS,
    "opens a file": "{{ cycler.__init__.__globals__.os.system('touch ran') }}" + TURNS,
    "changes the messages": "{% set _ = messages.append(messages[0]) %}" + TURNS,
    "divides by zero": "{{ 1 / 0 }}" + TURNS,
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + TURNS,
    "fills the memory": "{{ 'a' * 10 ** 12 }}" + TURNS,
    "a power without end": "{{ 9 ** 999999999 }}" + TURNS,
    "loops without end": LOOP + TURNS,
    "ignores the messages": "hello {{ eos_token }}",
    "nested without end": "{% if 1 %}" * 120 + "{% endif %}" * 120 + "{{ 1 / 0 }}",
    "includes a file": "{% include '/etc/passwd' %}" + TURNS,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_cannot_be_used_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3, raising=False)
    tokenizer = build_tokenizer()

    with pytest.raises(ConfigError, match="template") as trained:
        build_chat_encoder(tokenizer, TEMPLATES[name], source="talks")
    (tmp_path / "tokenizer").mkdir()
    tokenizer.chat_template = TEMPLATES[name]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match="chat template") as scored:
        PromptEncoder(load_tokenizer(str(tmp_path / "tokenizer"))).overhead(chat=True)
    for refused in (trained, scored):
        assert len(str(refused.value).splitlines()) == 1
    assert not Path("ran").exists()


def test_a_template_that_works_is_used_with_the_same_limits():
    encoder = build_chat_encoder(build_tokenizer(), TURNS + "{{ ' ' * 3 * (2 ** 3 - 8) }}", source="talks")

    assert encoder.template.has_marks is False
