"""`unspool eval`: how well one model uses its context, as a table or as JSON."""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.eval_options import print_table
from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.core.sizes import parse_size
from unspool.evals.config import (
    Eval,
    HelmetEval,
    InfbenchEval,
    KeyValueEval,
    LvEval,
    NiahEval,
    NochaEval,
    PerplexityEval,
    RulerEval,
    TaskEval,
    WordedEval,
)
from unspool.recipe.paths import resolve_path

if TYPE_CHECKING:
    import torch

    from unspool.evals.backends.base import Backend, Stretch

# Which suites know which kind of value.
VALUES = {"numbers": {"niah"}, "uuid": {"key_value"}, "words": {"niah", "key_value"}}
DEVICES = ("auto", "cpu", "cuda")
TASK_SUITES: dict[str, type[TaskEval]] = {
    "ruler": RulerEval,
    "helmet": HelmetEval,
    "lveval": LvEval,
    "infbench": InfbenchEval,
    "nocha": NochaEval,
}
SUITES: dict[str, Any] = {"niah": NiahEval, "key_value": KeyValueEval, "perplexity": PerplexityEval, **TASK_SUITES}
WORDED = tuple(name for name, entry in TASK_SUITES.items() if issubclass(entry, WordedEval))
SHORT = "short"
BACKENDS = ("transformers", "vllm", "openai", "oracle", "empty", "adversarial")
ENDPOINTS = ("completions", "chat", "text")
FAILED = 1
SAMPLES = 20


def eval_(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, a .gguf file, a Hub id or asset:NAME.")
    ],
    suite: Annotated[
        str, typer.Option(help=f"What to measure, comma-separated: {', '.join(SUITES)}; or {SHORT}.")
    ] = "niah,key_value,perplexity",
    lengths: Annotated[str, typer.Option(help="Context lengths in tokens, comma-separated.")] = "2K,8K",
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Questions per suite (or task) and length, windows for loss: 20 by default; short: all."
        ),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of the suite, comma-separated; all by default.")] = None,
    mode: Annotated[
        str, typer.Option(help="fixed, or reference: as the suite's own code does, defects included.")
    ] = "fixed",
    chat: Annotated[str, typer.Option(help="auto, on or off: whether to ask through the chat template.")] = "auto",
    path: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH of data that a suite reads; may be given several times.")
    ] = None,
    wording: Annotated[
        str | None, typer.Option(help="YAML or JSON file with the words of the suite's tasks, such as a paper's own.")
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="Room for every answer, within the length; each task's own by default.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Held-out text files or a pattern (JSONL or plain); a shipped book by default."),
    ] = None,
    value: Annotated[
        str | None, typer.Option(help="What is to be recalled: words, numbers (niah) or uuid (key_value).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep samples.jsonl and summary.json here; a killed run then goes on.")
    ] = None,
    rope: Annotated[
        str | None,
        typer.Option(help="Other positions, without training: yarn, ntk, …, or '{method: abf, base: 8e6}'."),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens that --rope is to reach; the longest of --lengths by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Other seeds give other prompts.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    processes: Annotated[
        int, typer.Option(min=1, help="Answer in so many processes, each on a GPU of its own if there are enough.")
    ] = 1,
    backend: Annotated[
        str, typer.Option(help="transformers, vllm or openai (a server); oracle, empty and adversarial pretend.")
    ] = "transformers",
    url: Annotated[str | None, typer.Option(help="Of the server, such as http://localhost:8000/v1.")] = None,
    model_name: Annotated[str | None, typer.Option(help="What the server calls the model; MODEL by default.")] = None,
    endpoint: Annotated[
        str, typer.Option(help="completions (token ids), text (completions with words) or chat.")
    ] = "completions",
    requests: Annotated[int, typer.Option(min=1, help="Requests to the server at a time.")] = 8,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one answer of the server.")] = 600,
    parity: Annotated[
        bool,
        typer.Option("--parity", help="Compare the answers of --backend with those of transformers, on 20 prompts."),
    ] = False,
    lm_eval: Annotated[
        Path | None, typer.Option(help="Run nothing, but write the suites' tasks into this folder as tasks of lm-eval.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Score a model by context length.

    niah hides a fact in a book and asks for it; key_value asks for values of a
    long JSON object; perplexity shows whether text is still predicted better
    further on in the context. ruler, helmet, lveval, infbench and nocha
    are the suites of the papers, and say up to which length the model
    holds; short runs lm-eval's tasks. Scores come with n and a 95%
    interval: 20 questions tell 50% from 90%, but not from 60%.

        unspool eval MODEL --suite niah --lengths 256,1K,2K --value words

        unspool eval asset:tiny-base --suite niah --lengths 1K --samples 5

        unspool eval MODEL --suite ruler --lengths 4K,32K --samples 100 --out scores/mine

        unspool eval MODEL --suite ruler --lengths 128K --processes 8   # eight GPUs

        unspool eval MODEL --suite niah --lengths 8K,32K --rope yarn

        unspool eval MODEL --suite short --tasks hellaswag,arc_challenge
    """
    model = resolve_path(model, Path())
    stretch = _stretch(rope, context, None if suite.strip() == SHORT else lengths)
    if suite.strip() == SHORT:
        if processes > 1:
            raise ConfigError(f"--suite {SHORT} runs lm-eval in one process; leave --processes out.")
        _short(
            model,
            tasks,
            stretch=stretch,
            samples=samples,
            include=_paths(path or []).get("tasks"),
            device=device,
            out=out,
            as_json=as_json,
        )
        return
    options = {
        "tasks": [name.strip() for name in (tasks or "").split(",") if name.strip()],
        "mode": mode,
        "chat": chat,
        "paths": _paths(path or []),
        "wording": wording,
        "answer_tokens": answer_tokens,
    }
    evals = chosen_evals(suite, lengths, samples=samples or SAMPLES, text=text, value=value, options=options)
    if backend not in BACKENDS:
        raise ConfigError(f"--backend {backend!r} is not known; use {', '.join(BACKENDS)}.")
    # Here and not above: torch and transformers take seconds to import, which `--help` should not.
    from unspool.evals.backends.pick import Choice, pick

    choice = Choice(
        kind=backend,
        model=model,
        url=url,
        model_name=model_name,
        endpoint=lookup({name: name for name in ENDPOINTS}, endpoint, kind="--endpoint"),
        requests=requests,
        timeout=timeout,
        stretch=stretch,
        processes=processes,
    )
    if lm_eval is not None:
        if stretch is not None:
            raise ConfigError("--lm-eval writes tasks for any model, so --rope has no part in it; leave it out.")
        if processes > 1:
            raise ConfigError("--lm-eval only writes tasks and answers nothing; leave --processes out.")
        _write_tasks(model, evals, seed, lm_eval)
        return
    target, dtype = device_and_dtype(device)
    chosen = pick(choice, device=target, dtype=dtype)
    if parity:
        _parity(
            chosen,
            pick(Choice(kind="transformers", model=model, stretch=stretch), device=target, dtype=dtype),
            evals,
            seed,
            as_json,
        )
        return
    name = Path(model).name or model
    name = name if stretch is None else stretch.name_of(name)
    if out is not None:
        _check_out(out)
        summary = _score(choice.identity, chosen, name, evals, out, seed=seed)
    else:
        with tempfile.TemporaryDirectory() as folder:
            summary = _score(choice.identity, chosen, name, evals, Path(folder) / "scores", seed=seed)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    else:
        print_table(summary)


def chosen_evals(
    suites: str,
    lengths: str,
    *,
    samples: int,
    text: str | None,
    value: str | None,
    options: dict[str, Any] | None = None,
) -> list[Eval]:
    """The evals of a recipe that the options stand for; `options` are of suites that consist of tasks."""
    names = list(dict.fromkeys(name.strip() for name in suites.split(",") if name.strip()))
    sizes = _lengths(lengths)
    if not names or not sizes:
        raise ConfigError("eval needs at least one suite and one length, such as --suite niah --lengths 2K,8K.")
    for name in names:
        lookup(SUITES, name, kind="--suite")
    takers = lookup(VALUES, value, kind="--value") if value else set()
    if value and not takers & set(names):
        raise ConfigError(f"--value {value} is for {' and '.join(sorted(takers))}; the suites here are {suites}.")
    if (options or {}).get("tasks") and len(TASK_SUITES.keys() & set(names)) != 1:
        raise ConfigError(f"--tasks needs exactly one suite that has tasks: {', '.join(TASK_SUITES)} or {SHORT}.")
    if (options or {}).get("wording") and [name for name in names if name in TASK_SUITES] not in [[n] for n in WORDED]:
        raise ConfigError(f"--wording is for one suite at a time, of these: {', '.join(WORDED)}.")
    return [_eval(name, sizes, samples, text, value if name in takers else None, options or {}) for name in names]


def _eval(
    name: str, lengths: list[int], samples: int, text: str | None, value: str | None, options: dict[str, Any]
) -> Eval:
    given: dict[str, Any] = {"suite": name, "samples": samples}
    if name in TASK_SUITES:
        for key, allowed in (("mode", ("fixed", "reference")), ("chat", ("auto", "on", "off"))):
            if options.get(key, allowed[0]) not in allowed:
                raise ConfigError(f"--{key} {options[key]!r} is not known; use {', '.join(allowed)}.")
        said = {key: option for key, option in options.items() if key != "wording" or option is not None}
        chosen: Any = TASK_SUITES[name].model_validate({**given, **said, "lengths": lengths})
        return chosen  # type: ignore[no-any-return]
    if value:
        given["value"] = value
    if name == "key_value":
        return KeyValueEval(**given, lengths=lengths)
    if name == "niah":
        return NiahEval(**given, lengths=lengths, text=text)
    # Its ranges of positions cover the shorter lengths.
    return PerplexityEval(**given, length=lengths[-1], text=text)


def _lengths(text: str) -> list[int]:
    return sorted({_length(length, "--lengths") for length in text.split(",") if length.strip()})


def _length(text: str, option: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text.strip()!r}: {error}.") from error


def _stretch(rope: str | None, context: str | None, lengths: str | None) -> "Stretch | None":
    if rope is None:
        if context is not None:
            raise ConfigError("--context says what --rope is to reach; give --rope too, such as yarn.")
        return None
    from unspool.cli.eval_options import read_rope
    from unspool.evals.backends.base import Stretch

    if context is not None:
        reach = _length(context, "--context")
    elif lengths is not None:
        reach = max(_lengths(lengths), default=0)
    else:
        raise ConfigError(f"--suite {SHORT} has no lengths, so --rope needs the tokens to reach: --context 32K.")
    return Stretch(rope=read_rope(rope), context_length=reach)


def _paths(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--path {text!r}: write NAME=PATH, such as --path haystack=essays.txt.")
        found[name] = path
    return found


def _check_out(out_dir: Path) -> None:
    """Scores replace their folder whole, so it must not hold anything else."""
    from unspool.core.artifacts import read_manifest

    if not out_dir.exists():
        return
    holds_scores = (read_manifest(out_dir) or {}).get("kind") == "scores"
    if not out_dir.is_dir() or (any(out_dir.iterdir()) and not holds_scores):
        raise ConfigError(f"--out {out_dir} exists and holds no scores; give a new folder, so that nothing is lost.")


def _score(
    identity: str, backend: "Backend", name: str, evals: list[Eval], out_dir: Path, *, seed: int
) -> dict[str, Any]:
    from unspool.evals.run import Scoring, score

    return score(
        Scoring(model=name, model_hash=identity, evals=evals, seed=seed, out_dir=out_dir, root=Path.cwd()), backend
    )


def _parity(first: "Backend", second: "Backend", evals: list[Eval], seed: int, as_json: bool) -> None:
    from unspool.evals.backends.openai import plain
    from unspool.evals.backends.pick import compare
    from unspool.evals.contexts import Plan, runnable

    found = compare(Plan(runnable(evals), first.tokenizer, seed=seed, root=Path.cwd()), first, second)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
    else:
        typer.echo(f"{found.equal} of {found.n} answers are equal.")
        for one in found.differences[:1]:
            typer.echo(f"First difference: {one.name}, question {one.index}, character {one.at}:")
            typer.echo(f"  {plain(one.first)!r}\n  {plain(one.second)!r}")
    if found.differences:
        raise typer.Exit(FAILED)


def _write_tasks(model: str, evals: list[Eval], seed: int, out_dir: Path) -> None:
    from unspool.evals.contexts import Plan, runnable
    from unspool.evals.suites.short import write_tasks
    from unspool.models.tokenizer import load_tokenizer

    if not all(isinstance(config, TaskEval) for config in evals):
        raise ConfigError(f"--lm-eval is for suites that have tasks: {', '.join(TASK_SUITES)}.")
    names = write_tasks(Plan(runnable(evals), load_tokenizer(model), seed=seed, root=Path.cwd()), out_dir)
    typer.echo(f"lm-eval run --include_path {out_dir} --tasks {','.join(names)}")


def _short(
    model: str,
    tasks: str | None,
    *,
    stretch: "Stretch | None",
    samples: int | None,
    include: str | None,
    device: str,
    out: Path | None,
    as_json: bool,
) -> None:
    from unspool.evals.suites.short import TASKS, run_short

    names = [name.strip() for name in tasks.split(",") if name.strip()] if tasks else list(TASKS)
    target, dtype = device_and_dtype(device)
    summary = run_short(model, names, samples=samples, include=include, device=target, dtype=dtype, stretch=stretch)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    else:
        print_table(summary)


def device_and_dtype(name: str) -> "tuple[torch.device, torch.dtype]":
    import torch

    if name not in DEVICES:
        raise ConfigError(f"--device {name!r} is not known; use {', '.join(DEVICES)}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu.")
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
