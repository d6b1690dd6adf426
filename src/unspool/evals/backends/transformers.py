"""Backend for local models, in one process or in several processes."""

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch

from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.logging import LOGGER, set_up_logging
from unspool.evals.backends.base import ROW_TOKENS, Backend, BackendOptions, ContextLimit, RopeOverride, claimed_context
from unspool.evals.prompts import Prompt
from unspool.models.checks import check_tokens
from unspool.models.fuse import fuse_for_reading, pays_to_fuse
from unspool.models.generation.greedy import answer
from unspool.models.load import load_model
from unspool.models.loss import read_head, token_losses
from unspool.models.rotary import OWN_ATTENTION
from unspool.models.tokenizer import load_tokenizer

Result = TypeVar("Result")
# Decoding takes one step per answer token, and prompts in one row share these steps. With this many tokens, a step of
# SmolLM2-135M reads 24 GB of keys. That takes 5 ms on an H200 and dominates the step; larger models have more keys per
# token. A killed run loses one row: seconds of reading, or 90 s with an 8B model.
GPU_ROW_TOKENS = 1 << 20
# Number of positions whose logits are in memory at the same time.
HEAD_CHUNK = 1024


def build(options: BackendOptions) -> Backend:
    settings: Any = {"device": options.device, "dtype": options.dtype, "rope": options.rope}
    if options.processes > 1:
        return ProcessesBackend(options.model, width=options.processes, **settings)
    return ModelBackend(options.model, **settings)


class ModelBackend(Backend):
    """A model on one device. The first prompt loads its weights."""

    packs_contexts = True
    has_losses = True

    def __init__(self, ref: str, *, device: torch.device, dtype: torch.dtype, rope: RopeOverride | None = None) -> None:
        self.ref, self.device, self.dtype, self.rope = ref, device, dtype, rope
        self.options = BackendOptions(model=ref, device=device, dtype=dtype, rope=rope)
        self.row_tokens = GPU_ROW_TOKENS if device.type == "cuda" else ROW_TOKENS

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.ref)

    @cached_property
    def context_limit(self) -> ContextLimit | None:  # type: ignore[override]
        return claimed_context(self.ref, self.rope)

    @cached_property
    def model(self) -> Any:
        model = load_model(self.ref, device=self.device, dtype=self.dtype)
        if self.rope is not None:
            self.rope.apply(model)
        if pays_to_fuse(model, self.planned_tokens):
            fuse_for_reading(model)
        return model

    @cached_property
    def stop_ids(self) -> set[int]:
        # Chat models may end a turn with a token other than the tokenizer's end of text.
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return {end for end in [*ends, self.tokenizer.eos_token_id] if end is not None}

    def answers(self, prompt: Prompt) -> list[str]:
        generated = answer(
            self.model,
            prompt.context_ids,
            [question.ids for question in prompt.questions],
            max_new_tokens=prompt.answer_tokens,
            stop_ids=self.stop_ids,
        )
        return [
            self.tokenizer.decode(ids[: question.answer_tokens], skip_special_tokens=True)
            for ids, question in zip(generated, prompt.questions, strict=True)
        ]

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        return window_losses(self.model, ids)


class LiveBackend(ModelBackend):
    """A model in the caller's memory, for example during training. The backend does not change it."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        if model.config._attn_implementation != OWN_ATTENTION:
            raise ConfigError(
                f"this model's attention is {model.config._attn_implementation!r}; load it with "
                f"unspool.load, or with attn_implementation={OWN_ATTENTION!r} after unspool.register()."
            )
        super().__init__(str(model.name_or_path), device=model.device, dtype=model.dtype)
        self.model = model
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(self.ref)
        self.context_limit = ContextLimit(model.config.max_position_embeddings, "max_position_embeddings of its config")

    @cached_property
    def weights(self) -> str:
        """Digest of weights and config."""
        found = hashlib.sha256(self.model.config.to_json_string().encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            found.update(name.encode())
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
        return found.hexdigest()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Switch to evaluation mode, and restore training mode afterwards."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)


# Models whose head was checked. The check runs the model twice, as long as a short window takes.
_checked: WeakSet[Any] = WeakSet()


@torch.inference_mode()
def window_losses(model: Any, ids: np.ndarray) -> np.ndarray:
    """−log p of every token except the first, in nats: float64 [len(ids) − 1]. Allocates no [tokens, vocabulary]."""
    check_tokens(model, [ids])
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    if model not in _checked:
        _check_head(model, tokens[:, :8])
        _checked.add(model)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    hidden = model.base_model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state[0, :-1]
    losses = token_losses(hidden, read_head(model), tokens[0, 1:], chunk=HEAD_CHUNK)
    return losses.double().cpu().numpy()


def _check_head(model: Any, tokens: torch.Tensor) -> None:
    """Refuse architectures whose code changes logits after the head."""
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1:]
    plain = read_head(model).logits(hidden)
    own = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits.float()
    if not torch.allclose(plain, own, rtol=1e-2, atol=1e-2):
        raise ConfigError(
            f"perplexity: {type(model).__name__} changes its logits after the head, which this suite does not support. "
            "Remove the suite."
        )


class ProcessesBackend(Backend):
    """The same model in `width` processes, each with a full copy. The first prompts start them.

    Every prompt gets the answer that a single process would give. If a process dies, the run ends with an error. No
    process outlives the command.
    """

    packs_contexts = True
    has_losses = True

    def __init__(
        self, ref: str, *, device: torch.device, dtype: torch.dtype, width: int, rope: RopeOverride | None = None
    ) -> None:
        self.width = width
        # Used only for settings and tokenizer. Its weights are never loaded.
        self._model = ModelBackend(ref, device=device, dtype=dtype, rope=rope)
        self.row_tokens = self._model.row_tokens
        self._lock = threading.Lock()
        self._others = set(multiprocessing.active_children())
        self._children: list[Any] = []
        self._is_stopped = False

    @cached_property
    def tokenizer(self) -> Any:
        return self._model.tokenizer

    @property
    def context_limit(self) -> ContextLimit | None:  # type: ignore[override]
        return self._model.context_limit

    def answers(self, prompt: Prompt) -> list[str]:
        return self._run(_answers, prompt)

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        return self._run(_window_losses, ids)

    def stop(self) -> None:
        """Terminate all processes immediately. No new process starts."""
        with self._lock:
            self._is_stopped = True
        for child in self._children:
            child.terminate()
        for child in self._children:
            child.join()

    def _run(self, function: Callable[[Any], Result], argument: Any) -> Result:
        try:
            with self._lock:
                if self._is_stopped:
                    raise BrokenProcessPool
                future = self._pool.submit(function, argument)
                # The pool starts a process when a prompt finds no idle one.
                self._children = [child for child in multiprocessing.active_children() if child not in self._others]
            return future.result()
        except BrokenProcessPool:
            raise UnspoolError(
                f"one of {self.width} answering processes died, perhaps because memory ran out: each has a copy of the "
                "whole model. Finished answers are kept. Run the same command again with fewer `processes`."
            ) from None

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        # Spawn, because this process has threads, and a fork could not use CUDA.
        context = multiprocessing.get_context("spawn")
        model = {key: getattr(self._model, key) for key in ("ref", "device", "dtype", "rope")}
        threads = max(1, torch.get_num_threads() // self.width)
        counter = context.Value("i", 0)
        return ProcessPoolExecutor(
            self.width,
            mp_context=context,
            initializer=_start_worker,
            initargs=(model, self.planned_tokens, threads, LOGGER.level, os.getpid(), counter),
        )


_backend: ModelBackend | None = None
"""State of a worker process."""


def _start_worker(
    model: dict[str, Any], planned_tokens: int, threads: int, log_level: int, parent: int, counter: Any
) -> None:
    global _backend
    if log_level:  # 0: the command did not set up logging
        set_up_logging(log_level)
    # Ctrl-C reaches all processes; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    if model["device"].type == "cuda":
        model["device"] = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(model["device"])
    else:
        torch.set_num_threads(threads)
    _backend = ModelBackend(**model)
    _backend.planned_tokens = planned_tokens


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _answers(prompt: Prompt) -> list[str]:
    assert _backend is not None
    return _backend.answers(prompt)


def _window_losses(ids: np.ndarray) -> np.ndarray:
    assert _backend is not None
    return _backend.window_losses(ids)
