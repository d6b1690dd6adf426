"""What a model writes after some prompts, while it trains.

In: prompts of the recipe. Out: the most likely continuation of each, for `samples.jsonl` and the terminal.
Promise: training is left as it was (looking.py); whatever a model writes cannot move a terminal's cursor.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unspool.base.errors import ConfigError
from unspool.model.generate import answer
from unspool.train.config import StageConfig
from unspool.train.divided import computing_device, is_divided
from unspool.train.looking import looking_at

FILE = "samples.jsonl"


@dataclass(frozen=True, kw_only=True)
class Samples:
    prompts: Sequence[str]
    prompt_ids: Sequence[np.ndarray]
    tokenizer: Any
    stop_ids: Collection[int]
    tokens: int

    def write(self, model: Any) -> list[dict[str, str]]:
        """`prompt` and `text` of each."""
        with looking_at(model):
            if is_divided(model):
                # FSDP makes room for whole layers in its first pass. Generating is done in inference mode, and what is
                # made there could not be trained with.
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=computing_device(model)), use_cache=False)
            written = [self._continue(model, ids) for ids in self.prompt_ids]
        return [{"prompt": prompt, "text": text} for prompt, text in zip(self.prompts, written, strict=True)]

    def _continue(self, model: Any, ids: np.ndarray) -> str:
        # All but the last token as context, which is read in chunks however long it is.
        (found,) = answer(model, ids[:-1], [ids[-1:]], max_new_tokens=self.tokens, stop_ids=self.stop_ids)
        text: str = self.tokenizer.decode(found, skip_special_tokens=True)
        return text


def build_samples(stage: StageConfig, model: Any, tokenizer: Any) -> Samples:
    assert stage.samples is not None
    prompt_ids = [np.array(tokenizer(prompt)["input_ids"], dtype=np.int64) for prompt in stage.samples.prompts]
    for prompt, ids in zip(stage.samples.prompts, prompt_ids, strict=True):
        if not len(ids) or len(ids) + stage.samples.tokens > stage.context:
            raise ConfigError(
                f"stage {stage.name}: the prompt {shown(prompt, 40)} of samples has {len(ids)} tokens, which with "
                f"{stage.samples.tokens} written after it do not fit 1 to {stage.context}; change it or samples.tokens."
            )
    ends = model.generation_config.eos_token_id
    stops = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    return Samples(
        prompts=stage.samples.prompts,
        prompt_ids=prompt_ids,
        tokenizer=tokenizer,
        stop_ids=stops,
        tokens=stage.samples.tokens,
    )


def shown(text: str, most: int = 400) -> str:
    r"""On one line, with `\n` and `\x1b` for what a terminal would act upon."""
    escaped = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    return escaped if len(escaped) <= most else escaped[: most - 1] + "…"
