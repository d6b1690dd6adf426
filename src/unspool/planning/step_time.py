"""Seconds of a training step on one rank, by component.

Matrix products, attention and the operators between them run one after the other. Copies to the host, and weights of
other ranks, overlap with them and count only if they take longer. Ulysses overlaps with nothing.

Rates were measured on one H200 with whole models: matrix products of hidden size 4,096 at 705 TFLOP/s and of 576 at
about 440; attention as in ATTENTION; other operators at 3.0 TB/s when fused, 2.8 times as long when not. Other devices
are scaled by their data sheets. Layers with a sliding window count the pairs inside it, at the rate of their kernel for
full attention; windows themselves were not measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from unspool.planning.cost import FULL, HALF, LOGITS_BYTES, REACHED, REFERENCE, Gpu, Links, Sent, Shape, sent
from unspool.planning.footprint import StepSetup, moved_bytes
from unspool.training.parallel.config import Layout

# Rates on the reference device.
MATMUL = 785e12  # for very wide matrices; width w reaches w / (w + NARROW) of it
NARROW = 450
# By largest head size: forward rate, backward rate, and the minimum seconds per token and query element, which apply to
# short documents (forward and backward).
ATTENTION = {64: (495e12, 435e12, 2.6e-11), 256: (593e12, 522e12, 1.08e-11)}
# Seconds of `varlen_attn`, which computes windows, ÷ seconds at these rates; one document of 64K, full attention
# (benchmarks/results/attention.json).
WINDOW_KERNEL = {64: 1.47, 256: 1.68}
# Seconds in bf16 ÷ seconds in FP8 of whole linear layers: forward, both gradients, all casts; Llama-3-8B's layer at 64K
# tokens on one H200. Other widths were not measured, nor were whole steps.
FP8 = 1.63
BETWEEN = 3.0e12  # bytes per second of fused operators
UNFUSED = 2.8  # times as long if not fused
BACKWARD = 2.5  # operations of attention's backward pass ÷ its forward pass
# Seconds that Python needs to launch the kernels of a layer, forward and backward. With short rows, the GPU waits for
# it.
LAUNCH = 1.0e-3
HOST_UPDATE = 20e9  # bytes per second of an update in host memory, for one device's share of its machine


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """Speed of a device relative to the reference, with the corrections of a measured run."""

    compute: float = 1.0  # for matrix products and attention
    memory: float = 1.0
    host: float = 50e9
    links: Links = field(default_factory=Links)
    narrow: float = NARROW  # width at which matrix products reach half of the rate
    short: float = 1.0  # factor on the minimum cost of attention for short documents
    layers: float = 1.0  # measured ÷ computed seconds of layers
    rest: float = 1.0  # the same for head, loss and update


def device_speed(gpu: Gpu) -> DeviceSpeed:
    if gpu.is_cpu:
        # Rates as measured on that CPU. An fp32 number has twice the bytes of a bf16 number on a GPU.
        return DeviceSpeed(
            compute=gpu.tflops * 1e12 / MATMUL, memory=gpu.bandwidth * 1e12 / 2 / BETWEEN, narrow=0.0, short=0.0
        )
    links = Links(inside=REACHED * gpu.link * 1e9)
    ratio, memory = gpu.tflops / REFERENCE.tflops, gpu.bandwidth / REFERENCE.bandwidth
    return DeviceSpeed(compute=ratio, memory=memory, host=gpu.host * 1e9, links=links)


def exposed_seconds(
    bytes_sent: Sent, layout: Layout, links: Links, *, computing: float, backward_attention: float
) -> float:
    """Seconds of a micro-batch that ranks wait for each other, from bytes and bandwidth.

    Weights overlap with all computing, and keys of a ring with the backward pass of attention. Heads overlap with
    nothing.
    """
    ranks = layout.shard * layout.sequence_ranks
    collective = links.inside if ranks <= links.node else min(links.inside, links.node * links.between)
    heads = bytes_sent.heads / (links.inside if layout.ulysses <= links.node else links.between)
    keys = bytes_sent.keys / (links.inside if layout.sequence_ranks <= links.node else links.between)
    late = max(0.0, bytes_sent.weights / collective - computing)
    return heads + max(0.0, keys - backward_attention) + late


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    matmul: float
    attention: float
    recomputed: float  # recomputation in the backward pass
    between: float  # norms, rotations, gates
    loss: float
    update: float
    waiting: float  # for the host, other ranks and Python
    weighing: float = 0.0  # forward passes that weigh labels

    @property
    def step(self) -> float:
        return float(sum(getattr(self, part.name) for part in fields(self)))


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The sliding windows of a model."""

    size: int  # tokens that a query sees, including its own
    share: float  # of all layers

    def squares(self, lens: np.ndarray) -> np.ndarray:
        """Return twice the pairs that a window leaves of each document: its square if it fits into the window."""
        return np.asarray(lens**2 - np.maximum(0.0, lens - self.size) ** 2)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Number of tokens, and sum of squared document lengths, which determines the cost of attention."""

    tokens: float
    squares: float
    windows: Windows | None = None  # of the model that reads them
    windowed: float | None = None  # the squares inside the window; None: those of equal documents

    @property
    def mean(self) -> float:
        """Return the length of equal documents with the same attention cost."""
        return self.squares / self.tokens

    @property
    def in_window(self) -> float:
        """Return the squares that a layer with a sliding window computes."""
        if self.windows is None or self.windowed is not None:
            return self.squares if self.windowed is None else self.windowed
        return float(self.windows.squares(np.array(self.mean))) / self.mean * self.tokens

    @property
    def per_layer(self) -> float:
        """Return the squares that a layer computes, as the mean over the layers."""
        share = 0.0 if self.windows is None else self.windows.share
        return (1 - share) * self.squares + share * self.in_window

    def of(self, tokens: float) -> "Documents":
        """Return `tokens` tokens of such documents."""
        windowed = None if self.windowed is None else self.windowed / self.tokens * tokens
        return replace(self, tokens=tokens, squares=self.mean * tokens, windowed=windowed)


def documents(lens: Sequence[int] | np.ndarray, windows: Windows | None = None) -> Documents:
    found = np.asarray(lens, dtype=np.float64)
    return Documents(
        tokens=float(found.sum()),
        squares=float((found**2).sum()),
        windows=windows,
        windowed=None if windows is None else float(windows.squares(found).sum()),
    )


def flops_per_token(shape: Shape, docs: Documents) -> float:
    """Return forward and backward FLOPs per token, by the convention of training/metrics/flops.py."""
    attention = 6.0 * shape.num_layers * shape.num_heads * 2 * shape.head_dim * (docs.per_layer / docs.tokens) / 2
    return 6.0 * shape.matmul_params - 6.0 * shape.num_layers * 2 * shape.hidden + attention


def forward_flops(shape: Shape, docs: Documents) -> float:
    """Return the FLOPs of forward passes over documents."""
    return flops_per_token(shape, docs) * docs.tokens / 3 if docs.tokens else 0.0


def step_seconds(shape: Shape, setup: StepSetup, docs: Documents, speed: DeviceSpeed) -> StepSeconds:
    """Return the seconds of a step on one rank. `docs` are of a whole micro-batch, which ranks may share."""
    return _StepTimer(shape, setup, docs, speed).step()


class _StepTimer:
    def __init__(self, shape: Shape, setup: StepSetup, docs: Documents, speed: DeviceSpeed) -> None:
        self.shape, self.setup, self.docs, self.speed = shape, setup, docs, speed
        width = shape.hidden
        self.matmul = MATMUL * width / (width + speed.narrow) * speed.compute
        self.stream = BETWEEN * speed.memory
        policy, layers = setup.policy, shape.num_layers
        self.layers_recomputed = 0 if policy.activation_checkpointing == "none" else layers
        # Layers that recompute their matrix products.
        self.products_recomputed = 0 if policy.activation_checkpointing == "none" else layers - policy.keep_products

    def weighing(self) -> float:
        """Seconds of the forward passes that weigh the labels of a micro-batch, in which nothing is fused."""
        tokens, squares = self.setup.forward_only
        if not tokens:
            return 0.0
        setup = replace(self.setup, tokens=round(tokens), compiled=False, fp8_layers=0)
        docs = Documents(tokens=tokens, squares=squares, windows=self.docs.windows)
        passes = _StepTimer(self.shape, setup, docs, self.speed)
        layers = self.shape.num_layers * (passes.layer_products() + passes.between()[0]) + passes.attention()[0]
        head = 2.0 * self.shape.table_params * tokens / self.matmul
        return layers * self.speed.layers + head * self.speed.rest

    def attention(self) -> tuple[float, float]:
        """Seconds of all layers, forward and backward."""
        shape, speed, docs = self.shape, self.speed, self.docs
        queries = shape.num_heads * shape.head_dim
        size = next((size for size in ATTENTION if shape.head_dim <= size), max(ATTENTION))
        forward_rate, backward_rate, token = ATTENTION[size]
        ranks = self.setup.layout.sequence_ranks
        share = 0.0 if docs.windows is None else docs.windows.share
        # Where every document fits into the window, the layers run the kernel of full attention.
        slower = WINDOW_KERNEL[size] if docs.in_window < docs.squares and not self.setup.on_cpu else 1.0
        flops = 2.0 * queries * docs.squares * (shape.num_layers * (1 - share)) / ranks
        flops += slower * 2.0 * queries * docs.in_window * (shape.num_layers * share) / ranks
        short = speed.short * token * queries * self.docs.tokens * shape.num_layers / ranks
        forward = flops / forward_rate + short / 3
        backward = BACKWARD * flops / backward_rate + short * 2 / 3
        return forward / speed.compute, backward / speed.compute

    def layer_products(self) -> float:
        """Seconds of the forward matrix products of one layer, as the mean over the layers."""
        norms = 2 * self.shape.hidden
        return self._fp8 * 2.0 * (self.shape.layer_params - norms) * self.setup.tokens / self.matmul

    def last_product(self) -> float:
        """Return seconds of the last product, which recomputation skips unless the MLP is tiled."""
        if self.setup.policy.mlp_tiles:
            return 0.0
        return self._fp8 * 2.0 * self.shape.hidden * self.shape.intermediate * self.setup.tokens / self.matmul

    @property
    def _fp8(self) -> float:
        """Return seconds of the layers' products ÷ their seconds in bf16."""
        share = 0.0 if self.setup.on_cpu else self.setup.fp8_layers / self.shape.num_layers
        return 1 - share + share / FP8

    def between(self) -> tuple[float, float]:
        """Seconds of one layer's operators between matrix products, forward and backward."""
        shape = self.shape
        hidden, inner = HALF * shape.hidden, HALF * shape.intermediate
        heads = HALF * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        slower = 1.0 if self.setup.compiled else UNFUSED
        unit = slower * self.setup.tokens / self.stream
        return (10 * hidden + 2 * heads + 3 * inner) * unit, (21 * hidden + 2 * heads + 5 * inner) * unit

    def loss(self) -> float:
        """Return seconds of the head's products, its fp32 gradient once per chunk, and a chunk's logits four times."""
        shape, tokens = self.shape, self.setup.tokens
        chunks = max(1.0, tokens / (LOGITS_BYTES / (HALF * shape.vocabulary)))
        moved = chunks * 2 * FULL * shape.table_params + 4 * HALF * shape.vocabulary * tokens
        return 6.0 * shape.table_params * tokens / self.matmul + moved / self.stream

    def update(self) -> float:
        """Seconds of gradient accumulation, the norm and the optimizer's step."""
        setup, params, config = self.setup, self.shape.params / self.setup.num_shards, self.setup.optimizer
        added = 10 * params * (setup.micro_batches - 1) / self.stream
        states = config.state_bytes_moved()
        if setup.on_host:
            # The weight is read and written, the gradient read, all in fp32.
            return added + (3 * FULL + states) * params / HOST_UPDATE + (HALF + FULL) * params / self.speed.host
        grad = FULL if setup.micro_batches > 1 else config.grad_bytes()
        return added + (2 * grad + states + config.weight_bytes_moved()) * params / self.stream

    def step(self) -> StepSeconds:
        shape, setup, speed = self.shape, self.setup, self.speed
        layers, batches = shape.num_layers, setup.micro_batches
        forward_attention, backward_attention = self.attention()
        forward_between, backward_between = self.between()
        products = self.layer_products()
        recomputed = (
            self.products_recomputed * (products - self.last_product()) + self.layers_recomputed * forward_between
        )
        if setup.policy.activation_checkpointing == "full":
            recomputed += forward_attention
        elif setup.policy.activation_checkpointing == "none" and setup.policy.mlp_tiles:
            recomputed += layers * 3 / 2 * self.last_product() or layers * products / 2
        forward = layers * (products + forward_between) + forward_attention
        backward = layers * (2 * products + backward_between) + backward_attention + recomputed
        waiting = self._waiting(forward * speed.layers, backward * speed.layers)
        return StepSeconds(
            matmul=batches * layers * 3 * products * speed.layers,
            attention=batches * (forward_attention + backward_attention) * speed.layers,
            recomputed=batches * recomputed * speed.layers,
            between=batches * layers * (forward_between + backward_between) * speed.layers,
            loss=batches * self.loss() * speed.rest,
            update=self.update() * speed.rest,
            waiting=batches * waiting,
            weighing=batches * self.weighing(),
        )

    def _waiting(self, forward: float, backward: float) -> float:
        """Return the seconds that copies, other ranks and kernel launches add to computing."""
        setup, speed = self.setup, self.speed
        moved = moved_bytes(self.shape, setup) / speed.host
        copies = max(0.0, moved - forward) + max(0.0, moved - backward)
        starting = max(0.0, LAUNCH * self.shape.num_layers - forward - backward)
        if setup.is_single:
            return copies + starting
        bytes_sent = sent(self.shape, setup.layout, round(self.docs.tokens), recomputed=self.layers_recomputed > 0)
        computing = forward + backward
        if setup.on_host:
            # Shards come from host memory and return to it, over the same time as weights between ranks.
            computing -= 2 * HALF * self.shape.params / setup.num_shards / speed.host
        _, attention = self.attention()
        exposed = exposed_seconds(
            bytes_sent, setup.layout, speed.links, computing=computing, backward_attention=attention
        )
        return copies + starting + exposed
