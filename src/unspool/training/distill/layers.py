"""Each layer of one model, run as far as its queries and keys on what the same layer of another model was given.

In: two models of one architecture, tokens. Out: per layer, queries and keys of both; the student's with their graph.
Promise: no family is known here. What a layer needs besides hidden states (its rotation above all) is what the student
itself hands to it; layers are left as soon as attention would begin, so nothing is computed that is not needed, and no
more than one layer's graph exists at a time. Whether a model can be taken apart like this is tried on a few tokens.
Elsewhere: what is done with queries and keys (refit_attention.py, refit.py).
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

# How far one layer's attention is from another's, and which way its queries and keys have to go.


# Scores of one side, in fp32: 64 MiB.
SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What a layer's kernel is given, values apart."""

    query: Tensor  # [H, T, D]
    key: Tensor  # [KV, T, D]
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "Attended":
        return cls(
            query=inputs.query[0],
            key=inputs.key[0],
            scale=inputs.scale,
            window=inputs.window,
            softcap=inputs.softcap,
            sinks=inputs.sinks,
        )

    def cut(self, queries: slice, keys: slice) -> "Attended":
        return replace(self, query=self.query[:, queries].float(), key=self.key[:, keys].float())


@torch.no_grad()
def divergence(teacher: Attended, student: Attended, doc_lens: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of KL, and its gradient by the student's queries and keys, in fp32."""
    total = torch.zeros((), dtype=torch.float64, device=student.query.device)
    query_grad = torch.zeros_like(student.query, dtype=torch.float32)
    key_grad = torch.zeros_like(student.key, dtype=torch.float32)
    num_heads = len(student.query)
    for start, end in pairwise(accumulate(doc_lens, initial=0)):
        size = max(1, SCORES_AT_ONCE // (num_heads * (end - start)))
        for first in range(start, end, size):
            queries = slice(first, min(first + size, end))
            keys = slice(_reach(teacher, student, start, first), queries.stop)
            found = _block(teacher.cut(queries, keys), student.cut(queries, keys), first - keys.start)
            total += found[0]
            query_grad[:, queries] = found[1]
            key_grad[:, keys] += found[2]
    return total, query_grad, key_grad


def _reach(teacher: Attended, student: Attended, start: int, first: int) -> int:
    """The first key that some query from `first` on sees."""
    windows = (teacher.window, student.window)
    widest = max((window for window in windows if window is not None), default=None)
    return start if widest is None or None in windows else max(start, first - widest + 1)


def _block(teacher: Attended, student: Attended, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of some queries, the first of which stands at the key `offset`."""
    # What is fp32 here stays so, also where the model computes under autocast.
    with torch.autocast(student.query.device.type, enabled=False):
        wanted, wanted_sink, _ = _log_weights(teacher, offset)
        found, found_sink, slope = _log_weights(student, offset)
        wanted_weights = wanted.exp()
        apart = torch.where(wanted_weights > 0, wanted_weights * (wanted - found), 0.0).sum(dtype=torch.float64)
        if wanted_sink is not None and found_sink is not None:
            apart += (wanted_sink.exp() * (wanted_sink - found_sink)).sum(dtype=torch.float64)
        # Of the scores: a softmax's own gradient, whether or not a sink takes part in it.
        pull = (found.exp() - wanted_weights) * student.scale
        if slope is not None:
            pull *= slope
        num_kv, num_queries = len(student.key), student.query.shape[1]
        pull = pull.reshape(num_kv, -1, pull.shape[-1])  # [KV, G·Q, K]
        query_grad = (pull @ student.key).reshape(student.query.shape)
        key_grad = pull.transpose(-1, -2) @ _grouped(student.query, num_kv)
        assert query_grad.shape[1] == num_queries
        return apart, query_grad, key_grad


def _log_weights(layer: Attended, offset: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logarithms of attention weights [H, Q, K] and of the sink's [H, Q, 1]; the slope of the cap."""
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
    """Query heads beside the KV head they share, so that keys are not repeated: [KV, G·Q, D]."""
    return query.reshape(num_kv, -1, query.shape[-1])


# With the number of a layer, and what the teacher's and the student's kernel would be given there.
Use = Callable[[int, Attended, Attended], None]
HIDDEN = "hidden_states"


class _ReachedError(Exception):
    """Attention would begin here."""

    def __init__(self, attended: Attended, value: Tensor) -> None:
        super().__init__()
        self.attended, self.value = attended, value


@dataclass(frozen=True)
class _Call:
    """How a decoder calls one of its layers."""

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
    """One pass of the teacher; after each of its layers' attention, `use` with gradients for the student."""
    with _open_layers(student):
        calls = _read_calls(student, inputs)
        layers = layers_of(student)

        def note(number: int, hidden: Tensor, wanted: Attended) -> None:
            with torch.enable_grad():
                use(number, wanted, _attended_by(layers[number], calls[number].on(hidden)).attended)

        _watch_layers(teacher, inputs, note)


def fitted_parameters(model: Any) -> list[dict[str, nn.Parameter]]:
    """By layer, the parameters that make queries and keys and nothing else; refuses what cannot be taken apart."""
    device = next(model.parameters()).device
    tokens = torch.arange(DOC_LEN, device=device)[None] * 7919 % int(model.config.vocab_size)
    inputs = {"input_ids": tokens, "position_ids": torch.arange(DOC_LEN, device=device)[None], "doc_lens": (DOC_LEN,)}
    seen: dict[int, tuple[Tensor, Attended]] = {}
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
                again = _attended_by(layer, calls[number].on(hidden))
            query, key = again.attended.query.detach(), again.attended.key.detach()
            if not (is_close(query, own.query) and is_close(key, own.key)):
                raise _refusal(model)
            found.append({names[one]: one for one in _of_queries_and_keys(attention_of(layer), again)})
    if not all(found):
        raise _refusal(model)
    return found


def _of_queries_and_keys(attention: nn.Module, reached: _ReachedError) -> list[nn.Parameter]:
    """A matrix that holds the values' rows too (Phi-3) is one of them; one that values are made of as well is not."""
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
        f"attention_distillation: {type(model).__name__} makes queries and keys in a way that cannot be followed "
        "from outside its "
        "layers; leave attention_distillation out."
    )


# Reaching into layers


def _watch_layers(model: Any, inputs: dict[str, Any], note: Callable[[int, Tensor, Attended], None]) -> None:
    """One pass; `note` gets the hidden states that each layer was given, and what its attention takes."""
    given: dict[int, Tensor] = {}

    def enter(number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[number] = _Call(args, kwargs).hidden

    def between(number: int, kernel: Kernel, inputs: AttentionInputs) -> Tensor:
        note(number, given.pop(number), Attended.of(inputs))
        return kernel(inputs)

    with ExitStack() as stack:
        for number, layer in enumerate(layers_of(model)):
            handle = layer.register_forward_pre_hook(partial(enter, number), with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(_whole_heads(model))
        stack.enter_context(intercept_attention(model, lambda number: partial(between, number)))
        model.base_model(**inputs, use_cache=False)


@torch.no_grad()
def _read_calls(model: Any, inputs: dict[str, Any]) -> list[_Call]:
    """What the decoder hands to each of its layers, without computing any of them."""
    calls: list[_Call] = []

    def note(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(_Call(args, kwargs))
        return calls[-1].hidden

    with ExitStack() as stack:
        for layer in layers_of(model):
            stack.enter_context(_set_aside(layer, "forward", note))
        model.base_model(**inputs, use_cache=False)
    return calls


@contextmanager
def _open_layers(model: Any) -> Iterator[None]:
    """Within this, `_attended_by` can be asked; attention itself is never reached, and weights have gradients."""

    def stop(kernel: Kernel, inputs: AttentionInputs) -> NoReturn:
        raise _ReachedError(Attended.of(inputs), inputs.value)

    frozen = [
        parameter
        for layer in layers_of(model)
        for parameter in attention_of(layer).parameters()
        if not parameter.requires_grad
    ]
    with _whole_heads(model), intercept_attention(model, lambda number: stop):
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


def _attended_by(layer: nn.Module, call: _Call) -> _ReachedError:
    try:
        # Of its class: memory settings, which replace an object's `forward`, would compute the layer twice.
        type(layer).forward(layer, *call.args, **call.kwargs)
    except _ReachedError as reached:
        return reached.with_traceback(None)
    raise ConfigError(f"attention_distillation: {type(layer).__name__} attends in code of its own; leave the key out.")


@contextmanager
def _whole_heads(model: Any) -> Iterator[None]:
    """All heads come at once, also under `attention_heads_at_once`."""
    with ExitStack() as stack:
        for layer in layers_of(model):
            if hasattr(attention_of(layer), "heads_at_once"):
                stack.enter_context(_set_aside(attention_of(layer), "heads_at_once", None))
        yield


@contextmanager
def _set_aside(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Within this, an attribute of the object itself is another."""
    own = vars(module)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        del own[name]
        own.update(before)
