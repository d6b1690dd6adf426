"""`unspool generate` on the shipped model: where the text comes from, what is printed, what is refused."""

import io
import json
import logging
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app

BOOK = "Once upon a time there was a king who had a daughter, and she lived in a tower by the sea."


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(BOOK + "\n")
    return path


def run(*options: object, stdin: str | bytes = "", code: int = 0):
    done = CliRunner().invoke(build_app(), ["generate", *map(str, options)], input=stdin)
    assert done.exit_code == code, done.output
    return done


def refused(*options: object, stdin: str | bytes = "") -> str:
    done = run(*options, stdin=stdin, code=2)
    assert done.stdout == "" and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.output
    return done.stderr


def asked(*options: object, stdin: str | bytes = "") -> list[dict]:
    printed = run("asset:tiny-base", "--max-new-tokens", 8, "--json", *options, stdin=stdin).stdout
    return json.loads(printed)["answers"]


def test_a_file_and_standard_input_give_the_same_answers_streamed_or_not(book):
    (from_file,) = asked("--prompt-file", book, "--question", "The king said")
    (from_pipe,) = asked("--question", "The king said", stdin=BOOK + "\n")
    sources = (["--prompt-file", book, "--stream"], ""), (["--prompt-file", "-", "--no-stream"], BOOK)
    printed = [
        run("asset:tiny-base", "--question", "The king said", "--max-new-tokens", 8, *options, stdin=stdin)
        for options, stdin in sources
    ]

    assert from_file["text"] == from_pipe["text"]
    assert [done.stdout for done in printed] == [from_file["text"] + "\n"] * 2
    assert "prompt tokens, first token after" in printed[0].stderr


def test_each_question_is_asked_on_its_own_and_the_book_is_read_once(book):
    questions = ["--question", "The king said", "--question", "The daughter asked"]
    both = asked("--prompt-file", book, *questions)

    assert [answer["text"] for answer in both] == [
        asked("--prompt-file", book, *questions[at : at + 2])[0]["text"] for at in (0, 2)
    ]
    assert both[0]["cached_tokens"] == 0 and both[1]["prompt_tokens"] - both[1]["cached_tokens"] < 8


def test_without_a_question_the_text_is_continued():
    (answer,) = asked(stdin=BOOK + "\n")

    assert answer["question"] == "" and answer["prompt_tokens"] > 10 and answer["text"]


def test_samples_repeat_by_seed(book):
    settings = ["--prompt-file", book, "--temperature", 1, "--top-p", 0.9]
    first, again, other = (asked(*settings, "--seed", seed)[0]["text"] for seed in (1, 1, 2))

    assert first == again != other


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_asked_for_questions_until_it_ends(book, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal(f"The king said\n\n{'Who? ' * 300}\nThe daughter asked\n"))
    command = ["generate", "asset:tiny-base", "--prompt-file", str(book), "--max-new-tokens", "8"]
    with pytest.raises(SystemExit) as stop:
        build_app()(command)
    printed = capsys.readouterr()
    both = asked("--prompt-file", book, "--question", "The king said", "--question", "The daughter asked")

    assert stop.value.code == 0
    assert printed.out == f"> {both[0]['text']}\n> > > {both[1]['text']}\n> \n"
    assert "error: the prompt has" in printed.err and "from the prompt cache" in printed.err


def test_a_truncated_text_is_reported():
    done = run(
        *("asset:tiny-base", "--question", "Who?", "--max-new-tokens", 4, "--beyond-context", "truncate"),
        stdin=BOOK * 40,
    )

    assert "tokens from the middle of the text" in done.stderr


def test_rope_extends_the_context_without_training():
    (answer,) = asked("--rope", "yarn", "--context", "1K", "--question", "Who?", stdin=BOOK * 14)

    assert answer["prompt_tokens"] > 256 and answer["dropped_tokens"] == 0


@pytest.mark.parametrize(
    ("options", "stdin", "message"),
    [
        ([], "", "the prompt is empty; give --prompt-file, --question or text on standard input."),
        (["--question", " "], "", "--question is empty"),
        (["--prompt-file", "none.txt"], "", "--prompt-file none.txt: there is no such file; correct the path."),
        (["--prompt-file", "."], "", "it is a folder, not a file"),
        (["--prompt-file", "book.txt"], "more", "--prompt-file and standard input both give a text"),
        (["--prompt-file", "empty.txt", "--question", "Who?"], "", "empty.txt is empty"),
        (["--prompt-file", "-"], "", "standard input is empty"),
        (["--question", "Who?"], b"\xff\xfe\x00", "standard input: not UTF-8 text (byte 0)"),
        (["--question", "Who?"], BOOK * 40, "tokens, but"),
        (["--question", "Who?", "--rope", "yarn"], "", "--rope needs the context length"),
        (["--question", "Who?", "--context", "1K"], "", "also pass --rope"),
        (["--question", "Who?", "--beyond-context", "skip"], "", "--beyond-context"),
        (["--question", "Who?", "--backend", "oracle"], "", "--backend"),
        (["--question", "Who?", "--backend", "openai"], "", "needs the server's address"),
        (["--question", "Who?", "--url", "http://127.0.0.1:9"], "", "--url works only with --backend openai"),
        (["--question", "Who?", "--chat", "on"], "", "has no chat template"),
        (["--question", "Who?", "--temperature", "-1"], "", "temperature -1.0"),
        (["--question", "Who?", "--device", "tpu"], "", "--device 'tpu' is not known"),
    ],
)
def test_mistakes_end_in_one_sentence(options, stdin, message, book, monkeypatch):
    monkeypatch.chdir(book.parent)
    Path("empty.txt").write_text("\n")

    assert message in refused("asset:tiny-base", *options, stdin=stdin)


def test_a_model_that_does_not_exist_is_refused(tmp_path, monkeypatch):
    assert "none" in refused(tmp_path / "none", "--question", "Who?")
    monkeypatch.setattr(sys, "stdin", Terminal("Who?\n"))
    with pytest.raises(SystemExit) as stop:
        build_app()(["generate", str(tmp_path / "none")])
    assert stop.value.code == 2


def test_every_question_is_checked_before_the_first_is_answered(book):
    assert "tokens, but" in refused(
        *("asset:tiny-base", "--prompt-file", book, "--question", "Who?", "--question", "Who? " * 300)
    )


def test_quiet_prints_the_answer_only(book):
    command = ["-q", "generate", "asset:tiny-base", "--prompt-file", str(book), "--max-new-tokens", "4"]
    try:
        done = CliRunner().invoke(build_app(), command)
    finally:
        logging.getLogger("unspool").setLevel(logging.INFO)

    assert done.exit_code == 0 and done.stderr == "" and done.stdout.count("\n") >= 1
