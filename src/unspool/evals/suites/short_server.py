"""lm-eval's model interface to a server. Uses Unspool's requests with their limits, retries and key protection."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.evals.backends.openai import OpenAiBackend
from unspool.evals.prompts import encode

ANSWER_TOKENS = 256  # lm-eval's default
MAX_STOPS = 4  # maximum in OpenAI's interface; all stop strings are also applied here
One = TypeVar("One")
Result = TypeVar("Result")


def build_lm(template: Any, backend: OpenAiBackend) -> Any:
    """Build an instance of lm-eval's `TemplateLM`. It is an argument because lm-eval is optional."""
    tokenizer, server = backend.tokenizer, backend.server

    def ask_all(ask: Callable[[One], Result], items: Sequence[One], label: str) -> list[Result]:
        with progress_bar(label, len(items)) as advance, ThreadPoolExecutor(backend.width) as pool:
            futures = [pool.submit(ask, item) for item in items]
            try:
                results = []
                for future in futures:
                    results.append(future.result())
                    advance(1, "")
                return results
            finally:
                for future in futures:
                    future.cancel()

    def likelihood(request: tuple[Any, list[int], list[int]]) -> tuple[float, bool]:
        _, context, continuation = request
        found = backend.logprobs([*context, *continuation])[-len(continuation) :]
        return sum(number for number, _ in found), all(greedy for _, greedy in found)

    def generate(request: Any) -> str:
        text, settings = request.args
        until = settings.get("until") or []
        until = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        count = int(settings.get("max_gen_toks") or settings.get("max_tokens") or ANSWER_TOKENS)
        # Omit an empty list, because some servers refuse it.
        stops: dict[str, Any] = {"stop": until[:MAX_STOPS]} if until else {}
        if backend.form.endpoint == "chat":
            answer = server.chat(text, count, **stops)
        else:
            prompt = encode(tokenizer, text).tolist() if backend.form.endpoint == "completions" else text
            answer = server.complete(prompt, count, **stops)
        return answer[: min((at for stop in until if (at := answer.find(stop)) >= 0), default=len(answer))]

    class ServerLM(template):  # type: ignore[misc]
        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            ids: list[int] = encode(tokenizer, string).tolist()
            return ids

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
            return ask_all(likelihood, requests, "likelihoods")

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            raise ConfigError(
                "`suite='short'`: likelihoods of whole documents are not supported on a server; use a local model."
            )

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return ask_all(generate, requests, "answers")

    return ServerLM()
