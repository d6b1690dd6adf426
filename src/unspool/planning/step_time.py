"""Seconds of a training step on one rank, by what takes them.

In: a model's shape, what a stage says about memory, the documents of a micro-batch, a device. Out: `StepSeconds`.
Convention: matrix products, attention and everything between them follow each other; copies to the host and weights
of other ranks travel beside them and count where they take longer; heads of Ulysses wait for nothing.
Measured on one H200, whole models: products of 4,096 wide states at 705 TFLOP/s, of 576 wide ones at about 440;
attention as in ATTENTION; what lies between at 3.0 TB/s when it is fused, 2.8 times as long when not.
Price: other devices are scaled by their data sheets; sliding windows are counted as if they were none.
Elsewhere: bytes (cost_memory.py), links between devices (cost.py), measuring instead (cost_measure.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from unspool.planning.cost import FULL, HALF, LOGITS_BYTES, REFERENCE, Gpu, Rates, Shape, sent
from unspool.planning.footprint import Held, moved_bytes

# Rates on the reference device.
MATMUL = 785e12  # of very wide products; w wide ones reach w / (w + NARROW) of it
NARROW = 450
# By the size of heads up to which they hold: forward and backward rate, and seconds that a token costs for each query
# number however short its document (forward and backward).
ATTENTION = {64: (495e12, 435e12, 2.6e-11), 256: (593e12, 522e12, 1.08e-11)}
BETWEEN = 3.0e12  # bytes per second of fused operators
UNFUSED = 2.8  # times as long
BACKWARD = 2.5  # times the products of attention's forward pass
# A Python program needs this long to start the kernels of a layer, forward and backward; short rows wait for it.
STARTING = 1.0e-3
HOST_UPDATE = 20e9  # bytes per second of an update in host memory, for one device's share of its machine


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a device differs from the reference, and what a measured run has corrected."""

    compute: float = 1.0  # its matrix products and attention, as a multiple
    memory: float = 1.0
    host: float = 50e9
    links: Rates = field(default_factory=Rates)
    layers: float = 1.0  # measured seconds ÷ those computed, of layers
    rest: float = 1.0  # likewise of the head, the loss and the update


def pace_of(gpu: Gpu) -> Pace:
    links = Rates(inside=0.8 * gpu.link * 1e9)
    ratio, memory = gpu.tflops / REFERENCE.tflops, gpu.bandwidth / REFERENCE.bandwidth
    return Pace(compute=ratio, memory=memory, host=gpu.host * 1e9, links=links)


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    matmul: float
    attention: float
    recomputed: float  # of layers, in the backward pass
    between: float  # norms, rotations, gates
    loss: float
    update: float
    waiting: float  # for the host, for other ranks, for Python

    @property
    def step(self) -> float:
        return float(sum(getattr(self, part.name) for part in fields(self)))


@dataclass(frozen=True, kw_only=True)
class Documents:
    """What attention's cost follows from: tokens, and the sum of squares of what each attends to, per token."""

    tokens: float
    squares: float

    @property
    def mean(self) -> float:
        """The length of equal documents that would cost the same."""
        return self.squares / self.tokens

    def of(self, tokens: float) -> "Documents":
        """So many tokens of the same kind."""
        return Documents(tokens=tokens, squares=self.mean * tokens)


def documents(lens: Sequence[int] | np.ndarray) -> Documents:
    found = np.asarray(lens, dtype=np.float64)
    return Documents(tokens=float(found.sum()), squares=float((found**2).sum()))


def flops_per_token(shape: Shape, docs: Documents) -> float:
    """Forward and backward, nothing twice, attention halved for being causal: the convention of flops.py."""
    attention = 6.0 * shape.num_layers * shape.num_heads * 2 * shape.head_dim * docs.mean / 2
    return 6.0 * shape.matmul_params - 6.0 * shape.num_layers * 2 * shape.hidden + attention


def step_seconds(shape: Shape, held: Held, docs: Documents, pace: Pace) -> StepSeconds:
    """Of one step on one rank; `docs` are those of a whole micro-batch, which `held.layout` may divide."""
    count = _Count(shape, held, docs, pace)
    return count.step()


class _Count:
    def __init__(self, shape: Shape, held: Held, docs: Documents, pace: Pace) -> None:
        self.shape, self.held, self.docs, self.pace = shape, held, docs, pace
        width = shape.hidden
        self.matmul = MATMUL * width / (width + NARROW) * pace.compute
        self.stream = BETWEEN * pace.memory
        policy, layers = held.policy, shape.num_layers
        self.again = 0 if policy.activation_checkpointing == "none" else layers
        # Layers that compute their matrix products again.
        self.products_again = 0 if policy.activation_checkpointing == "none" else layers - policy.keep_products

    def attention(self) -> tuple[float, float]:
        """Seconds of all layers, forward and backward."""
        shape, pace = self.shape, self.pace
        queries = shape.num_heads * shape.head_dim
        forward_rate, backward_rate, token = next(
            rates for size, rates in ATTENTION.items() if shape.head_dim <= size or size == max(ATTENTION)
        )
        ranks = self.held.layout.sequence_ranks
        flops = 2.0 * queries * self.docs.squares * shape.num_layers / ranks
        short = token * queries * self.docs.tokens * shape.num_layers / ranks
        forward = flops / forward_rate + short / 3
        backward = BACKWARD * flops / backward_rate + short * 2 / 3
        return forward / pace.compute, backward / pace.compute

    def layer_products(self) -> float:
        """Seconds of the forward matrix products of one layer."""
        norms = 2 * self.shape.hidden
        return 2.0 * (self.shape.layer_params - norms) * self.held.tokens / self.matmul

    def last_product(self) -> float:
        """That a recomputed layer stops before; in tiles it is computed again with the rest of the MLP."""
        if self.held.policy.mlp_tiles:
            return 0.0
        return 2.0 * self.shape.hidden * self.shape.intermediate * self.held.tokens / self.matmul

    def between(self) -> tuple[float, float]:
        """Seconds of what lies between products in one layer, forward and backward."""
        shape = self.shape
        hidden, inner = HALF * shape.hidden, HALF * shape.intermediate
        heads = HALF * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        slower = 1.0 if self.held.compiled else UNFUSED
        unit = slower * self.held.tokens / self.stream
        return (10 * hidden + 2 * heads + 3 * inner) * unit, (21 * hidden + 2 * heads + 5 * inner) * unit

    def loss(self) -> float:
        """The head's products, its gradient once per chunk in fp32, and a chunk's logits four times."""
        shape, tokens = self.shape, self.held.tokens
        chunks = max(1.0, tokens / (LOGITS_BYTES / (HALF * shape.vocabulary)))
        moved = chunks * 2 * FULL * shape.table_params + 4 * HALF * shape.vocabulary * tokens
        return 6.0 * shape.table_params * tokens / self.matmul + moved / self.stream

    def update(self) -> float:
        """Seconds of gradient accumulation, the norm and the optimizer's step."""
        held, params, config = self.held, self.shape.params / self.held.parts, self.held.optimizer
        added = 10 * params * (held.micro_batches - 1) / self.stream
        states = config.state_bytes_moved()
        if held.on_host:
            # The weight is read and written, the gradient read, all in fp32.
            return added + (3 * FULL + states) * params / HOST_UPDATE + (HALF + FULL) * params / self.pace.host
        grad = FULL if held.micro_batches > 1 else config.grad_bytes()
        return added + (2 * grad + states + config.weight_bytes_moved()) * params / self.stream

    def step(self) -> StepSeconds:
        shape, held, pace = self.shape, self.held, self.pace
        layers, batches = shape.num_layers, held.micro_batches
        forward_attention, backward_attention = self.attention()
        forward_between, backward_between = self.between()
        products = self.layer_products()
        recomputed = self.products_again * (products - self.last_product()) + self.again * forward_between
        if held.policy.activation_checkpointing == "full":
            recomputed += forward_attention
        elif held.policy.activation_checkpointing == "none" and held.policy.mlp_tiles:
            recomputed += layers * 3 / 2 * self.last_product() or layers * products / 2
        forward = layers * (products + forward_between) + forward_attention
        backward = layers * (2 * products + backward_between) + backward_attention + recomputed
        # Attention's kernels alone are no slower than their products; what a measured run found is in `layers`.
        waiting = self._waiting(forward * pace.layers, backward * pace.layers)
        return StepSeconds(
            matmul=batches * layers * 3 * products * pace.layers,
            attention=batches * (forward_attention + backward_attention) * pace.layers,
            recomputed=batches * recomputed * pace.layers,
            between=batches * layers * (forward_between + backward_between) * pace.layers,
            loss=batches * self.loss() * pace.rest,
            update=self.update() * pace.rest,
            waiting=batches * waiting,
        )

    def _waiting(self, forward: float, backward: float) -> float:
        """What copies, other ranks and Python take longer than computing does."""
        held, pace = self.held, self.pace
        moved = moved_bytes(self.shape, held) / pace.host
        copies = max(0.0, moved - forward) + max(0.0, moved - backward)
        starting = max(0.0, STARTING * self.shape.num_layers - forward - backward)
        if held.alone:
            return copies + starting
        layout, links = held.layout, pace.links
        bytes_sent = sent(self.shape, layout, round(self.docs.tokens))
        inside = held.parts <= links.node
        collective = links.inside if inside else min(links.inside, links.node * links.between)
        weights = bytes_sent.weights / collective
        if held.on_host:
            weights += 2 * HALF * self.shape.params / held.parts / pace.host
        heads = bytes_sent.heads / (links.inside if layout.ulysses <= links.node else links.between)
        keys = bytes_sent.keys / (links.inside if layout.sequence_ranks <= links.node else links.between)
        _, backward_attention = self.attention()
        late = max(0.0, keys - backward_attention) + max(0.0, weights - forward - backward)
        return copies + starting + heads + late
