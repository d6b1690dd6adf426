"""`unspool eval`: score one model by context length."""

from pathlib import Path
from typing import Annotated

import typer

from unspool.cli.eval_options import page_file, print_parity, read_rate, read_rope, read_settings, show_results
from unspool.core.errors import ConfigError
from unspool.evals.backends.base import BACKENDS
from unspool.evals.eval_request import SHORT, EvalRequest, EvalSettings, check_request
from unspool.evals.suites import SUITES

BUDGET = "10m"


def eval_(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, .gguf file, Hub id or asset:NAME.")],
    suite: Annotated[
        str | None,
        typer.Option(
            help=f"Suites to run, comma-separated: {', '.join(SUITES)}. Default: find the effective length; with "
            "--lengths, niah, key_value and, if the backend computes losses, perplexity."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Context lengths in tokens, comma-separated. Default: powers of two up to the claimed context; "
            "with --suite, the preset's lengths, or 2K,8K."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help=f"Time for finding the effective length, such as 90s or 2h. Default: {BUDGET}. A larger budget "
            "adds to the earlier answers."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="A paper's settings for one suite: utk (lveval, short), prolong (helmet, short). Options override it."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Questions per suite (or task) and length; windows for perplexity. Default: 20; for short "
            "all; without a suite at most 40.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of the suite, comma-separated; for short also NAME:SHOTS. Default: all."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="Mode: fixed, or reference (the suite's own code, including its defects). Default: fixed; with "
            "--reference, reference."
        ),
    ] = None,
    chat: Annotated[
        str | None, typer.Option(help="Use the chat template: auto, on or off. Default: the preset's value, or auto.")
    ] = None,
    paths: Annotated[
        list[str] | None, typer.Option("--path", help="NAME=PATH of data that a suite reads. Repeatable.")
    ] = None,
    wording: Annotated[
        str | None, typer.Option(help="YAML or JSON file with other instructions for the suite's tasks.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Your clone of the benchmark's public repository, or prompt files that its scripts wrote: scores "
            "become comparable with published ones."
        ),
    ] = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens reserved per answer, within the length. Default: the task's number."
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Adaptation rate: TARGET/REFERENCE, two of --lengths. Default: 128K/32K if both are scored, else the "
            "longest over the shortest."
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Held-out text: files or a pattern, JSONL or plain. Default: a bundled book."),
    ] = None,
    value: Annotated[
        str | None, typer.Option(help="Kind of value to recall: words, numbers (niah) or uuid (key_value).")
    ] = None,
    suite_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another key of the suite's entry in a recipe, such as wordings=all or distractors=0,3. Repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for samples.jsonl and summary.json; a killed run resumes from it. Default: none; "
            "without a suite, scores/MODEL."
        ),
    ] = None,
    rope: Annotated[
        str | None,
        typer.Option(help="Apply another RoPE method without training: yarn, ntk, …, or '{method: abf, base: 8e6}'."),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Context length for --rope. Default: the longest of --lengths.")
    ] = None,
    beyond_context: Annotated[
        str | None,
        typer.Option(
            help="For questions longer than the model's context: skip, truncate (cut the middle) or ask (send "
            "unchanged). Default: ask; on a server, skip."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the prompts.")] = 0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of processes, one GPU each if there are enough.")
    ] = 1,
    backend: Annotated[
        str, typer.Option(help=f"One of {', '.join(BACKENDS)}. openai is any server; the last three are mocks.")
    ] = "transformers",
    url: Annotated[str | None, typer.Option(help="Address of the server, such as http://localhost:8000/v1.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name of the model on the server. Default: MODEL.")] = None,
    endpoint: Annotated[
        str,
        typer.Option(
            help="completions (sends token ids), text (completions with text) or chat; auto takes the first of these "
            "that the server answers."
        ),
    ] = "auto",
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Concurrent requests to the server.")] = 8,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Seconds to wait for the server's answer.")
    ] = 600,
    sandboxed: Annotated[
        bool,
        typer.Option(
            "--sandboxed",
            help="This machine is a sandbox: run code that the model writes (short: humaneval, mbpp).",
        ),
    ] = False,
    parity: Annotated[
        bool, typer.Option("--parity", help="Compare 20 answers of --backend with answers of transformers, and exit.")
    ] = False,
    lm_eval: Annotated[
        Path | None, typer.Option(help="Write the suites as lm-eval tasks into this folder, and exit.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="Also write the report page: an .html file, or a folder for it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Find out how long a model's context really is, or score it by suite and length.

    Without --suite and --lengths, the model is tested with a few questions
    of three kinds at doubling lengths up to its claimed context, within
    --budget. The result is a table, a page with a chart, and the effective
    length: the longest length that keeps 85% of the score at short length.

        unspool eval MODEL

        unspool eval MODEL --budget 1h

        unspool eval TOKENIZER --backend openai --url http://localhost:8000/v1 --model-name NAME

    With --suite or --lengths, the command scores suites. niah hides a fact
    in a book and asks for it. key_value asks for values of a long JSON
    object. perplexity measures the loss by position on held-out text. ruler,
    helmet, lveval, infbench and nocha are published suites and report the
    effective length. graphwalks and indirect_needle ask questions that
    matching words cannot answer. longbench_v2, oolong and mrcr read your
    copy of the data (--path data=FILE). short runs lm-eval's tasks. Scores
    have n and a 95% interval. With 20 questions you can tell 50% from 90%,
    but not 50% from 60%.

        unspool eval MODEL --suite niah --lengths 256,1K,2K --value words

        unspool eval asset:tiny-base --suite niah --lengths 1K --samples 5

        unspool eval MODEL --suite niah --lengths 4K --set wordings=all --set distractors=0,3

        unspool eval MODEL --suite ruler --lengths 4K,32K --samples 100 --out scores/mine

        unspool eval MODEL --suite ruler --lengths 128K --processes 8

        unspool eval MODEL --suite niah --lengths 8K,32K --rope yarn

        unspool eval MODEL --suite short --tasks hellaswag,arc_challenge
    """
    settings: EvalSettings = {
        "samples": samples,
        "tasks": _names(tasks),
        "preset": preset,
        "mode": mode,
        "chat": chat,
        "paths": _paths(paths or []),
        "wording": wording,
        "reference": reference,
        "answer_tokens": answer_tokens,
        **read_rate(rate),
        "text": text,
        "value": value,
        "rope": None if rope is None else read_rope(rope),
        "context": context,
        "beyond_context": beyond_context,
        "seed": seed,
        "device": device,
        "processes": processes,
        "backend": backend,
        "url": url,
        "model_name": model_name,
        "endpoint": endpoint,
        "requests": requests,
        "timeout": timeout,
        "sandboxed": sandboxed,
        "budget": budget,
        "suite_settings": read_settings(suite_settings or [], example="wordings=all"),
    }
    suites, sizes = (None if given is None else _names(given) for given in (suite, lengths))
    if lm_eval is not None:
        request = check_request(model, suites, sizes, settings, may_look=False)
        _check_lm_eval(request, processes, html)
        from unspool.reporting.evaluate import write_lm_eval_tasks

        names = write_lm_eval_tasks(request, lm_eval)
        typer.echo(f"lm-eval run --include_path {lm_eval} --tasks {','.join(names)}")
        return
    check_request(model, suites, sizes, settings, may_look=not parity)  # before torch is loaded
    if parity and html is not None:
        raise ConfigError("--html cannot be combined with --parity, which compares answers and scores nothing.")
    page = None if html is None else page_file(html)
    from unspool.reporting.evaluate import compare_with_transformers, evaluate

    if parity:
        print_parity(compare_with_transformers(model, suites, sizes, **settings), as_json)
        return
    show_results(evaluate(model, suites, sizes, out=out, **settings), as_json=as_json, page=page, kept=out is not None)


def _check_lm_eval(request: EvalRequest, processes: int, html: Path | None) -> None:
    if request.is_short:
        raise ConfigError(f"--lm-eval writes long tasks for lm-eval; the tasks of --suite {SHORT} are its own.")
    if request.rope is not None:
        raise ConfigError("--rope cannot be combined with --lm-eval, which writes tasks for any model.")
    if processes > 1:
        raise ConfigError("--processes cannot be combined with --lm-eval, which only writes tasks.")
    if html is not None:
        raise ConfigError("--html cannot be combined with --lm-eval, which only writes tasks.")


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _paths(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--path {text!r}: write NAME=PATH, such as --path haystack=essays.txt.")
        found[name] = path
    return found
