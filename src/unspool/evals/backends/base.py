"""What answers prompts: a model of ours, or in tests something that only pretends to be one."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from unspool.core.artifacts import digest
from unspool.evals.prompts import Prompt
from unspool.evals.questions import ROW_TOKENS
from unspool.evals.suites.perplexity import window_losses
from unspool.models.fuse import fuse_for_reading, pays_to_fuse
from unspool.models.generation.generate import answer
from unspool.models.load import load_model
from unspool.models.rotary import apply_rope
from unspool.models.tokenizer import load_tokenizer
from unspool.rope.tables import RopeMethod

# A model with other positions than it was trained with, to see what they do without training.


@dataclass(frozen=True, kw_only=True)
class Stretch:
    rope: RopeMethod
    context_length: int  # tokens that the method is to reach

    def apply(self, model: Any) -> None:
        apply_rope(model, self.rope, self.context_length)

    def of(self, model_hash: str) -> str:
        """What scores depend on, where a model is stretched so."""
        return digest([model_hash, self.rope.model_dump(mode="json"), self.context_length])

    def name_of(self, model: str) -> str:
        return f"{model}+{self.rope.method}"


# Writing takes a step for every token of an answer; prompts that are answered together share these steps. With so many
# tokens a step of SmolLM2-135M reads 24 GB of keys, 5 ms on an H200, which is more than all else in it; larger models
# have more per token. A run that is killed loses them: seconds of reading, 90 s at 8B.
GPU_ROW_TOKENS = 1 << 20


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

    planned_tokens = 0
    """Of all prompts of a run, those that were answered before it went on too, so that all are answered by the same
    kernels; said before the first, where it is known."""

    def __init__(self, ref: str, *, device: torch.device, dtype: torch.dtype, stretch: Stretch | None = None) -> None:
        self.ref, self.device, self.dtype, self.stretch = ref, device, dtype, stretch

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.ref)

    @cached_property
    def model(self) -> Any:
        model = load_model(self.ref, device=self.device, dtype=self.dtype)
        if self.stretch is not None:
            self.stretch.apply(model)
        if pays_to_fuse(model, self.planned_tokens):
            fuse_for_reading(model)
        return model

    @cached_property
    def stop_ids(self) -> set[int]:
        # Chat models may end a turn with another token than the tokenizer's end of text.
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return {end for end in [*ends, self.tokenizer.eos_token_id] if end is not None}

    @property
    def row_tokens(self) -> int:
        """How much is answered together where prompts have no context in common."""
        return GPU_ROW_TOKENS if self.device.type == "cuda" else ROW_TOKENS

    def answers(self, prompt: Prompt) -> list[str]:
        generated = answer(
            self.model,
            prompt.context_ids,
            [question.ids for question in prompt.questions],
            max_new_tokens=prompt.answer_tokens,
            stop_ids=self.stop_ids,
        )
        return [
            self.tokenizer.decode(ids[: asked.answer_tokens], skip_special_tokens=True)
            for ids, asked in zip(generated, prompt.questions, strict=True)
        ]

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        return window_losses(self.model, ids)
