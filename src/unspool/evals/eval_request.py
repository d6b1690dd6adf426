"""Check the request for an evaluation before anything is loaded. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args, get_origin

from pydantic import ValidationError

from unspool.core.config import did_you_mean, lookup
from unspool.core.errors import ConfigError
from unspool.core.sizes import parse_size
from unspool.evals.averaged_run import run_model_path
from unspool.evals.backends.base import BACKENDS, BackendOptions, RopeOverride
from unspool.evals.beyond_context import DONE
from unspool.evals.config import EvalConfig
from unspool.evals.heldout import check_text
from unspool.evals.suite import Suite
from unspool.evals.suites import SUITES
from unspool.rope.tables import RopeMethod

TASK_SUITES = tuple(name for name, suite in SUITES.items() if suite.tasks)
SHORT = "short"
SHORT_BACKENDS = ("transformers", "openai")
ENDPOINTS = ("auto", "completions", "text", "chat")
DEFAULT_SUITES = ("niah", "key_value", "perplexity")
DEFAULT_LENGTHS = (2048, 8192)
SAMPLES = 20
# Settings that are passed to suites unchanged.
OF_SUITES = (
    *("preset", "text", "value", "mode", "chat", "paths", "wording", "answer_tokens", "beyond_context"),
    *("reference", "target_length", "reference_length"),
)

# Keys of entries that `suite_settings` cannot set.
NOT_FREE = {"suite", "lengths", "length", "after"}

Length = int | str


class EvalSettings(TypedDict, total=False):
    """Further settings of `unspool.evaluate`. Each has a default."""

    samples: int | None  # questions per suite (or task) and length, windows for perplexity; 20, for short all
    tasks: Sequence[str]  # of the suite; all by default
    preset: str | None  # a paper's settings for one suite: utk (lveval, short), prolong (helmet, short)
    mode: str | None  # fixed, or reference: follow the suite's own code, defects included
    chat: str | None  # use the chat template: auto, on or off
    paths: Mapping[str, str]  # data that a suite reads, by name
    wording: str | None  # YAML or JSON file with other instructions for the suite's tasks
    reference: str | None  # a clone of the benchmark's public repository, or prompt files that its scripts wrote
    answer_tokens: int | None  # tokens per answer, counted in the length; each task's own by default
    target_length: int | None  # adaptation rate: the score at this length ÷ that at reference_length
    reference_length: int | None
    text: str | None  # held-out text: files or a pattern, JSONL or plain; a bundled book by default
    value: str | None  # kind of value to recall: words, numbers (niah) or uuid (key_value)
    rope: RopeMethod | None  # another RoPE method, without training
    context: Length | None  # context length for `rope`; the longest of `lengths` by default
    beyond_context: str | None  # questions longer than the model's context: skip, truncate or ask
    seed: int  # of the prompts
    device: str  # auto, cpu or cuda
    processes: int  # number of processes; each uses its own GPU if there are enough
    backend: str  # transformers, vllm, openai (any server) or a mock
    url: str | None  # address of the server, such as http://localhost:8000/v1
    model_name: str | None  # name of the model on the server
    endpoint: str  # completions, text or chat; auto uses the first one that the server supports
    requests: int  # concurrent requests to the server
    timeout: float  # seconds to wait for an answer from the server
    sandboxed: bool  # run code that the model writes (short: humaneval, mbpp)
    budget: str | None  # time to measure the effective length, such as 90s, 10m or 2h
    suite_settings: Mapping[str, Any]  # further keys of the suites' entries in a recipe, such as {"needles": 4}


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """A checked evaluation."""

    model: str  # folder or Hub id
    evals: list[EvalConfig]  # empty for `short` and for measuring the effective length
    settings: EvalSettings
    rope: RopeOverride | None
    is_short: bool
    is_look: bool  # True if neither suite nor lengths are given: measure the effective length
    named_suites: bool

    @property
    def seed(self) -> int:
        return self.settings.get("seed", 0)

    def options(self) -> BackendOptions:
        """Options of the backend. Loads torch."""
        from unspool.models.extend import pick_device, pick_dtype

        given = self.settings
        device = pick_device(given.get("device", "auto"))
        return BackendOptions(
            kind=given.get("backend", "transformers"),
            model=self.model,
            url=given.get("url"),
            model_name=given.get("model_name"),
            endpoint=given.get("endpoint", "auto"),
            requests=given.get("requests", 8),
            timeout=given.get("timeout", 600),
            rope=self.rope,
            processes=given.get("processes", 1),
            device=device,
            dtype=pick_dtype(None, device),
        )


def check_request(
    model: str | Path,
    suite: str | Sequence[str] | None,
    lengths: Sequence[Length] | None,
    settings: EvalSettings,
    *,
    may_look: bool = True,
) -> EvalRequest:
    """Check everything that does not need a model. Raises ConfigError.

    With `may_look`, a request without suite and lengths measures the effective length.
    """
    given = dict(settings)
    suites = [suite] if isinstance(suite, str) else None if suite is None else list(suite)
    chosen = suites if suites is not None else list(DEFAULT_SUITES)
    for name in given:
        if name not in EvalSettings.__annotations__:
            raise ConfigError(_unknown_setting(name, chosen))
    ref = run_model_path(str(model), Path())
    is_short = suites == [SHORT]
    is_look = may_look and suite is None and lengths is None
    if is_look:
        of_suites = ("tasks", "paths", "wording", "answer_tokens", "value", "preset", "beyond_context", "reference")
        for name in (*of_suites, "suite_settings"):
            if given.get(name):
                raise ConfigError(
                    f"`{name}` needs `suite` or `lengths`; without them, the evaluation chooses the questions itself."
                )
    elif given.get("budget") is not None:
        raise ConfigError("`budget` works only without `suite` and `lengths`; use `samples` instead.")
    wanted = list(lengths) if lengths else _preset_lengths(chosen, settings.get("preset"))
    override = rope_override(
        settings.get("rope"), settings.get("context"), None if is_short or is_look else parse_lengths(wanted)
    )
    backend = settings.get("backend", "transformers")
    lookup(BACKENDS, backend, kind="`backend`")
    lookup({name: name for name in ENDPOINTS}, settings.get("endpoint", "auto"), kind="`endpoint`")
    beyond = settings.get("beyond_context")
    if beyond is not None:
        lookup(DONE, beyond, kind="`beyond_context`")
    if is_short and settings.get("processes", 1) > 1:
        raise ConfigError(f"`suite={SHORT!r}` runs lm-eval in one process; remove `processes`.")
    if is_short and backend not in SHORT_BACKENDS:
        raise ConfigError(f"`suite={SHORT!r}` supports only `backend` {' or '.join(SHORT_BACKENDS)}, not {backend}.")
    for name in ("beyond_context", "reference", "suite_settings"):
        if is_short and given.get(name):
            raise ConfigError(f"`{name}` has no effect on `suite={SHORT!r}`, which runs lm-eval tasks; remove it.")
    if settings.get("text"):
        check_text("text", str(settings["text"]))
    options = {key: given.get(key) for key in OF_SUITES}
    options |= {"samples": settings.get("samples") or SAMPLES, "tasks": list(settings.get("tasks") or [])}
    options["suite_settings"] = dict(settings.get("suite_settings") or {})
    evals = [] if is_short else chosen_evals(chosen, wanted, **options)
    return EvalRequest(
        model=ref,
        evals=evals,
        settings=settings,
        rope=override,
        is_short=is_short,
        is_look=is_look,
        named_suites=suites is not None,
    )


def _unknown_setting(name: str, suites: Sequence[str]) -> str:
    keys = {suite: SUITES[suite].config.model_fields for suite in suites if suite in SUITES}
    having = [suite for suite, known in keys.items() if name in known and name not in NOT_FREE]
    if having:
        return f"evaluate: {name!r} is a key of {' and '.join(having)}; pass it as `suite_settings={{{name!r}: ...}}`."
    return f"evaluate: unknown setting {name!r}{did_you_mean(name, EvalSettings.__annotations__)}"


def chosen_evals(suites: Sequence[str], lengths: Sequence[Length], **options: Any) -> list[EvalConfig]:
    """Build entries of `evals` from options. Every suite gets the options that its config class has."""
    names, sizes = list(dict.fromkeys(suites)), parse_lengths(lengths)
    if not names or not sizes:
        raise ConfigError("pass at least one suite and one length, such as `suite='niah', lengths=['2K', '8K']`.")
    chosen = {name: lookup(SUITES, name, kind="`suite`") for name in names}
    with_tasks = [name for name, suite in chosen.items() if suite.tasks]
    if options.get("tasks") and len(with_tasks) != 1:
        raise ConfigError(f"`tasks` needs exactly one suite with tasks: {', '.join(TASK_SUITES)} or {SHORT}.")
    for key in ("wording", "reference"):
        known = [name for name, suite in SUITES.items() if key in suite.config.model_fields]
        if options.get(key) and with_tasks not in [[name] for name in known]:
            raise ConfigError(f"`{key}` needs exactly one suite, one of: {', '.join(known)}.")
    own = options.pop("suite_settings", {})
    _check_suite_settings(own, chosen)
    value = options.pop("value", None)
    takers = lookup(_suites_by_value(), value, kind="`value`") if value else []
    if value and not set(takers) & set(names):
        raise ConfigError(
            f"`value={value!r}` works only with {' and '.join(sorted(takers))}, not with {', '.join(names)}."
        )
    return [_entry(name, sizes, options | ({"value": value} if name in takers else {}) | own) for name in names]


def _check_suite_settings(own: Mapping[str, Any], suites: Mapping[str, Suite]) -> None:
    """Refuse keys that no suite has, and keys that have their own argument."""
    known = {key for suite in suites.values() for key in suite.config.model_fields}
    free = known - set(EvalSettings.__annotations__) - NOT_FREE
    for key in own:
        if key not in known:
            raise ConfigError(f"`suite_settings`: {' and '.join(suites)} has no key {key!r}{did_you_mean(key, free)}")
        if key not in free:
            raise ConfigError(f"`suite_settings`: {key!r} has its own argument, `{key}`; use that.")


def _suites_by_value() -> dict[str, list[str]]:
    """Suites by supported `value`."""
    found: dict[str, list[str]] = {}
    for name, suite in SUITES.items():
        for value in _choices(suite.config, "value"):
            found.setdefault(value, []).append(name)
    return found


def _choices(config: type[EvalConfig], key: str) -> tuple[str, ...]:
    """Allowed values of a key of a config class; empty if the key is missing or free."""
    found = config.model_fields.get(key)
    return get_args(found.annotation) if found is not None and get_origin(found.annotation) is Literal else ()


def _entry(name: str, lengths: list[int], options: dict[str, Any]) -> EvalConfig:
    config = SUITES[name].config
    for key, value in options.items():
        allowed = _choices(config, key)
        if allowed and value is not None and value not in allowed:
            raise ConfigError(f"`{key}` {value!r} is not known; use {', '.join(allowed)}.")
    # A suite with a single length measures all positions up to that length.
    known = {"lengths": lengths, "length": lengths[-1], **options}
    # Missing options keep the preset's value or the default.
    given = {key: value for key, value in known.items() if key in config.model_fields and value not in (None, [], {})}
    for key, value in given.items():
        if get_origin(config.model_fields[key].annotation) is list and not isinstance(value, list | tuple):
            given[key] = [value]
    if known.get("preset") and "preset" not in config.model_fields:
        raise ConfigError(f"`preset`: suite {name} has no presets.")
    try:
        return config.model_validate({"suite": name, **given})
    except ValidationError as error:
        found = [
            ": ".join(filter(None, [".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")]))
            for problem in error.errors()
        ]
        raise ConfigError(f"`suite={name!r}`: {'; '.join(found)}.") from error


def _preset_lengths(suites: Sequence[str], preset: str | None) -> list[Length]:
    """Lengths of the preset (for one suite at a time), else the default."""
    if preset is not None and len(suites) != 1:
        raise ConfigError("`preset` needs exactly one suite, such as `suite='lveval'`.")
    known = SUITES[suites[0]].config.presets if preset and suites[0] in SUITES else {}
    return list(known.get(preset or "", {}).get("lengths", [])) or list(DEFAULT_LENGTHS)


def parse_lengths(lengths: Sequence[Length]) -> list[int]:
    return sorted({_length(length, "lengths") for length in lengths})


def _length(length: Length, argument: str) -> int:
    try:
        return parse_size(length)
    except ValueError as error:
        raise ConfigError(f"`{argument}` {str(length).strip()!r}: {error}.") from error


def rope_override(
    rope: RopeMethod | None, context: Length | None, lengths: Sequence[int] | None
) -> RopeOverride | None:
    """Return `rope` with its target context length: `context`, or the longest of `lengths`."""
    if rope is None:
        if context is not None:
            raise ConfigError("`context` sets the target length of `rope`; also pass `rope`, such as yarn.")
        return None
    if context is not None:
        reach = _length(context, "context")
    elif lengths is not None:
        reach = max(lengths, default=0)
    else:
        raise ConfigError("without `lengths`, `rope` needs a target context length, such as `context='32K'`.")
    return RopeOverride(rope=rope, context_length=reach)
