"""Ask a model about a text: locally with a prompt cache, or through an OpenAI-compatible server."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.evals.backends.base import BackendOptions, build_backend
from unspool.evals.prompt_encoder import Chat, PromptEncoder
from unspool.evals.prompts import Prompt, PromptQuestion, cut_middle, encode
from unspool.evals.suite import Question
from unspool.models.config import config_values
from unspool.models.generation.cached import CachedGenerator, Sampling
from unspool.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

BeyondContext = Literal["refuse", "truncate", "ask"]
DEFAULT_NEW_TOKENS = 512
# Python represents non-UTF-8 bytes of the command line as these; tokenizers reject them.
_UNENCODABLE = re.compile("[\ud800-\udfff]")
# Separates the text and the question.
_BREAK = "\n\n"
# Decoders return this for bytes that are not yet a complete character.
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    max_new_tokens: int | None = None
    """None: DEFAULT_NEW_TOKENS, or fewer if the context is too short."""
    chat: Chat = "auto"  # auto: use the chat template if there is one
    beyond_context: BeyondContext = "refuse"  # truncate: drop the middle of the text; ask: read all of it
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, kw_only=True)
class TextAnswer:
    """An answer of a model, with token counts and times.

    Example:
        >>> import unspool
        >>> answer = unspool.generate("asset:tiny-base", "Once upon a time", device="cpu", max_new_tokens=8)
        >>> answer.finish_reason, answer.prompt_tokens > 0
        ('length', True)
    """

    question: str
    text: str
    finish_reason: Literal["stop", "length"] | None  # None for a server
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens taken from the cache; 0 for servers, which do not report it."""
    dropped_tokens: int
    """Tokens dropped from the text to fit the context."""
    answer_tokens: int
    seconds_to_first_token: float
    seconds: float


class TextGenerator:
    """Answers questions about texts. Does not read a text again if the previous question used it.

    `load_generator` makes one. Weights are loaded with the first question, after its prompt was checked.

    Example:
        >>> import unspool
        >>> generator = unspool.load_generator("asset:tiny-base", device="cpu", max_new_tokens=4)
        >>> generator.context_length
        256
    """

    def __init__(
        self,
        model: BackendOptions,
        options: GenerationOptions = GenerationOptions(),  # noqa: B008
        *,
        live: Any = None,
    ) -> None:
        """`live` is the backend of a model in memory."""
        if model.kind not in ("transformers", "openai"):
            raise ConfigError(f"`backend={model.kind!r}` does not generate text; use transformers or openai.")
        self._model, self._options, self._live = model, options, live
        if model.kind == "openai" and model.endpoint is None:
            # All servers have these endpoints; not all accept token ids.
            model = replace(model, endpoint="chat" if self.uses_chat else "text")
        backend: Any = live or build_backend(model)
        backend.connect()
        if backend.form.endpoint == "chat" and options.chat == "off":
            raise ConfigError(
                "`chat='off'` has no effect on the chat endpoint, which always applies the server's template; use "
                "`endpoint='text'`."
            )
        if model.kind == "openai" and options.sampling.temperature:
            backend.server = replace(backend.server, sampling=asdict(options.sampling))
        self._backend = backend

    def ask(
        self, text: str, question: str = "", *, on_text: Callable[[str], object] = lambda piece: None
    ) -> TextAnswer:
        """Answer a question about a text, or continue the text if there is no question.

        Args:
            text: The text that the model reads first. May be empty.
            question: The question after the text and an empty line. May be empty.
            on_text: Called with each generated piece of the answer. The joined pieces are the answer. A
                server's answer comes in one piece.

        Raises:
            ConfigError: The prompt is empty, or longer than the model's context.
        """
        start = time.monotonic()
        asked, ids, dropped = self._encode_checked(text, question)
        prompt_tokens = len(ids) + self._encoder.template_tokens
        max_new_tokens = self._max_new_tokens(prompt_tokens)
        cached = 0
        pieces: list[str] = []
        tokens: list[int] = []
        first = start
        if self._model.kind == "openai":
            pieces = [self._ask_server(asked, ids, max_new_tokens)]
            tokens, first = encode(self._tokenizer, pieces[0]).tolist(), time.monotonic()
            on_text(pieces[0])
        else:
            cached = self._generator.reusable(ids)
            with nullcontext() if self._live is None else self._live.answering():
                for piece in _text_pieces(self._tokenizer, self._tokens(ids, cached, max_new_tokens), tokens):
                    first = first if pieces else time.monotonic()
                    pieces.append(piece)
                    on_text(piece)
        is_local = self._model.kind != "openai"
        return TextAnswer(
            question=question,
            text="".join(pieces),
            finish_reason=("length" if len(tokens) >= max_new_tokens else "stop") if is_local else None,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached,
            dropped_tokens=dropped,
            answer_tokens=len(tokens),
            seconds_to_first_token=round((first if pieces else time.monotonic()) - start, 3),
            seconds=round(time.monotonic() - start, 3),
        )

    def check(self, text: str, question: str = "") -> None:
        """Check the prompt like `ask`, before any weights are loaded.

        Without a text and a question, check only the model's config and tokenizer.
        """
        if text or question:
            self._encode_checked(text, question)
        else:
            _ = self.uses_chat, self.context_length

    @cached_property
    def context_length(self) -> int | None:
        """Tokens that the model can read and write. None if the config does not set it."""
        if self._model.rope is not None:
            return self._model.rope.context_length
        if self._model.kind == "openai":
            limit = self._backend.context_limit
            return None if limit is None else int(limit.tokens)
        if self._live is not None:
            return int(self._live.context_limit.tokens)
        found = config_values(self._model.model).get("max_position_embeddings")
        return int(found) if found else None

    @cached_property
    def uses_chat(self) -> bool:
        has_template = PromptEncoder(self._tokenizer).has_template
        if self._options.chat == "on" and not has_template:
            raise ConfigError("`chat='on'`, but the model's tokenizer has no chat template; use `chat='off'` or auto.")
        return self._options.chat != "off" and has_template

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model.model) if self._live is None else self._live.tokenizer

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self._tokenizer, self._backend.form)

    @cached_property
    def _generator(self) -> CachedGenerator:
        return CachedGenerator(self._backend.model, stop_ids=self._backend.stop_ids)

    def _tokens(self, ids: np.ndarray, cached: int, max_new_tokens: int) -> Iterator[int]:
        sampling = self._options.sampling
        with progress_bar("reading the prompt", len(ids) - cached) as advance:
            tokens = self._generator.generate(
                ids, max_new_tokens=max_new_tokens, sampling=sampling, on_read=lambda count: advance(count)
            )
            first = next(tokens, None)
        if first is not None:
            yield first
            yield from tokens

    def _ask_server(self, asked: Question, ids: np.ndarray, max_new_tokens: int) -> str:
        payload = self._encoder.payload(asked, chat=self.uses_chat)
        question = PromptQuestion(ids=ids, reference="", depth=None, payload=payload)
        prompt = Prompt(
            suite="generate",
            length=len(ids) + max_new_tokens,
            index=0,
            context_ids=ids[:0],
            questions=[question],
            answer_tokens=max_new_tokens,
            match="contains",
        )
        (answer,) = self._backend.answers(prompt)
        return str(answer)

    # Fit prompts into the context

    def _encode_checked(self, text: str, question: str) -> tuple[Question, np.ndarray, int]:
        """Return (prompt, its ids, number of tokens dropped from the text)."""
        if not (text + question).strip():
            raise ConfigError("the prompt is empty; pass a text, a question or both.")
        if _UNENCODABLE.search(text + question):
            raise ConfigError("the prompt contains bytes that are not UTF-8; convert it to UTF-8.")
        asked, ids = self._encode(text, question)
        if self.context_length is None or self._options.beyond_context == "ask":
            return asked, ids, 0
        limit = self.context_length - self._encoder.template_tokens
        answer = self._options.max_new_tokens
        if self._options.beyond_context == "truncate":
            room = limit - (answer or min(DEFAULT_NEW_TOKENS, limit // 4))
            shorter, found = self._truncate(text, question, len(ids) - room) if len(ids) > room else (asked, ids)
            if len(found) <= room:
                return shorter, found, len(ids) - len(found)
        elif len(ids) + (answer or 1) <= limit:
            return asked, ids, 0
        wanted = f" and its answer up to {answer:,} more" if answer else ""
        raise ConfigError(
            f"the prompt has {len(ids) + self._encoder.template_tokens:,} tokens{wanted}, but {self._model.model} has "
            f"a context of {self.context_length:,}. Use a shorter text, drop the middle of the text with "
            "`beyond_context='truncate'`, or keep it with `beyond_context='ask'`. `rope` with `context` extends the "
            "context without training."
        )

    def _encode(self, text: str, question: str) -> tuple[Question, np.ndarray]:
        context = text + _BREAK if text and question else text
        asked = Question(context=context, question=question, references=())
        return asked, self._encoder.ids(asked, chat=self.uses_chat)

    def _truncate(self, text: str, question: str, excess: int) -> tuple[Question, np.ndarray]:
        return cut_middle(self._tokenizer, text, excess, lambda shorter: self._encode(shorter, question))

    def _max_new_tokens(self, prompt_tokens: int) -> int:
        if self._options.max_new_tokens is not None:
            return self._options.max_new_tokens
        if self.context_length is None or self._options.beyond_context == "ask":
            return DEFAULT_NEW_TOKENS
        return min(DEFAULT_NEW_TOKENS, self.context_length - prompt_tokens)


def _text_pieces(tokenizer: Any, tokens: Iterable[int], seen: list[int]) -> Iterator[str]:
    """Decode tokens as they arrive and add them to `seen`. The joined pieces are the text of all tokens."""

    def decoded(ids: list[int]) -> str:
        # Cleanup would change characters that were already yielded.
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # Tokens before `start` are done. Tokens from `start` to `end` were yielded, but are decoded again, because the text
    # of a token may depend on the token before it.
    start = end = 0
    for token in tokens:
        seen.append(token)
        before, now = decoded(seen[start:end]), decoded(seen[start:])
        if len(now) > len(before) and not now.endswith(_INCOMPLETE):
            yield now[len(before) :]
            start, end = end, len(seen)
    if rest := decoded(seen[start:])[len(decoded(seen[start:end])) :]:
        yield rest
