"""`unspool eval`: score one model by context length."""

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import ValidationError

from unspool.cli.eval_look import BUDGET, LookOptions, look, refuse_options
from unspool.cli.eval_options import check_folder, compare_answers, page_file, preset_lengths, read_rate, show_results
from unspool.core.artifacts import write_atomic
from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.core.lock import lock_output
from unspool.core.sizes import parse_size
from unspool.evals.backends.base import BACKENDS, BackendOptions, RopeOverride, build_backend
from unspool.evals.beyond_context import DONE
from unspool.evals.config import EvalConfig
from unspool.evals.suites import SUITES
from unspool.models.location import short_name
from unspool.recipe.paths import model_path

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")
TASK_SUITES = tuple(name for name, suite in SUITES.items() if suite.tasks)
SHORT = "short"
SHORT_BACKENDS = ("transformers", "openai")
ENDPOINTS = ("auto", "completions", "text", "chat")
DEFAULT_SUITES = "niah,key_value,perplexity"
SAMPLES = 20


def eval_(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, .gguf file, Hub id or asset:NAME.")],
    suite: Annotated[
        str | None,
        typer.Option(
            help=f"Suites to run, comma-separated: {', '.join(SUITES)} [default: find the effective "
            "length; with --lengths niah, key_value and, where the backend computes losses, perplexity]."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Context lengths in tokens, comma-separated [default: doubled up to the claimed context; with --suite "
            "the preset's, or 2K,8K]."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help=f"Time for finding the effective length, such as 90s, 10m or 2h [default: {BUDGET}]; a greater one "
            "adds to earlier answers."
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
            help="Questions per suite (or task) and length, windows for perplexity [default: 20; short: all; without a "
            "suite up to 40].",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of the suite, comma-separated [default: all]; of short also NAME:SHOTS."),
    ] = None,
    mode: Annotated[
        str, typer.Option(help="fixed, or reference: follow the suite's own code, defects included.")
    ] = "fixed",
    chat: Annotated[
        str | None, typer.Option(help="Use the chat template: auto, on or off [default: the preset's, or auto].")
    ] = None,
    path: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH of data that a suite reads; repeat for several.")
    ] = None,
    wording: Annotated[
        str | None, typer.Option(help="YAML or JSON file with other instructions for the suite's tasks.")
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per answer, counted in the length [default: each task's own].")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Adaptation rate: TARGET/REFERENCE, of --lengths [default: 128K/32K if both are scored, else the "
            "longest over the shortest]."
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Held-out text: files or a pattern, JSONL or plain [default: a bundled book]."),
    ] = None,
    value: Annotated[
        str | None, typer.Option(help="Kind of value to recall: words, numbers (niah) or uuid (key_value).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for samples.jsonl and summary.json; a killed run resumes from it [default: none; without a "
            "suite scores/MODEL]."
        ),
    ] = None,
    rope: Annotated[
        str | None,
        typer.Option(help="Apply another RoPE method without training: yarn, ntk, …, or '{method: abf, base: 8e6}'."),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Context length for --rope [default: the longest of --lengths].")
    ] = None,
    beyond_context: Annotated[
        str | None,
        typer.Option(
            help="Questions longer than the model's context: skip, truncate (cut the middle of the text) or ask "
            "[default: ask; skip on a server]."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the prompts.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes that answer, one GPU each if there are enough.")
    ] = 1,
    backend: Annotated[
        str, typer.Option(help=f"What answers: {', '.join(BACKENDS)}; openai is any server, the last three are mocks.")
    ] = "transformers",
    url: Annotated[str | None, typer.Option(help="Address of the server, such as http://localhost:8000/v1.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name of the model on the server [default: MODEL].")] = None,
    endpoint: Annotated[
        str,
        typer.Option(
            help="completions (sends token ids), text (completions with text) or chat; auto takes the first of these "
            "that the server answers."
        ),
    ] = "auto",
    requests: Annotated[int, typer.Option(min=1, help="Concurrent requests to the server.")] = 8,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for an answer of the server.")] = 600,
    sandboxed: Annotated[
        bool,
        typer.Option(
            "--sandboxed",
            help="This machine is a sandbox: run code that the model writes (short: humaneval, mbpp).",
        ),
    ] = False,
    parity: Annotated[
        bool, typer.Option("--parity", help="Compare 20 answers of --backend with those of transformers, and exit.")
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

    Without --suite and --lengths, a few questions of three kinds are asked
    at doubling lengths up to the claimed context, within --budget. The
    result is a table, a page with a chart, and the effective length: the
    longest length at which 85% of the score at short length is kept.

        unspool eval MODEL

        unspool eval MODEL --budget 1h

        unspool eval TOKENIZER --backend openai --url http://localhost:8000/v1 --model-name NAME

    With them, suites are scored. niah hides a fact in a book and asks for
    it. key_value asks for values of a long JSON object. perplexity measures the loss by position on
    held-out text. ruler, helmet, lveval, infbench and nocha are published
    suites and report the effective length. short runs lm-eval's tasks.
    Scores have n and a 95% interval. With 20 questions you can tell 50%
    from 90%, but not 50% from 60%.

        unspool eval MODEL --suite niah --lengths 256,1K,2K --value words

        unspool eval asset:tiny-base --suite niah --lengths 1K --samples 5

        unspool eval MODEL --suite ruler --lengths 4K,32K --samples 100 --out scores/mine

        unspool eval MODEL --suite ruler --lengths 128K --processes 8   # eight GPUs

        unspool eval MODEL --suite niah --lengths 8K,32K --rope yarn

        unspool eval MODEL --suite short --tasks hellaswag,arc_challenge
    """
    model = model_path(model, Path())
    is_short = (suite or "").strip() == SHORT
    is_look = suite is None and lengths is None and not parity and lm_eval is None
    if is_look:
        taken = {"tasks": tasks, "path": path, "wording": wording, "answer-tokens": answer_tokens, "value": value}
        taken |= {"preset": preset}
        refuse_options(taken | {"beyond-context": beyond_context})
    elif budget is not None:
        raise ConfigError("--budget is for eval without --suite and --lengths; set the work by --samples instead.")
    lengths = lengths or preset_lengths(suite or DEFAULT_SUITES, preset)
    override = rope_override(rope, context, None if is_short or is_look else lengths)
    paths = _paths(path or [])
    lookup(BACKENDS, backend, kind="--backend")
    lookup({name: name for name in ENDPOINTS}, endpoint, kind="--endpoint")
    if beyond_context is not None:
        lookup(DONE, beyond_context, kind="--beyond-context")
    if is_short and processes > 1:
        raise ConfigError(f"--suite {SHORT} runs lm-eval in one process; leave --processes out.")
    if is_short and backend not in SHORT_BACKENDS:
        raise ConfigError(
            f"--suite {SHORT} runs with --backend {' or '.join(SHORT_BACKENDS)} only; the backend here is {backend}."
        )
    if is_short and beyond_context is not None:
        raise ConfigError(
            f"--beyond-context has no effect on --suite {SHORT}, whose questions are short; leave it out."
        )
    evals = (
        []
        if is_short
        else chosen_evals(
            suite or DEFAULT_SUITES,
            lengths,
            preset=preset,
            samples=samples or SAMPLES,
            text=text,
            value=value,
            tasks=_names(tasks),
            mode=mode,
            chat=chat,
            paths=paths,
            wording=wording,
            answer_tokens=answer_tokens,
            **read_rate(rate),
            beyond_context=beyond_context,
        )
    )
    if lm_eval is not None:
        if is_short:
            raise ConfigError(f"--lm-eval writes long tasks for lm-eval; the tasks of --suite {SHORT} are its own.")
        if override is not None:
            raise ConfigError("--rope cannot be combined with --lm-eval, which writes tasks for any model.")
        if processes > 1:
            raise ConfigError("--processes cannot be combined with --lm-eval, which only writes tasks.")
        if html is not None:
            raise ConfigError("--html cannot be combined with --lm-eval, which only writes tasks.")
        _write_tasks(model, evals, seed, lm_eval)
        return
    target, dtype = device_and_dtype(device)
    options = BackendOptions(
        kind=backend,
        model=model,
        url=url,
        model_name=model_name,
        endpoint=endpoint,
        requests=requests,
        timeout=timeout,
        rope=override,
        processes=processes,
        device=target,
        dtype=dtype,
    )
    if parity and html is not None:
        raise ConfigError("--html cannot be combined with --parity, which compares answers and scores nothing.")
    page = None if html is None else page_file(html)
    if is_short:
        with tempfile.TemporaryDirectory() as folder, nullcontext() if out is None else lock_output(out):
            scores = out or Path(folder) / "short"
            summary = _score_short(
                options,
                _names(tasks),
                preset,
                samples=samples,
                include=paths.get("tasks"),
                sandboxed=sandboxed,
                out=scores,
            )
            show_results(summary, scores, as_json=as_json, page=page, kept=out is not None)
        return
    chosen = build_backend(options)
    if is_look:
        scope = LookOptions(budget=budget, samples=samples, text=text, seed=seed, out=out, page=page, as_json=as_json)
        look(short_name(model), options, chosen, scope)
        return
    from unspool.evals.run import Scoring, recorded_backend, score

    chosen.connect(None if out is None or parity else recorded_backend(out))
    if suite is None and not chosen.has_losses:
        evals = [config for config in evals if not SUITES[config.suite].needs_losses]
    if parity:
        ours = BackendOptions(model=model, rope=override, device=target, dtype=dtype)
        compare_answers(chosen, build_backend(ours), evals, seed, as_json)
        return
    name = short_name(model)
    with tempfile.TemporaryDirectory() as folder, nullcontext() if out is None else lock_output(out):
        if out is not None:
            check_folder(out)
        scoring = Scoring(
            model=name if override is None else override.name_of(name),
            model_hash=options.identity,
            evals=evals,
            seed=seed,
            out_dir=out or Path(folder) / Path(name).name,
            root=Path.cwd(),
        )
        summary = score(scoring, chosen)
        show_results(summary, scoring.out_dir, as_json=as_json, page=page, kept=out is not None)


def chosen_evals(suites: str, lengths: str, **options: Any) -> list[EvalConfig]:
    """Build the entries of `evals` that the options stand for: every suite gets those that its config class has."""
    names, sizes = list(dict.fromkeys(_names(suites))), _lengths(lengths)
    if not names or not sizes:
        raise ConfigError("eval needs at least one suite and one length, such as --suite niah --lengths 2K,8K.")
    chosen = {name: lookup(SUITES, name, kind="--suite") for name in names}
    with_tasks = [name for name, suite in chosen.items() if suite.tasks]
    if options.get("tasks") and len(with_tasks) != 1:
        raise ConfigError(f"--tasks needs exactly one suite that has tasks: {', '.join(TASK_SUITES)} or {SHORT}.")
    worded = [name for name, suite in SUITES.items() if "wording" in suite.config.model_fields]
    if options.get("wording") and with_tasks not in [[name] for name in worded]:
        raise ConfigError(f"--wording is for one suite at a time, of these: {', '.join(worded)}.")
    value = options.pop("value", None)
    takers = lookup(_suites_by_value(), value, kind="--value") if value else []
    if value and not set(takers) & set(names):
        raise ConfigError(f"--value {value} is for {' and '.join(sorted(takers))}; the suites here are {suites}.")
    return [_entry(name, sizes, options | ({"value": value} if name in takers else {})) for name in names]


def _suites_by_value() -> dict[str, list[str]]:
    """Which suites know which kind of --value."""
    found: dict[str, list[str]] = {}
    for name, suite in SUITES.items():
        for value in _choices(suite.config, "value"):
            found.setdefault(value, []).append(name)
    return found


def _choices(config: type[EvalConfig], key: str) -> tuple[str, ...]:
    """The values that a key of a config class may have; none where it is missing or free."""
    found = config.model_fields.get(key)
    return get_args(found.annotation) if found is not None and get_origin(found.annotation) is Literal else ()


def _entry(name: str, lengths: list[int], options: dict[str, Any]) -> EvalConfig:
    config = SUITES[name].config
    for key, value in options.items():
        allowed = _choices(config, key)
        if allowed and value is not None and value not in allowed:
            raise ConfigError(f"--{key} {value!r} is not known; use {', '.join(allowed)}.")
    # A suite with one length measures at all positions up to it.
    known = {"lengths": lengths, "length": lengths[-1], **options}
    # What is not given is left to the preset or the default.
    given = {key: value for key, value in known.items() if key in config.model_fields and value not in (None, [], {})}
    if known.get("preset") and "preset" not in config.model_fields:
        raise ConfigError(f"--preset: the suite {name} has none.")
    try:
        return config.model_validate({"suite": name, **given})
    except ValidationError as error:
        found = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
        raise ConfigError(f"--suite {name}: {'; '.join(found)}.") from error


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _lengths(text: str) -> list[int]:
    return sorted({_length(length, "--lengths") for length in text.split(",") if length.strip()})


def _length(text: str, option: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text.strip()!r}: {error}.") from error


def rope_override(rope: str | None, context: str | None, lengths: str | None) -> RopeOverride | None:
    if rope is None:
        if context is not None:
            raise ConfigError("--context is the length that --rope shall reach; give --rope too, such as yarn.")
        return None
    from unspool.cli.eval_options import read_rope

    if context is not None:
        reach = _length(context, "--context")
    elif lengths is not None:
        reach = max(_lengths(lengths), default=0)
    else:
        raise ConfigError("without --lengths, --rope needs the context length to reach: --context 32K.")
    return RopeOverride(rope=read_rope(rope), context_length=reach)


def _paths(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--path {text!r}: write NAME=PATH, such as --path haystack=essays.txt.")
        found[name] = path
    return found


def _write_tasks(model: str, evals: list[EvalConfig], seed: int, out_dir: Path) -> None:
    from unspool.evals.eval_plan import EvalPlan
    from unspool.evals.suites.short import write_tasks
    from unspool.models.tokenizer import load_tokenizer

    if not all(SUITES[config.suite].tasks for config in evals):
        raise ConfigError(f"--lm-eval is for suites that have tasks: {', '.join(TASK_SUITES)}.")
    names = write_tasks(EvalPlan(evals, load_tokenizer(model), seed=seed, root=Path.cwd()), out_dir)
    typer.echo(f"lm-eval run --include_path {out_dir} --tasks {','.join(names)}")


def _score_short(
    options: BackendOptions,
    tasks: list[str],
    preset: str | None,
    *,
    samples: int | None,
    include: str | None,
    sandboxed: bool,
    out: Path,
) -> dict[str, Any]:
    from unspool.evals.suites.short import run_short
    from unspool.evals.suites.short_suite import chosen_tasks

    names = chosen_tasks(tasks, preset, sandboxed=sandboxed)
    summary = run_short(options, names, samples=samples, include=include, sandboxed=sandboxed)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def device_and_dtype(name: str) -> "tuple[torch.device, torch.dtype]":
    import torch

    if name not in DEVICES:
        raise ConfigError(f"--device {name!r} is not known; use {', '.join(DEVICES)}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu.")
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
