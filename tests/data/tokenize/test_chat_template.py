"""A template that would train on the wrong tokens, or on none, is refused before any work."""

from datetime import datetime

import pytest

from data.tokenize.chat_families import TEMPLATES, chat_tokenizer
from unspool.core.errors import ConfigError
from unspool.data.sources.base import Message
from unspool.data.tokenize.chat import build_chat_encoder
from unspool.data.tokenize.chat_template import ChatTemplate, common_template, load_template

PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GENERATION = "{%% for m in messages %%}%s{%% endfor %%}"


def build(template: str | None, name: str = "qwen2.5"):
    return build_chat_encoder(chat_tokenizer(name), template, source="talks")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "sources.talks.template: not a Jinja template .* in line 1"),
        ("{{ raise_exception('never') }}", "cannot render a user message with an answer: .* never"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "a model would not learn to stop"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "cannot find the assistant's tokens",
        ),
        (GENERATION % "{{ m.content }}{% generation %}{% endgeneration %}", "marks are empty"),
        (GENERATION % "{% generation %}{{ m.content + eos_token }}{% endgeneration %}", "include user text"),
        (
            GENERATION % "{% if loop.last %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}",
            "not every answer",
        ),
        (
            GENERATION
            % "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ 'end' }}{% endif %}",
            "would not learn to stop",
        ),
    ],
)
def test_a_template_without_a_right_mask_is_refused(template, message):
    with pytest.raises(ConfigError, match=message):
        build(template)


def test_a_tokenizer_without_a_template_says_what_to_set():
    tokenizer = chat_tokenizer.__wrapped__("qwen2.5")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"has no chat template.*set sources.talks.template to a Jinja file"):
        build_chat_encoder(tokenizer, None, source="talks")
    assert build_chat_encoder(tokenizer, PLAIN, source="talks").template.text == PLAIN


def test_a_role_that_is_left_out_silently_is_merged_too(capsys):
    encoder = build(PLAIN.replace("in messages %}", "in messages if m.role != 'system' %}"))
    text = encoder.encode([Message("system", "Be brief."), Message("user", "why?"), Message("assistant", "so")]).text
    assert text.startswith("user: Be brief.\n\nwhy?")
    assert "has no system role" in capsys.readouterr().err


def test_the_date_is_always_the_same():
    dated = ChatTemplate(text="{{ strftime_now('%d %b %Y') }}", special_tokens=())
    assert dated.render([]) == "26 Jul 2024" != datetime.now().strftime("%d %b %Y")


def test_a_template_cannot_reach_beyond_itself():
    escaping = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(ConfigError, match="cannot render"):
        build(escaping)


def test_what_is_written_out_depends_on_the_template_and_its_tokens():
    one, other = build(PLAIN).template, build(PLAIN + " ").template
    assert one.digest != other.digest
    assert one.digest == build(PLAIN).template.digest
    assert one.digest != build(PLAIN, "llama3").template.digest


def test_only_one_template_goes_into_a_set_of_rows(tmp_path):
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat_template.jinja").write_text(text)
    (tmp_path / "books").mkdir()
    folders = {name: tmp_path / name for name in ("a", "b", "books")}
    assert common_template(folders, "rows x") == "x"
    assert common_template({"books": tmp_path / "books"}, "rows x") is None
    with pytest.raises(ConfigError, match="rows x: a and b and c were rendered with different chat templates"):
        common_template(folders | {"c": tmp_path / "c"}, "rows x")


def test_a_template_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read as a Jinja file"):
        load_template(tmp_path / "none.jinja")


def test_every_template_is_as_its_family_documents_it():
    """Written out by hand, so that these files are not only compared with themselves."""
    talk = [Message("user", "Hi"), Message("assistant", "Yo"), Message("user", "Bye")]
    header = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>".format
    turn, chatml = "<start_of_turn>{}\n{}<end_of_turn>\n".format, "<|im_start|>{}\n{}<|im_end|>\n".format
    roles = list(zip(("user", "assistant", "user"), ("Hi", "Yo", "Bye"), strict=True))
    said = {
        "llama3": "<|begin_of_text|>" + "".join(header(*pair) for pair in roles),
        "mistral": "<s>[INST] Hi [/INST] Yo</s>[INST] Bye [/INST]",
        "gemma": "<bos>" + turn("user", "Hi") + turn("model", "Yo") + turn("user", "Bye"),
        "smollm2": chatml("system", "You answer briefly.") + "".join(chatml(*pair) for pair in roles),
        "qwen2.5": chatml("system", "You are a model of few words.") + "".join(chatml(*pair) for pair in roles),
    }
    for name, text in said.items():
        assert build((TEMPLATES / f"{name}.jinja").read_text(), name).template.render(talk) == text
