"""`unspool.generate` and `unspool.load_generator`: questions about a long text, in this process or on a server."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.evals.averaged_run import run_model_path
from unspool.evals.backends.base import BackendOptions
from unspool.evals.eval_request import ENDPOINTS, Length, rope_override
from unspool.rope.tables import RopeMethod

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from unspool.evals.text_generator import TextAnswer, TextGenerator

CHOICES: Mapping[str, tuple[str, ...]] = {
    "chat": ("auto", "on", "off"),
    "beyond_context": ("refuse", "truncate", "ask"),
    "backend": ("transformers", "openai"),
    "endpoint": ENDPOINTS,
}


class GenerateSettings(TypedDict, total=False):
    """Settings of `unspool.generate` besides model and prompt; each has a default."""

    tokenizer: Any  # of a model in memory, if its folder has none
    max_new_tokens: int | None  # 512, or fewer if the context ends before
    temperature: float  # 0: greedy
    top_p: float  # sample from the most likely tokens of this total probability
    seed: int  # of sampling, used anew for every question
    chat: str  # use the chat template: auto, on or off
    beyond_context: str  # for prompts longer than the context: refuse, truncate (cut the middle) or ask
    rope: RopeMethod | None  # another RoPE method, without training
    context: Length | None  # context length for `rope`
    device: str  # auto, cpu or cuda
    backend: str  # transformers, or openai for any server
    url: str | None  # address of the server, such as http://localhost:8000/v1
    model_name: str | None  # of the model on the server
    endpoint: str | None  # auto, completions, text or chat; by default chat with a chat template, else text
    timeout: float  # seconds to wait for one answer from the server


def load_generator(model: "str | Path | PreTrainedModel", **settings: Unpack[GenerateSettings]) -> "TextGenerator":
    """Load a model to ask it several questions about a text, which it reads once.

    Weights are loaded with the first question, after its prompt was checked.

    Args:
        model: A model folder, a run, a `.gguf` file, a Hub id, `asset:tiny-base`, or a model of `unspool.load`. For a
            server, the folder or Hub id of its tokenizer.
        **settings: `max_new_tokens`, `temperature`, `top_p`, `seed`, `chat`, `beyond_context`, `rope`, `context`,
            `device`, `backend`, `url`, … (`GenerateSettings`); the same as the options of `unspool generate`.

    Returns:
        A generator: `ask(text, question)` returns an answer, and `check(text, question)` only checks the prompt.

    Raises:
        ConfigError: There is no such model or setting, or the settings do not fit together.

    Example:
        >>> import unspool
        >>> generator = unspool.load_generator("asset:tiny-base", device="cpu", max_new_tokens=4)
        >>> first = generator.ask("It was the best of times.", "It was")
        >>> generator.ask("It was the best of times.", "The best").cached_tokens > 0
        True
    """
    for name, allowed in CHOICES.items():
        if (value := settings.get(name)) is not None:
            lookup(dict.fromkeys(allowed), str(value), kind=f"`{name}`")
    rope = settings.get("rope")
    if rope is not None and settings.get("context") is None:
        raise ConfigError('`rope` needs the context length to reach, such as `context="32K"`.')
    override = rope_override(rope, settings.get("context"), None)
    live = None if isinstance(model, str | Path) else model
    if live is not None and (override is not None or settings.get("backend", "transformers") != "transformers"):
        raise ConfigError("`rope` and `backend` are for a model on disk; this model is in memory, so leave them out.")

    from unspool.evals.text_generator import GenerationOptions, TextGenerator
    from unspool.models.extend import pick_device, pick_dtype  # import late: it loads torch
    from unspool.models.generation.cached import Sampling

    device = pick_device(settings.get("device", "auto"))
    endpoint = settings.get("endpoint")
    options = BackendOptions(
        kind=settings.get("backend", "transformers"),
        model=run_model_path(str(model), Path()) if live is None else str(live.name_or_path),
        url=settings.get("url"),
        model_name=settings.get("model_name"),
        endpoint=None if endpoint == "auto" else endpoint,
        timeout=settings.get("timeout", 600),
        rope=override,
        device=device,
        dtype=pick_dtype(None, device),
    )
    generation = GenerationOptions(
        max_new_tokens=settings.get("max_new_tokens"),
        chat=settings.get("chat", "auto"),  # type: ignore[arg-type]
        beyond_context=settings.get("beyond_context", "refuse"),  # type: ignore[arg-type]
        sampling=Sampling(
            temperature=settings.get("temperature", 0.0),
            top_p=settings.get("top_p", 1.0),
            seed=settings.get("seed", 0),
        ),
    )
    if live is None:
        return TextGenerator(options, generation)
    from unspool.evals.backends.transformers import LiveBackend

    return TextGenerator(options, generation, live=LiveBackend(live, settings.get("tokenizer")))


@overload
def generate(
    model: "str | Path | PreTrainedModel",
    text: str = ...,
    question: str = ...,
    *,
    on_text: Callable[[str], object] = ...,
    **settings: Unpack[GenerateSettings],
) -> "TextAnswer": ...
@overload
def generate(
    model: "str | Path | PreTrainedModel",
    text: str,
    question: list[str],
    *,
    on_text: Callable[[str], object] = ...,
    **settings: Unpack[GenerateSettings],
) -> "list[TextAnswer]": ...
def generate(
    model: "str | Path | PreTrainedModel",
    text: str = "",
    question: str | list[str] = "",
    *,
    on_text: Callable[[str], object] = lambda piece: None,
    **settings: Unpack[GenerateSettings],
) -> "TextAnswer | list[TextAnswer]":
    """Ask a model about a long text, or let it continue one.

    The model reads the text once: later questions of a list reuse the prompt cache. For questions that come one by
    one, use `load_generator`.

    Args:
        model: A model folder, a run, a `.gguf` file, a Hub id, `asset:tiny-base`, or a model of `unspool.load`. For a
            server, the folder or Hub id of its tokenizer.
        text: What the model reads first; may be empty.
        question: A question about the text, or a list of questions; without one the model continues the text.
        on_text: Is called with each piece of an answer when it is generated.
        **settings: `max_new_tokens`, `temperature`, `top_p`, `seed`, `chat`, `beyond_context`, `rope`, `context`,
            `device`, `backend`, `url`, … (`GenerateSettings`); the same as the options of `unspool generate`.

    Returns:
        The answer, with its `text`, token counts and times; a list of answers for a list of questions.

    Raises:
        ConfigError: The prompt is empty or longer than the model's context, or a setting is wrong.

    Example:
        >>> import unspool
        >>> answer = unspool.generate("asset:tiny-base", "Once upon a time", device="cpu", max_new_tokens=8)
        >>> answer.answer_tokens
        8
    """
    generator = load_generator(model, **settings)
    questions = [question] if isinstance(question, str) else question
    for each in questions:
        generator.check(text, each)
    answers = [generator.ask(text, each, on_text=on_text) for each in questions]
    return answers[0] if isinstance(question, str) else answers
