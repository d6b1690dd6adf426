"""Encode questions for a backend: as token ids, text or chat messages.

Local models and the completions endpoint get token ids. The text endpoint gets the text of the same prompt, including
the chat template. The chat endpoint gets messages, and the server applies its own template.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from unspool.core.errors import ConfigError
from unspool.data.sources.base import Message
from unspool.data.sources.files import Unreadable, first_line
from unspool.data.tokenize.chat_template import own_template
from unspool.evals.backends.base import TOKEN_IDS, PromptForm
from unspool.evals.prompts import (
    Match,
    Payload,
    Prompt,
    PromptQuestion,
    PromptText,
    cut_context,
    cut_middle,
    encode,
    encode_after_newline,
    opening_ids,
)
from unspool.evals.suite import Question, Task

Chat = Literal["auto", "on", "off"]
# Placeholder for the user's text while a template is split. It has no meaning for templates or tokenizers.
_PLACEHOLDER = "UNSPOOLWORDS"
# Tokens at the borders of a template may merge differently with other text.
_BORDERS = 2
# Requests an answer prefix that cannot be prefilled.
BEGIN_WITH = "\n\nBegin your answer with: "
# Extra answer tokens for a model that writes its prefix itself and may add words.
SENTENCE_TOKENS = 64


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes questions for a backend, with or without a chat template."""

    tokenizer: Any
    form: PromptForm = TOKEN_IDS

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def sends_messages(self) -> bool:
        return self.form.endpoint == "chat"

    @property
    def asks_for_prefix(self) -> bool:
        """True if the model must write the answer prefix, because messages cannot be prefilled."""
        return self.sends_messages and self.form.prefill is None

    @property
    def extra_answer_tokens(self) -> int:
        return SENTENCE_TOKENS if self.asks_for_prefix else 0

    @property
    def template_tokens(self) -> int:
        """Tokens that the server adds to a message. `ids` does not contain them."""
        return self.form.template_tokens if self.sends_messages else 0

    def uses_chat(self, task: Task, chat: Chat) -> bool:
        if self.sends_messages:
            if chat == "off":
                raise ConfigError(
                    "chat: off, but the chat endpoint always applies the server's template; use chat: auto, or "
                    "`endpoint='text'`."
                )
            return True
        if chat == "on" and not self.has_template:
            raise ConfigError("chat: on, but the model's tokenizer has no chat template; use chat: off or auto.")
        return chat == "on" or (chat == "auto" and task.chat and self.has_template)

    def match(self, match: Match) -> Match:
        """How to compare an answer that may be a whole sentence."""
        return "mentions" if self.asks_for_prefix else match

    def overhead(self, *, chat: bool) -> int:
        """Number of tokens around the text."""
        if self.sends_messages:
            return self.template_tokens + _BORDERS + len(encode(self.tokenizer, BEGIN_WITH)) * self.asks_for_prefix
        if not chat:
            return len(self.opening)
        head, tail, _ = self._template
        return len(self._with_special(head)) + len(self._with_special(tail)) + _BORDERS

    def ending(self, asked: Question) -> str:
        """The text after the context, as sent."""
        if self.asks_for_prefix and asked.prefix.strip():
            return f"{asked.question.rstrip()}{BEGIN_WITH}{asked.prefix.strip()}"
        return asked.question + asked.prefix

    def ending_ids(self, asked: Question) -> np.ndarray:
        """Token ids of a question that follows a context ending in a newline."""
        return encode_after_newline(self.tokenizer, self.ending(asked))

    def after_context(self, asked: Question) -> PromptQuestion:
        """Encode a question after the tokens of its context, without a chat template."""
        (reference,) = asked.references
        return PromptQuestion(
            ids=self.ending_ids(asked),
            reference=reference,
            depth=asked.depth,
            text=PromptText(question=asked),
            payload=self.payload(asked, chat=False),
        )

    def cut(self, prompt: Prompt, limit: int) -> Prompt:
        """Cut the middle out of a context like `cut_context`, also in the text that is sent."""
        shorter, excess = cut_context(prompt, limit), prompt.tokens - limit
        if excess <= 0 or prompt.questions[0].payload is None:
            return shorter
        questions, ids = [], shorter.context_ids
        for question in shorter.questions:
            assert question.text is not None, "the sent text is built from it"
            asked, ids = cut_middle(
                self.tokenizer,
                question.text.question.context,
                excess,
                lambda text, asked=question.text.question: (  # type: ignore[misc]
                    replace(asked, context=text),
                    encode(self.tokenizer, text),
                ),
            )
            text, payload = PromptText(question=asked), self.payload(asked, chat=False)
            questions.append(replace(question, text=text, payload=payload))
        return replace(shorter, context_ids=np.concatenate([self.opening, ids]), questions=questions)

    def ids(self, asked: Question, *, chat: bool) -> np.ndarray:
        """Token ids of the prompt, without tokens that a server's template adds."""
        if self.sends_messages or not chat:
            return np.concatenate([self.opening, encode(self.tokenizer, asked.context + self.ending(asked))])
        head, tail, trims = self._template
        words = asked.context + asked.question
        words = words.strip() if trims else words
        if any(token in words + asked.prefix for token in self._special_tokens):
            parts = [self._with_special(head), encode(self.tokenizer, words), self._with_special(tail)]
            return np.concatenate([*parts, encode(self.tokenizer, asked.prefix)])
        return self._with_special(head + words + tail + asked.prefix)

    def payload(self, asked: Question, *, chat: bool) -> Payload | None:
        """Text or messages for a server; None if the server gets ids."""
        if self.sends_messages:
            if self.form.prefill is None or not asked.prefix.strip():
                return (_message("user", asked.context + self.ending(asked)),)
            return _message("user", asked.context + asked.question), _message("assistant", asked.prefix)
        if self.form.endpoint != "text":
            return None
        opening = str(self.tokenizer.decode(opening_ids(self.tokenizer).tolist()))
        words = asked.context + asked.question
        if not chat:
            return words + asked.prefix if self.form.adds_opening else opening + words + asked.prefix
        text = self._templated(words) + asked.prefix
        return text.removeprefix(opening) if self.form.adds_opening else text

    def read_ids(self, payload: Payload) -> np.ndarray:
        """Token ids that a server with this tokenizer and template reads."""
        if isinstance(payload, str):
            opening = opening_ids(self.tokenizer) if self.form.adds_opening else np.array([], dtype=np.uint32)
            return np.concatenate([opening, self._with_special(payload)])
        begun = "".join(message["content"] for message in payload[1:])
        return self._with_special(self._templated(payload[0]["content"]) + begun)

    def answer(self, output: str, prefix: str) -> str:
        """Remove the requested prefix from an answer."""
        prefix = prefix.strip()
        found = output.lstrip()
        begins = self.sends_messages and prefix and found.lower().startswith(prefix.lower())
        return found[len(prefix) :] if begins else output

    @cached_property
    def opening(self) -> np.ndarray:
        """Special tokens before every text; empty for messages."""
        return opening_ids(self.tokenizer)[: None if not self.sends_messages else 0]

    @cached_property
    def _special_tokens(self) -> list[str]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return sorted({*self.tokenizer.all_special_tokens, *(token.content for token in added.values())})

    @cached_property
    def _template(self) -> tuple[str, str, bool]:
        """(text before the user's message, text after it, True if the template strips the message)."""
        plain = self._render(_PLACEHOLDER)
        if plain.count(_PLACEHOLDER) != 1:
            raise ConfigError(
                "the model's chat template does not contain the user's message exactly once; use chat: off."
            )
        head, tail = plain.split(_PLACEHOLDER)
        return head, tail, f" {_PLACEHOLDER} " not in self._render(f" {_PLACEHOLDER} ")

    def _templated(self, words: str) -> str:
        head, tail, trims = self._template
        return head + (words.strip() if trims else words) + tail

    def _render(self, words: str) -> str:
        try:
            template = own_template(self.tokenizer)
            return template.render([Message("user", words)], prompt=True)
        except (Unreadable, ValueError) as error:
            raise ConfigError(
                f"the model's chat template cannot render a user message ({first_line(error)}); use chat: off."
            ) from error

    def _with_special(self, text: str) -> np.ndarray:
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(found, dtype=np.uint32)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
