"""Backend for vLLM in this process. vLLM batches prompts and computes common prefixes once.

vLLM loads models itself. `unspool eval --parity` checks whether its answers equal those of transformers.
"""

from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from unspool.core.errors import ConfigError
from unspool.evals.backends.base import Backend, BackendOptions, ContextLimit, claimed_context
from unspool.evals.prompts import Prompt
from unspool.models.tokenizer import load_tokenizer
from unspool.models.weight_files import check_weights


class VllmBackend(Backend):
    kind = "vllm"
    block_size = 64

    def __init__(self, ref: str) -> None:
        self.ref = ref

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.ref)

    @cached_property
    def context_limit(self) -> ContextLimit | None:  # type: ignore[override]
        return claimed_context(self.ref)

    @cached_property
    def _engine(self) -> tuple[Any, Any]:
        try:
            vllm = import_module("vllm")
        except ImportError as error:
            raise ConfigError(
                "`backend='vllm'`: vllm is not installed; run `pip install vllm`, or start a vLLM server and use "
                "`backend='openai', url=ADDRESS`."
            ) from error
        check_weights(self.ref)
        return vllm.LLM(model=self.ref, enable_prefix_caching=True), vllm.SamplingParams

    def answers(self, prompt: Prompt) -> list[str]:
        return self.answers_all([prompt])[0]

    def answers_all(self, prompts: list[Prompt]) -> list[list[str]]:
        engine, params = self._engine
        requests = [
            ({"prompt_token_ids": np.concatenate([prompt.context_ids, question.ids]).tolist()}, prompt.answer_tokens)
            for prompt in prompts
            for question in prompt.questions
        ]
        options = [params(temperature=0.0, max_tokens=tokens) for _, tokens in requests]
        texts = iter([one.outputs[0].text for one in engine.generate([ids for ids, _ in requests], options)])
        return [[next(texts) for _ in prompt.questions] for prompt in prompts]


def build(options: BackendOptions) -> VllmBackend:
    return VllmBackend(options.model)
