"""Peak memory of one rank in a training step, by component.

Every moment that can be the peak is evaluated: the loss, the backward pass of each layer, the embedding's gradient. A
moment lists the tensors that are alive at that time, by the rules of models/memory, models/loss.py and training/optim.
A test runs these on small models and compares bytes. A GPU computes in bf16, and several ranks keep fp32 shards; a CPU
computes in fp32. The parts sum to the peak, and more tokens never take less memory.

This holds for Llama-like decoders with cuDNN's workspace as in WORKSPACE. Allocator gaps and the CUDA context are not
included; `reserve` leaves memory for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

from unspool.models.memory.host_bytes import LayerWidths, activation_bytes
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning.cost import CPU_CHUNK, FULL, HALF, LOGITS_BYTES, Shape, kv_slices
from unspool.training.optim.base import OptimizerConfig
from unspool.training.optim.config import AdamWConfig
from unspool.training.parallel.config import Layout

ONE = Layout(replicate=1, shard=1, ring=1, ulysses=1)
GIB = 1 << 30
# Bytes of cuDNN's backward workspace per query element: the queries' gradient summed in fp32.
WORKSPACE = FULL
# Tokens, labels and positions are 64-bit numbers.
_TOKEN_BYTES = 3 * 8
# Results that still wait for their copy to the host when the next layer begins; models/memory/offload.py limits them.
MAX_IN_FLIGHT = 6 * GIB


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """Settings of a stage, and one rank's share of its work."""

    tokens: int  # per micro-batch, on this rank
    micro_batches: int = 1  # per step, on this rank
    policy: MemoryPolicy = field(default_factory=MemoryPolicy)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    compiled: bool = True
    fp8_layers: int = 0  # layers whose linear layers multiply in FP8
    # Tokens that run forward to weigh the labels of a micro-batch, and their summed squared lengths, on this rank.
    forward_only: tuple[float, float] = (0.0, 0.0)
    layout: Layout = ONE
    on_host: bool = False  # parallel.offload: weights, gradients and moments
    on_cpu: bool = False

    @property
    def element(self) -> int:
        """Bytes per number of the model's computing dtype."""
        return FULL if self.on_cpu and self.optimizer.weights == "fp32" else HALF

    @property
    def num_shards(self) -> int:
        """Number of ranks that shard weights and states."""
        return self.layout.shard * self.layout.sequence_ranks

    @property
    def is_single(self) -> bool:
        return self.num_shards * self.layout.replicate == 1


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on a device at the peak, and on its host."""

    moment: str
    weights: float  # weights in the computing dtype, or this rank's shard
    optimizer: float  # masters and moments
    gradients: float
    checkpoints: float  # inputs of recomputed layers
    kept: float  # kept results of attention and matrix products; without recomputation, all activations
    layer: float  # temporary tensors of the current layer
    loss: float  # a chunk of logits, gradients of head and states
    batch: float  # tokens, tables of positions, hidden states before and after the layers
    on_host: "HostFootprint"

    @property
    def device(self) -> float:
        return float(sum(getattr(self, part) for part in PARTS))

    @property
    def host(self) -> float:
        """Return the bytes in host memory during a step."""
        return self.on_host.step


PARTS = tuple(part.name for part in fields(Footprint) if part.name not in ("moment", "on_host"))


@dataclass(frozen=True, kw_only=True)
class HostFootprint:
    """Bytes of host memory of one rank."""

    loading: float  # the model in fp32 before the first step; 0 where ranks read their shards from the files
    states: float  # parallel.offload: weights, gradients and optimizer state
    activations: float  # pinned: checkpoints and kept results of layers
    batches: float  # pinned: the rows of this step and of the next
    copy: float  # pinned: copy of the state for writing a checkpoint; without it, training waits for the disk

    @property
    def step(self) -> float:
        return self.states + self.activations + self.batches

    @property
    def needed(self) -> float:
        return max(self.loading, self.step)


def footprint(shape: Shape, setup: StepSetup) -> Footprint:
    """Return the memory at the peak of a step."""
    return max(moments(shape, setup), key=lambda one: one.device)


def moments(shape: Shape, setup: StepSetup) -> Iterator[Footprint]:
    """Yield the memory at each moment that can be the peak."""
    counter = _MemoryCounter(shape, setup)
    yield counter.at_start()
    yield counter.at_loss()
    every = setup.policy.layers_per_checkpoint
    for first in range((shape.num_layers - 1) // every * every, -1, -every):
        yield counter.at_layer(first)
    yield counter.at_embedding()


def moved_bytes(shape: Shape, setup: StepSetup) -> float:
    """Return the bytes that one micro-batch copies to host memory and back."""
    return _MemoryCounter(shape, setup).moved()


def reserve(memory: float) -> float:
    """Return the device memory reserved for the CUDA context and for gaps between tensors."""
    return 1.0 * GIB + 0.04 * memory


class _MemoryCounter:
    def __init__(self, shape: Shape, setup: StepSetup) -> None:
        self.shape, self.setup, self.policy = shape, setup, setup.policy
        self.element = setup.element
        self.is_fp32 = self.element == FULL
        self.hidden = self.element * shape.hidden
        self.queries = self.element * shape.num_heads * shape.head_dim
        self.keys = self.element * kv_slices(shape, setup.layout.ulysses) * shape.head_dim
        self.inner = self.element * shape.intermediate
        self.grad_bytes = FULL if self.is_fp32 else setup.optimizer.grad_bytes()
        self.recomputed = self.policy.activation_checkpointing != "none"
        self.hosts = self._host_layers()
        by_layer = [self.kept(layer) for layer in range(shape.num_layers)]
        # Entry n: the bytes that the first n layers keep on the device.
        self.kept_below = [0.0, *accumulate(device for device, _ in by_layer)]

    # Independent of the context length

    def weights(self, *, reducing: bool = True) -> float:
        """Weights; of shards also what is gathered, and while `reducing` the gradients of the layers before."""
        setup = self.setup
        if setup.is_single:
            return self.element * self.shape.params
        own = 0.0 if setup.on_host else FULL * self.shape.params / setup.num_shards
        # Two gathered groups of layers, the gradient of one as computed, and that of one as reduced. The head stays
        # gathered throughout a step.
        together = min(self.policy.layers_per_checkpoint, self.shape.num_layers) * self.shape.layer_params
        return own + (2 * HALF + HALF + FULL * reducing) * together + HALF * self.shape.table_params

    def optimizer(self) -> float:
        """Masters and optimizer state; where weights are sharded, the shards are the masters."""
        setup, params, config = self.setup, self.shape.params, self.setup.optimizer
        if not setup.is_single:
            return 0.0 if setup.on_host else config.state_bytes() * params / setup.num_shards
        # Weights that compute in fp32 are their own masters.
        return ((0 if self.is_fp32 else config.master_bytes()) + config.state_bytes()) * params

    def gradients(self, params: float) -> float:
        """Gradients, when `params` parameters have one from this micro-batch."""
        setup = self.setup
        if setup.optimizer.step == "in-backward" or setup.on_host:
            return 0.0
        if not setup.is_single:
            return FULL * (self.shape.params if setup.micro_batches > 1 else params) / setup.num_shards
        grads = self.grad_bytes * params
        if setup.micro_batches == 1:
            return grads
        # Gradients of the previous micro-batch; from the second sum on in fp32.
        before = FULL if setup.micro_batches > 2 else self.grad_bytes
        return FULL * params + before * (self.shape.params - params)

    # Per token

    def attention_saved(self) -> float:
        """Bytes per token saved for the backward pass of attention and its norm."""
        norm = 2 * self.hidden if self.policy.mlp_tiles else self._norm_saved()
        copies = 1 + (self.setup.layout.ulysses > 1) + (self._in_parts > 1)
        saved = norm + self.queries + 2 * self.keys + copies * self.queries + self._sums
        # FP8 saves the inputs of products in one byte, and the joined queries, keys and values stay with the values.
        fp8 = self.queries + self.keys + self.queries / self.element - self._rounded(self.shape.hidden)
        return saved + self._fp8_share * fp8

    def mlp_saved(self) -> float:
        """Bytes per token saved for the backward pass of the MLP and its norm."""
        if self.policy.mlp_tiles:
            return 2 * self.hidden
        fp8 = self._fp8_share * self._rounded(self.shape.hidden + self.shape.intermediate)
        if self.setup.compiled:
            return 2 * self.hidden + 3 * self.inner - fp8
        return self._norm_saved() + 4 * self.inner - fp8

    @property
    def _fp8_share(self) -> float:
        return self.setup.fp8_layers / self.shape.num_layers

    def _rounded(self, width: int) -> float:
        """Return how many bytes per token the inputs of products save less in FP8 than in the computing dtype."""
        return (self.element - 1) * width

    def _norm_saved(self) -> float:
        """Bytes per token that a norm saves: input and result; if not fused, also its scaled input, in bf16 twice."""
        return (2 if self.setup.compiled else 3 if self.is_fp32 else 4) * self.hidden

    @property
    def _sums(self) -> float:
        """Log-sum-exp of attention, one per query head."""
        return FULL * self.shape.num_heads

    @property
    def _in_parts(self) -> int:
        at_once = self.policy.attention_heads_at_once
        return -(-self.shape.num_kv_heads // at_once) if at_once else 1

    def layer_peak(self) -> float:
        """Peak bytes per token in the backward pass of a layer."""
        return max(self._mlp_peak(), self._attention_peak(), self._norm_peak())

    def _mlp_peak(self) -> float:
        saved = self.attention_saved() + self.mlp_saved() + self.hidden
        if self.policy.mlp_tiles:
            tile = min(1.0, self.policy.mlp_tiles / self.setup.tokens)
            return saved + self.hidden + tile * (5 if self.setup.compiled else 6) * self.inner
        # The gradients of the gate, while their inputs are still alive. FP8 casts them when the inputs are gone.
        return saved + 2 * self.inner

    def _norm_peak(self) -> float:
        """A norm that is not fused: its saved tensors, and five temporary ones in fp32."""
        fused = self.setup.compiled or self.policy.mlp_tiles
        return 0.0 if fused else self.attention_saved() + (7 if self.is_fp32 else 13) * self.hidden

    def _attention_peak(self) -> float:
        results = 2.0 * self.queries + 2 * self.keys
        workspace = 0.0 if self.setup.on_cpu else WORKSPACE / HALF * self.queries / self._in_parts
        if self._in_parts > 1:
            results += self.queries + 2 * self.keys  # gradients of the parts, and concatenated
        if self.setup.layout.ulysses > 1:
            results += 2 * (self.queries + 2 * self.keys)  # send and receive buffers
        if self.setup.layout.ring > 1:
            results += 2 * (HALF + FULL) / HALF * 2 * self.keys  # both directions, gradients in fp32
        return self.attention_saved() + self.hidden + results + workspace

    def weight_sums(self) -> float:
        """Gradients of a layer's weights before accumulation; tiles sum them in fp32 first."""
        mlp = 3 * self.shape.hidden * self.shape.intermediate
        largest = self.shape.hidden * self.shape.intermediate
        # FP8 computes the gradients of both weights of the gate at once, with an FP8 copy of the weights.
        fp8 = (self.element + 2) * largest if self.setup.fp8_layers else 0.0
        return fp8 + ((self.element + FULL) * mlp if self.policy.mlp_tiles else self.element * largest)

    # Kept for the backward pass

    def kept(self, layer: int) -> tuple[float, float]:
        """Return the bytes that a layer keeps on the device and on the host until its backward pass."""
        tokens, policy = self.setup.tokens, self.policy
        if not self.recomputed:
            return tokens * (self.attention_saved() + self.mlp_saved()), 0.0
        if policy.activation_checkpointing == "full":
            return 0.0, 0.0
        attention = tokens * (self.queries + self._sums)
        first = self.shape.num_layers - policy.keep_products
        if layer < first:
            return attention, 0.0
        everything = float(tokens * sum(self.widths().kept(self.element)))
        return (0.0, everything) if layer in self.hosts else (everything, 0.0)

    def _host_layers(self) -> set[int]:
        keep, on_host = self.policy.keep_products, self.policy.keep_on_host
        first = self.shape.num_layers - keep
        return {first + number * keep // on_host for number in range(on_host)}

    def in_flight(self) -> float:
        """Return the bytes of the last host layer that are still being copied."""
        return min(MAX_IN_FLIGHT, 2 * self.inner * self.setup.tokens) if self.policy.keep_on_host else 0.0

    def checkpoints(self, until: int) -> float:
        """Return the bytes of activation checkpoints up to layer `until` on the device."""
        if not self.recomputed:
            return 0.0
        every, one = self.policy.layers_per_checkpoint, self.hidden * self.setup.tokens
        groups = -(-self.shape.num_layers // every)
        begun = until // every + 1
        if not self.policy.offload:
            return begun * one
        # The last one stays on the device; one other is being copied in either direction.
        on_device = (begun == groups) + (begun > 1)
        return on_device * one + (begun < groups) * one

    # Moments

    def _base(self, moment: str, params: float, layers: int) -> Footprint:
        """Return memory while `layers` layers wait for their backward pass and `params` parameters have gradients."""
        on_device = self.checkpoints(layers - 1) if layers else 0.0
        tables = 2 * FULL * self.shape.head_dim
        return Footprint(
            moment=moment,
            weights=self.weights(),
            optimizer=self.optimizer(),
            gradients=self.gradients(params),
            checkpoints=on_device,
            kept=self.kept_below[layers],
            layer=0.0,
            loss=0.0,
            batch=self.setup.tokens * (_TOKEN_BYTES + tables),
            on_host=self.on_host(),
        )

    def on_host(self) -> HostFootprint:
        setup, config = self.setup, self.setup.optimizer
        params = self.shape.params / setup.num_shards
        # One device loads the model through host memory, as does each of several with parallel.offload.
        loads_full = setup.is_single or setup.on_host
        return HostFootprint(
            loading=FULL * self.shape.params if loads_full else 0.0,
            states=(2 * FULL + config.state_bytes()) * params if setup.on_host else 0.0,
            activations=activation_bytes(self.policy, self.widths(), setup.tokens),
            batches=2.0 * setup.tokens * setup.micro_batches * _TOKEN_BYTES,
            copy=((config.master_bytes() or HALF) + config.state_bytes()) * params,
        )

    def widths(self) -> LayerWidths:
        return LayerWidths(
            num_layers=self.shape.num_layers,
            num_heads=self.shape.num_heads,
            hidden=self.shape.hidden,
            queries=self.shape.num_heads * self.shape.head_dim,
            keys=self.keys // self.element,
            inner=self.shape.intermediate,
        )

    def moved(self) -> float:
        """Return the bytes that go to the host and back in every micro-batch."""
        return activation_bytes(self.policy, self.widths(), self.setup.tokens, block_bytes=1)

    def at_start(self) -> Footprint:
        """One device loads the model in fp32; several load their shards."""
        base = self._base("loading the model", 0, 0)
        loaded = FULL * self.shape.params if self.setup.is_single else base.weights
        return replace(base, weights=loaded, optimizer=0.0, gradients=0.0, batch=0.0)

    def at_loss(self) -> Footprint:
        shape, tokens = self.shape, self.setup.tokens
        chunk = min(tokens, CPU_CHUNK if self.setup.on_cpu else LOGITS_BYTES / (HALF * shape.vocabulary))
        logits = self.element * shape.vocabulary * chunk
        base = self._base("the loss", 0, shape.num_layers)
        # The head's gradient in fp32, the gradient of the hidden states, a chunk of logits and its gradient.
        loss = FULL * shape.table_params + self.hidden * tokens + logits + chunk * self.hidden
        # The last layer's output, as the last norm saves it, and the norm's own output.
        last = self._norm_saved() * tokens
        weights = self.weights(reducing=False)
        return replace(base, weights=weights, loss=loss, kept=base.kept + self.in_flight(), batch=base.batch + last)

    def at_layer(self, first: int) -> Footprint:
        """The backward pass of the group of layers that begins with `first`."""
        shape, tokens = self.shape, self.setup.tokens
        every = self.policy.layers_per_checkpoint if self.recomputed else 1
        last = min(first + every, shape.num_layers) - 1
        done = shape.table_params + (shape.num_layers - 1 - last) * shape.layer_params
        base = self._base(f"the backward pass of layer {last + 1} of {shape.num_layers}", done, first)
        on_device = self.checkpoints(last)
        kept = base.kept
        if self.policy.keep_on_host:
            if first - 1 in self.hosts:
                kept += self.kept(first - 1)[1]
            elif first > max(self.hosts):
                kept += self.in_flight()
        # All layers of a group except one wait with their saved tensors.
        waiting = (last - first) * (self.attention_saved() + self.mlp_saved())
        own = self.layer_peak() + waiting
        # The group's input counts as a checkpoint; an unfused norm saves its own copy in fp32.
        shared = self.setup.compiled or self.policy.mlp_tiles or self.is_fp32
        own -= self.hidden if self.recomputed and shared else 0.0
        return replace(
            base,
            weights=self.weights(reducing=last < shape.num_layers - 1),
            checkpoints=on_device,
            kept=kept,
            layer=own * tokens + self.weight_sums(),
            loss=self._head_gradient(),
        )

    def _head_gradient(self) -> float:
        """Return the bytes of the head's gradient, which stays until the end if weights are sharded or tied."""
        table = self.shape.table_params
        if not self.setup.is_single:
            return (HALF + FULL) * table if self.shape.tied else FULL * table
        return self.element * table if self.shape.tied else 0.0

    def at_embedding(self) -> Footprint:
        shape = self.shape
        layers = shape.num_layers * shape.layer_params
        base = self._base("the embedding's gradient", layers + (0 if shape.tied else shape.table_params), 0)
        # As computed, and in fp32 if the optimizer needs that; a tied gradient is added to the head's.
        in_fp32 = not self.is_fp32 and (self.grad_bytes == FULL or self.setup.micro_batches > 1)
        table = (self.element + (FULL if in_fp32 else 0)) * shape.table_params
        tied = self.element * shape.table_params if shape.tied else 0.0
        return replace(base, layer=table + tied + self.hidden * self.setup.tokens)
