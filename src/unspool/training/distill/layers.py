"""Queries and keys of each layer of two models, both computed from the teacher's input of that layer.

The code does not depend on the model family. The student model provides all inputs of a layer besides hidden states,
such as its RoPE tables. A layer stops where its attention would begin, so only one layer's graph exists at a time. A
test on a few tokens checks whether a model supports this.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from unspool.core.errors import ConfigError
from unspool.models.attention.reference import AttentionInputs, Kernel, causal_mask
from unspool.models.checks import DOC_LEN, attention_of, intercept_attention, is_close, layers_of

# Most attention scores of one model at a time: 64 MiB in fp32.
SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class QueryKey:
    """The inputs of a layer's attention kernel, except the values."""

    query: Tensor  # [H, T, D]
    key: Tensor  # [KV, T, D]
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "QueryKey":
        return cls(
            query=inputs.query[0],
            key=inputs.key[0],
            scale=inputs.scale,
            window=inputs.window,
            softcap=inputs.softcap,
            sinks=inputs.sinks,
        )

    def cut(self, queries: slice, keys: slice) -> "QueryKey":
        return replace(self, query=self.query[:, queries].float(), key=self.key[:, keys].float())


@torch.no_grad()
def divergence(teacher: QueryKey, student: QueryKey, doc_lens: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of KL divergences and its gradients with respect to the student's queries and keys, in fp32."""
    total = torch.zeros((), dtype=torch.float64, device=student.query.device)
    query_grad = torch.zeros_like(student.query, dtype=torch.float32)
    key_grad = torch.zeros_like(student.key, dtype=torch.float32)
    num_heads = len(student.query)
    for start, end in pairwise(accumulate(doc_lens, initial=0)):
        size = max(1, SCORES_AT_ONCE // (num_heads * (end - start)))
        for first in range(start, end, size):
            queries = slice(first, min(first + size, end))
            keys = slice(_first_key(teacher, student, start, first), queries.stop)
            found = _block(teacher.cut(queries, keys), student.cut(queries, keys), first - keys.start)
            total += found[0]
            query_grad[:, queries] = found[1]
            key_grad[:, keys] += found[2]
    return total, query_grad, key_grad


def _first_key(teacher: QueryKey, student: QueryKey, start: int, first: int) -> int:
    """Return the first key that queries from `first` can attend to."""
    windows = (teacher.window, student.window)
    widest = max((window for window in windows if window is not None), default=None)
    return start if widest is None or None in windows else max(start, first - widest + 1)


def _block(teacher: QueryKey, student: QueryKey, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `divergence` for a block of queries, whose first query is at key `offset`."""
    # Stay in fp32, also if the model runs under autocast.
    with torch.autocast(student.query.device.type, enabled=False):
        wanted, wanted_sink, _ = _log_weights(teacher, offset)
        found, found_sink, slope = _log_weights(student, offset)
        wanted_weights = wanted.exp()
        apart = torch.where(wanted_weights > 0, wanted_weights * (wanted - found), 0.0).sum(dtype=torch.float64)
        if wanted_sink is not None and found_sink is not None:
            apart += (wanted_sink.exp() * (wanted_sink - found_sink)).sum(dtype=torch.float64)
        # Gradient with respect to the scores: that of a softmax, with or without a sink.
        pull = (found.exp() - wanted_weights) * student.scale
        if slope is not None:
            pull *= slope
        num_kv, num_queries = len(student.key), student.query.shape[1]
        pull = pull.reshape(num_kv, -1, pull.shape[-1])  # [KV, G·Q, K]
        query_grad = (pull @ student.key).reshape(student.query.shape)
        key_grad = pull.transpose(-1, -2) @ _grouped(student.query, num_kv)
        assert query_grad.shape[1] == num_queries
        return apart, query_grad, key_grad


def _log_weights(layer: QueryKey, offset: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log attention weights [H, Q, K], those of the sink [H, Q, 1], and the derivative of the soft cap."""
    num_heads, num_queries, _ = layer.query.shape
    scores = _grouped(layer.query, len(layer.key)) @ layer.key.transpose(-1, -2) * layer.scale
    scores = scores.reshape(num_heads, num_queries, -1)
    cap, slope = layer.softcap, None
    if cap is not None:
        flat = torch.tanh(scores / cap)
        scores, slope = flat * cap, 1 - flat.square()
    seen = causal_mask(num_queries, scores.shape[-1], offset, layer.window, scores.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    log_sum = scores.logsumexp(dim=-1, keepdim=True)
    if layer.sinks is None:
        return scores - log_sum, None, slope
    sink = layer.sinks.float().reshape(-1, 1, 1)
    log_sum = torch.logaddexp(log_sum, sink)
    return scores - log_sum, sink - log_sum, slope


def _grouped(query: Tensor, num_kv: int) -> Tensor:
    """Group query heads by their KV head, so that keys are not repeated: [KV, G·Q, D]."""
    return query.reshape(num_kv, -1, query.shape[-1])


# Called with the index of a layer, and its queries and keys in the teacher and in the student.
Use = Callable[[int, QueryKey, QueryKey], None]
HIDDEN = "hidden_states"


class _AttentionReachedError(Exception):
    """Raised at the point where attention would begin."""

    def __init__(self, attended: QueryKey, value: Tensor) -> None:
        super().__init__()
        self.attended, self.value = attended, value


@dataclass(frozen=True)
class _Call:
    """The arguments with which a decoder calls one of its layers."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        found: Tensor = self.args[0] if self.args else self.kwargs[HIDDEN]
        return found

    def on(self, hidden: Tensor) -> "_Call":
        if self.args:
            return _Call((hidden, *self.args[1:]), self.kwargs)
        return _Call((), self.kwargs | {HIDDEN: hidden})


@torch.no_grad()
def compare_layers(teacher: Any, student: Any, inputs: dict[str, Any], use: Use) -> None:
    """Run the teacher once. Before each layer's attention, call `use`; the student's tensors have an autograd graph."""
    with _open_layers(student):
        calls = _read_calls(student, inputs)
        layers = layers_of(student)

        def note(number: int, hidden: Tensor, wanted: QueryKey) -> None:
            with torch.enable_grad():
                use(number, wanted, _run_to_attention(layers[number], calls[number].on(hidden)).attended)

        _watch_layers(teacher, inputs, note)


def fitted_parameters(model: Any) -> list[dict[str, nn.Parameter]]:
    """Return each layer's parameters that affect only queries and keys; ConfigError for unsupported models."""
    device = next(model.parameters()).device
    tokens = torch.arange(DOC_LEN, device=device)[None] * 7919 % int(model.config.vocab_size)
    inputs = {"input_ids": tokens, "position_ids": torch.arange(DOC_LEN, device=device)[None], "doc_lens": (DOC_LEN,)}
    seen: dict[int, tuple[Tensor, QueryKey]] = {}
    with torch.no_grad():
        _watch_layers(model, inputs, lambda number, hidden, own: seen.update({number: (hidden, own)}))
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = []
    with _open_layers(model):
        calls, layers = _read_calls(model, inputs), layers_of(model)
        if not len(calls) == len(layers) == len(seen):
            raise _refusal(model)
        for number, layer in enumerate(layers):
            hidden, own = seen[number]
            with torch.enable_grad():
                again = _run_to_attention(layer, calls[number].on(hidden))
            query, key = again.attended.query.detach(), again.attended.key.detach()
            if not (is_close(query, own.query) and is_close(key, own.key)):
                raise _refusal(model)
            found.append({names[one]: one for one in _query_key_parameters(attention_of(layer), again)})
    if not all(found):
        raise _refusal(model)
    return found


def _query_key_parameters(attention: nn.Module, reached: _AttentionReachedError) -> list[nn.Parameter]:
    """Include a matrix with separate rows for values (Phi-3), but not a matrix whose weights also affect values."""
    parameters = list(attention.parameters())
    outputs = (reached.attended.query, reached.attended.key)
    patterns = [_pattern(one) for one in outputs]
    by_scores = torch.autograd.grad(outputs, parameters, patterns, retain_graph=True, allow_unused=True)
    by_values: tuple[Tensor | None, ...] = (None,) * len(parameters)
    if reached.value.requires_grad:
        by_values = torch.autograd.grad(reached.value, parameters, _pattern(reached.value), allow_unused=True)
    return [
        parameter
        for parameter, score, value in zip(parameters, by_scores, by_values, strict=True)
        if score is not None and (value is None or not bool(((score != 0) & (value != 0)).any()))
    ]


def _pattern(like: Tensor) -> Tensor:
    return (torch.arange(like.numel(), device=like.device) * 0.7 + 0.1).sin().to(like.dtype).view(like.shape)


def _refusal(model: Any) -> ConfigError:
    return ConfigError(
        f"attention_distillation: the queries and keys of {type(model).__name__} cannot be computed from outside of "
        "its layers; remove attention_distillation."
    )


def _watch_layers(model: Any, inputs: dict[str, Any], note: Callable[[int, Tensor, QueryKey], None]) -> None:
    """Run the model once; call `note` with the input of each layer, and its queries and keys."""
    given: dict[int, Tensor] = {}

    def enter(number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[number] = _Call(args, kwargs).hidden

    def between(number: int, kernel: Kernel, inputs: AttentionInputs) -> Tensor:
        note(number, given.pop(number), QueryKey.of(inputs))
        return kernel(inputs)

    with ExitStack() as stack:
        for number, layer in enumerate(layers_of(model)):
            handle = layer.register_forward_pre_hook(partial(enter, number), with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(_all_heads(model))
        stack.enter_context(intercept_attention(model, lambda number: partial(between, number)))
        model.base_model(**inputs, use_cache=False)


@torch.no_grad()
def _read_calls(model: Any, inputs: dict[str, Any]) -> list[_Call]:
    """Return the arguments that the decoder passes to each layer, without running the layers."""
    calls: list[_Call] = []

    def note(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(_Call(args, kwargs))
        return calls[-1].hidden

    with ExitStack() as stack:
        for layer in layers_of(model):
            stack.enter_context(_replace_attribute(layer, "forward", note))
        model.base_model(**inputs, use_cache=False)
    return calls


@contextmanager
def _open_layers(model: Any) -> Iterator[None]:
    """Inside the context, layers stop at their attention (`_run_to_attention`); frozen weights get gradients."""

    def stop(kernel: Kernel, inputs: AttentionInputs) -> NoReturn:
        raise _AttentionReachedError(QueryKey.of(inputs), inputs.value)

    frozen = [
        parameter
        for layer in layers_of(model)
        for parameter in attention_of(layer).parameters()
        if not parameter.requires_grad
    ]
    with _all_heads(model), intercept_attention(model, lambda number: stop):
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


def _run_to_attention(layer: nn.Module, call: _Call) -> _AttentionReachedError:
    try:
        # Call the method of the class: memory settings replace the object's own, which would compute the layer twice.
        type(layer).forward(layer, *call.args, **call.kwargs)
    except _AttentionReachedError as reached:
        return reached.with_traceback(None)
    raise ConfigError(f"attention_distillation: {type(layer).__name__} has attention code of its own; remove the key.")


@contextmanager
def _all_heads(model: Any) -> Iterator[None]:
    """Inside the context, attention gets all heads at once, also with `attention_heads_at_once`."""
    with ExitStack() as stack:
        for layer in layers_of(model):
            if hasattr(attention_of(layer), "heads_at_once"):
                stack.enter_context(_replace_attribute(attention_of(layer), "heads_at_once", None))
        yield


@contextmanager
def _replace_attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Inside the context, an attribute of the module is replaced."""
    own = vars(module)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        del own[name]
        own.update(before)
