"""Any server that speaks OpenAI's HTTP interface: vLLM, SGLang, llama.cpp, TGI, hosted ones.

In: prompts, an address. Out: answers, greedy.
Promise: to the completions endpoint go token ids, so that what the server reads is what the hashes name; servers that
take no ids get text. The chat endpoint gets words, and puts its own template around them: there the answer's first
words end the user's message, since not every server can go on from an assistant's.
Elsewhere: attempts and errors (http.py).
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import BoundedSemaphore
from typing import Any, Literal

import numpy as np

from unspool.base.errors import ConfigError, UnspoolError
from unspool.eval.backends.http import Patience, post
from unspool.eval.prompt import Prompt, Question

Endpoint = Literal["completions", "chat", "text"]


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where to ask, and how."""

    url: str  # such as http://localhost:8000/v1
    model: str
    endpoint: Endpoint = "completions"  # text: completions with words instead of ids
    key_env: str = "OPENAI_API_KEY"  # variable that holds the key, if the server wants one
    patience: Patience = field(default_factory=Patience)
    width: int = 8  # requests at a time

    def complete(self, prompt: str | list[int], max_tokens: int) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens}
        choice = self._choice(self._post("completions", body))
        return _text(choice.get("text"))

    def chat(self, words: str, max_tokens: int, *, temperature: float = 0.0) -> str:
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": max_tokens, "temperature": temperature}
        message = self._choice(self._post("chat/completions", body)).get("message")
        return _text(message.get("content") if isinstance(message, dict) else None)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        full = {"model": self.model, "temperature": 0.0, "stream": False, **body}
        return post(f"{self.url.rstrip('/')}/{path}", full, key=os.environ.get(self.key_env), patience=self.patience)

    def _choice(self, found: dict[str, Any]) -> dict[str, Any]:
        try:
            choice = found["choices"][0]
        except (KeyError, IndexError, TypeError):
            choice = None
        if not isinstance(choice, dict):
            raise UnspoolError(f"{self.url} answered without `choices`; it does not speak OpenAI's interface.")
        return choice


class OpenAiBackend:
    def __init__(self, server: Server, tokenizer: Any) -> None:
        self.server, self.tokenizer = server, tokenizer
        self.width = server.width
        # Several prompts may be under way, each with several questions.
        self._slots = BoundedSemaphore(server.width)

    def answers(self, prompt: Prompt) -> list[str]:
        def one(question: Question) -> str:
            with self._slots:
                return send(question)

        def send(question: Question) -> str:
            ids = np.concatenate([prompt.context_ids, question.ids]).tolist()
            if self.server.endpoint == "completions":
                return self.server.complete(ids, prompt.answer_tokens)
            if self.server.endpoint == "text":
                return self.server.complete(self._words(question, ids), prompt.answer_tokens)
            return self.server.chat(self._words(question, ids), prompt.answer_tokens)

        if len(prompt.questions) == 1:
            return [one(prompt.questions[0])]
        with ThreadPoolExecutor(self.width) as pool:
            return list(pool.map(one, prompt.questions))

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        raise ConfigError("suite loss needs a model in this process, not a server; leave it out or drop --backend.")

    def _words(self, question: Question, ids: list[int]) -> str:
        if question.words is None:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return question.words.text + question.words.asked.prefix


def _text(value: Any) -> str:
    # Some servers say null for an answer of no tokens.
    return value if isinstance(value, str) else ""
