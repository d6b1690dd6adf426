"""What answers prompts: a model of ours, or in tests something that only pretends to be one."""

from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from unspool.eval.grouping import ROW_TOKENS
from unspool.eval.prompt import Prompt
from unspool.eval.tasks.loss import window_losses
from unspool.model.generate import answer, chunk_len
from unspool.model.load import load_model
from unspool.model.tokenizer import load_tokenizer

# Writing takes a step for every token of an answer; prompts in one row share these steps.
GPU_ROW_TOKENS = 1 << 17


class Backend(Protocol):
    @property
    def tokenizer(self) -> Any: ...

    def answers(self, prompt: Prompt) -> list[str]:
        """One text per question."""
        ...

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        """−log p of every token but the first, in nats."""
        ...


@runtime_checkable
class BlockBackend(Protocol):
    """An engine that wants many prompts at a time."""

    block: int

    def answers_all(self, prompts: list[Prompt]) -> list[list[str]]: ...


class ModelBackend:
    """A model on one device; its weights are loaded when the first prompt comes."""

    def __init__(self, ref: str, *, device: torch.device, dtype: torch.dtype) -> None:
        self.ref, self.device, self.dtype = ref, device, dtype

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.ref)

    @cached_property
    def model(self) -> Any:
        return load_model(self.ref, device=self.device, dtype=self.dtype)

    @cached_property
    def stop_ids(self) -> set[int]:
        # Chat models may end a turn with another token than the tokenizer's end of text.
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return {end for end in [*ends, self.tokenizer.eos_token_id] if end is not None}

    @property
    def row_tokens(self) -> int:
        """How much is read at a time where prompts have no context in common."""
        return GPU_ROW_TOKENS if self.device.type == "cuda" else ROW_TOKENS

    def answers(self, prompt: Prompt) -> list[str]:
        asked = [question.ids for question in prompt.questions]
        generated = [ids for some in self._rows(prompt, asked) for ids in self._generated(prompt, some)]
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in generated]

    def _rows(self, prompt: Prompt, asked: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Prompts without a context in common, in as many rows as the memory of the GPU makes of them."""
        if len(prompt.context_ids) or len(asked) == 1 or self.device.type != "cuda":
            return [asked]
        sizes = [len(ids) + prompt.answer_tokens for ids in asked]
        room = chunk_len(self.model, sum(sizes))
        rows: list[list[np.ndarray]] = [[]]
        used = 0
        for ids, size in zip(asked, sizes, strict=True):
            if rows[-1] and used + size > room:
                rows.append([])
                used = 0
            rows[-1].append(ids)
            used += size
        return rows

    def _generated(self, prompt: Prompt, asked: list[np.ndarray]) -> list[list[int]]:
        return answer(
            self.model,
            prompt.context_ids,
            asked,
            max_new_tokens=prompt.answer_tokens,
            stop_ids=self.stop_ids,
        )

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        return window_losses(self.model, ids)
