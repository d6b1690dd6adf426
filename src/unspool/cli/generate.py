"""`unspool generate`: ask a model about a long text."""

import logging
import select
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli.eval_options import read_rope
from unspool.core.console import print_json
from unspool.core.errors import ConfigError, DataError
from unspool.models.location import expand_home

if TYPE_CHECKING:
    from unspool.evals.text_generator import TextAnswer, TextGenerator

logger = logging.getLogger(__name__)

STDIN = "-"


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, .gguf file, Hub id or asset:NAME.")],
    prompt_file: Annotated[
        str | None,
        typer.Option(help="UTF-8 text that the model reads first. Default: standard input if piped; - also reads it."),
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option(help="Question about the text. Repeatable; questions are independent.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Maximum tokens per answer. Default: 512, or fewer if the context ends."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed of sampling, the same for every question.")] = 0,
    chat: Annotated[str, typer.Option(help="Use the chat template: auto, on or off.")] = "auto",
    beyond_context: Annotated[
        str,
        typer.Option(help="For prompts longer than the context: refuse, truncate (cut the middle) or ask."),
    ] = "refuse",
    stream: Annotated[bool, typer.Option(help="Print the answer while it is generated.")] = True,
    rope: Annotated[
        str | None,
        typer.Option(help="Apply another RoPE method without training: yarn, ntk, …, or '{method: abf, base: 8e6}'."),
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context length for --rope.")] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    backend: Annotated[
        str, typer.Option(help="transformers (in this process), or openai for any server.")
    ] = "transformers",
    url: Annotated[str | None, typer.Option(help="Address of the server, such as http://localhost:8000/v1.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name of the model on the server. Default: MODEL.")] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="auto, completions (sends token ids), text or chat. Default: chat with a chat template, else text."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Seconds to wait for the server's answer.")
    ] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print answers, token counts and times as JSON.")] = False,
) -> None:
    """Ask a model about a long text, or let it continue one.

    The model reads the text once: later questions reuse the prompt cache.
    Without --question, the model continues the text; in a terminal, the
    command reads one question per line.

        unspool generate MODEL --prompt-file book.txt --question "Who is Ishmael?"

        unspool generate MODEL --prompt-file book.txt

        cat book.txt | unspool generate MODEL --question "Who?" --question "Where?" --json

        unspool generate MODEL --backend openai --url http://localhost:8000/v1 --question "Who are you?"
    """
    questions = question or []
    if any(not each.strip() for each in questions):
        raise ConfigError("--question is empty; write a question, or leave the option out to continue the text.")
    text = _read_text(prompt_file)
    is_conversation = not questions and not as_json and sys.stdin is not None and sys.stdin.isatty()
    if not text and not questions and not is_conversation:
        raise ConfigError("the prompt is empty; give --prompt-file, --question or text on standard input.")
    from unspool.evals.generate import load_generator

    generator = load_generator(
        model,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        chat=chat,
        beyond_context=beyond_context,
        rope=None if rope is None else read_rope(rope),
        context=context,
        device=device,
        backend=backend,
        url=url,
        model_name=model_name,
        endpoint=endpoint,
        timeout=timeout,
    )
    if is_conversation:
        generator.check(text)
        _converse(generator, text, stream)
        return
    questions = questions or [""]
    for each in questions:
        generator.check(text, each)
    answers = []
    for each in questions:
        if len(questions) > 1 and not as_json:
            typer.echo(f"> {each}")
        answers.append(_ask(generator, text, each, stream=stream and not as_json, quiet=as_json))
    if as_json:
        print_json({"model": model, "answers": [asdict(answer) for answer in answers]})


def _read_text(prompt_file: str | None) -> str:
    """Read the text to ask about, without the newline that ends a file; empty if there is none."""
    if prompt_file is None or prompt_file == STDIN:
        if sys.stdin is None or (sys.stdin.isatty() and prompt_file is None):
            return ""
        if not _is_ready():
            logger.info("reading the text from standard input, up to its end")
        name, content = "standard input", sys.stdin.buffer.read()
        if prompt_file is None and not content.strip():
            return ""
    else:
        if _has_piped_text():
            raise ConfigError(
                "--prompt-file and standard input both give a text; give one of them, and ask with --question."
            )
        path = expand_home(prompt_file)
        if not path.exists():
            raise ConfigError(f"--prompt-file {prompt_file}: there is no such file; correct the path.")
        name, content = prompt_file, path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text (byte {error.start}); convert it, for example with iconv.") from None
    if not text.strip():
        raise ConfigError(f"{name} is empty; give a file with text.")
    return text.removesuffix("\n").removesuffix("\r")


def _has_piped_text() -> bool:
    """Whether text waits on standard input; does not wait for it, since the input may stay open and empty."""
    return sys.stdin is not None and not sys.stdin.isatty() and _is_ready() and bool(sys.stdin.buffer.read(1))


def _is_ready() -> bool:
    """Whether reading from standard input would not wait."""
    try:
        return bool(select.select([sys.stdin], [], [], 0)[0])
    except (OSError, ValueError):
        return True  # a stream without a file descriptor


def _converse(generator: "TextGenerator", text: str, stream: bool) -> None:
    """Answer one question per line until the input ends."""
    logger.info("Ask one question per line; Ctrl-C stops an answer, Ctrl-D ends.")
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print()
            return
        if not line.strip():
            continue
        try:
            _ask(generator, text, line.strip(), stream=stream)
        except KeyboardInterrupt:
            print()
        except ConfigError as error:
            # Such as a question that exceeds the context; the next may be shorter.
            logger.error(f"error: {error}")


def _ask(generator: "TextGenerator", text: str, question: str, *, stream: bool, quiet: bool = False) -> "TextAnswer":
    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    answer = generator.ask(text, question, on_text=show if stream else lambda piece: None)
    if not quiet:
        print("" if stream else answer.text)
    if answer.dropped_tokens:
        logger.warning(f"dropped {answer.dropped_tokens:,} tokens from the middle of the text to fit the context")
    reused = f" ({answer.cached_tokens:,} from the prompt cache)" if answer.cached_tokens else ""
    logger.info(
        f"{answer.prompt_tokens:,} prompt tokens{reused}, first token after {answer.seconds_to_first_token:.1f} s, "
        f"{answer.answer_tokens:,} answer tokens in {answer.seconds:.1f} s"
    )
    return answer
