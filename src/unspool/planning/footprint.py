"""What one rank holds at the fullest moment of a training step, by what holds it.

In: a model's shape, what a stage says about memory and this rank's share of it (`Held`). Out: `Footprint`.
Every moment that can be the fullest is looked at: the loss, the backward pass of each layer, the embedding's gradient,
the update. A moment is a list of what lives then, by the rules of recompute.py, keep.py, offload.py, tiling.py, loss.py
and optimizer.py; a test runs those on small models and compares with the bytes that were alive.
Convention: a GPU computes in bf16, ranks of several keep their parts in fp32 (fsdp.py).
Promise: parts sum to the peak; more tokens never take less.
Price: Llama's kind of decoder; cuDNN's workspace as in WORKSPACE; the allocator's gaps and the CUDA context are not in
it (`reserve` leaves room for them).
Elsewhere: seconds (cost_time.py), devices (cost_gpus.py), several devices in the large (cost.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

from unspool.models.memory.policy import MemoryPolicy
from unspool.planning.cost import FULL, HALF, LOGITS_BYTES, Shape, kv_slices
from unspool.training.optim.base import OptimizerConfig
from unspool.training.optim.config import AdamWConfig
from unspool.training.parallel.config import Layout

ONE = Layout(replicate=1, shard=1, ring=1, ulysses=1)
GIB = 1 << 30
# What cuDNN's backward pass takes besides its results, per query number: the queries' gradient summed in fp32.
WORKSPACE = FULL
# Positions: cosines and sines in fp32. Tokens, labels and positions are 64-bit numbers.
_NUMBERS = 3 * 8
# Results that wait for their copy to the host when the next layer begins; as offload.py bounds them.
MOST_LEAVING = 6 * GIB


@dataclass(frozen=True, kw_only=True)
class Held:
    """What decides how much is held: a stage's settings, and this rank's share of its work."""

    tokens: int  # of one micro-batch, on this rank
    micro_batches: int = 1  # of one step, on this rank
    policy: MemoryPolicy = field(default_factory=MemoryPolicy)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    compiled: bool = True
    layout: Layout = ONE
    on_host: bool = False  # parallel.offload: weights, gradients and moments

    @property
    def parts(self) -> int:
        """Ranks that divide weights and states among them."""
        return self.layout.shard * self.layout.sequence_ranks

    @property
    def alone(self) -> bool:
        return self.parts * self.layout.replicate == 1


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on a device at the fullest moment, and on its host."""

    moment: str
    weights: float  # what the model computes with, or this rank's part of it
    optimizer: float  # masters and moments
    gradients: float
    checkpoints: float  # inputs of layers that are computed again
    kept: float  # results of attention and of matrix products; of layers that are not recomputed, all they need
    layer: float  # what the layer at work has besides
    loss: float  # a chunk of logits, gradients of head and states
    batch: float  # tokens, tables of positions, hidden states before and after the layers
    host: float

    @property
    def device(self) -> float:
        return float(sum(getattr(self, part) for part in PARTS))


PARTS = tuple(part.name for part in fields(Footprint) if part.name not in ("moment", "host"))


def footprint(shape: Shape, held: Held) -> Footprint:
    """The fullest moment of a step."""
    return max(moments(shape, held), key=lambda one: one.device)


def moments(shape: Shape, held: Held) -> Iterator[Footprint]:
    """All moments that can be the fullest."""
    count = _Count(shape, held)
    yield count.at_start()
    yield count.at_loss()
    every = held.policy.layers_per_checkpoint
    for first in range((shape.num_layers - 1) // every * every, -1, -every):
        yield count.at_layer(first)
    yield count.at_embedding()


def moved_bytes(shape: Shape, held: Held) -> float:
    """That one micro-batch sends to host memory, and fetches back."""
    return _Count(shape, held).moved()


def reserve(memory: float) -> float:
    """Of a device's memory, what is left to the CUDA context and to gaps between tensors."""
    return 1.0 * GIB + 0.04 * memory


class _Count:
    def __init__(self, shape: Shape, held: Held) -> None:
        self.shape, self.held, self.policy = shape, held, held.policy
        self.hidden = HALF * shape.hidden
        self.queries = HALF * shape.num_heads * shape.head_dim
        self.keys = HALF * kv_slices(shape, held.layout.ulysses) * shape.head_dim
        self.inner = HALF * shape.intermediate
        self.grad_bytes = held.optimizer.grad_bytes()
        self.recomputed = self.policy.activation_checkpointing != "none"
        self.hosts = self._host_layers()
        by_layer = [self.kept(layer) for layer in range(shape.num_layers)]
        # What the first so many layers keep on the device.
        self.kept_below = [0.0, *accumulate(device for device, _ in by_layer)]
        self.kept_on_host = sum(host for _, host in by_layer)

    # What does not grow with the context

    def weights(self) -> float:
        held = self.held
        if held.alone:
            return HALF * self.shape.params
        own = 0.0 if held.on_host else FULL * self.shape.params / held.parts
        # One group of layers at work, one coming, and the gradient of one as it is computed and as it is summed;
        # the head is whole throughout a step.
        together = min(self.policy.layers_per_checkpoint, self.shape.num_layers) * self.shape.layer_params
        return own + (2 * HALF + HALF + FULL) * together + HALF * self.shape.table_params

    def optimizer(self) -> float:
        """Masters of a single device; where weights are divided, the parts are the masters."""
        held, params, config = self.held, self.shape.params, self.held.optimizer
        if not held.alone:
            return 0.0 if held.on_host else config.state_bytes() * params / held.parts
        return (config.master_bytes() + config.state_bytes()) * params

    def gradients(self, params: float) -> float:
        """Of so many parameters that have got theirs in this micro-batch."""
        held = self.held
        if held.optimizer.step == "in-backward" or held.on_host:
            return 0.0
        if not held.alone:
            return FULL * (self.shape.params if held.micro_batches > 1 else params) / held.parts
        grads = self.grad_bytes * params
        if held.micro_batches == 1:
            return grads
        # Of the micro-batch before as it came; from the second sum on, in fp32.
        before = FULL if held.micro_batches > 2 else self.grad_bytes
        return FULL * params + before * (self.shape.params - params)

    # Per token

    def attention_saved(self) -> float:
        """What the backward pass of attention and of the norm before it needs, of one token."""
        norm = 2 * self.hidden if self.held.compiled else 4 * self.hidden
        if self.policy.mlp_tiles:
            norm = 2 * self.hidden
        copies = 1 + (self.held.layout.ulysses > 1) + (self._in_parts > 1)
        return norm + self.queries + 2 * self.keys + copies * self.queries + self._sums

    def mlp_saved(self) -> float:
        """Likewise of the MLP and of its norm."""
        if self.policy.mlp_tiles:
            return 2 * self.hidden
        if self.held.compiled:
            return 2 * self.hidden + 3 * self.inner
        return 4 * self.hidden + 4 * self.inner

    @property
    def _sums(self) -> float:
        """Logarithms of attention's sums, one for each query head."""
        return FULL * self.shape.num_heads

    @property
    def _in_parts(self) -> int:
        at_once = self.policy.attention_heads_at_once
        return -(-self.shape.num_kv_heads // at_once) if at_once else 1

    def layer_peak(self) -> float:
        """Of one token, while a layer's backward pass is fullest: in the MLP, or in attention."""
        return max(self._mlp_peak(), self._attention_peak(), self._norm_peak())

    def _mlp_peak(self) -> float:
        saved = self.attention_saved() + self.mlp_saved() + self.hidden
        if self.policy.mlp_tiles:
            tile = min(1.0, self.policy.mlp_tiles / self.held.tokens)
            return saved + self.hidden + tile * (5 if self.held.compiled else 6) * self.inner
        # The gate's gradients, while what they are made of is still there.
        return saved + 2 * self.inner

    def _norm_peak(self) -> float:
        """A norm that is not fused: what it keeps, and five tensors in fp32."""
        fused = self.held.compiled or self.policy.mlp_tiles
        return 0.0 if fused else self.attention_saved() + 13 * self.hidden

    def _attention_peak(self) -> float:
        results = 2.0 * self.queries + 2 * self.keys
        workspace = WORKSPACE / HALF * self.queries / self._in_parts
        if self._in_parts > 1:
            results += self.queries + 2 * self.keys  # gradients of the parts, and put together
        if self.held.layout.ulysses > 1:
            results += 2 * (self.queries + 2 * self.keys)  # what is sent and what is received
        if self.held.layout.ring > 1:
            results += 2 * (HALF + FULL) / HALF * 2 * self.keys  # coming and going, gradients in fp32
        return self.attention_saved() + self.hidden + results + workspace

    def weight_sums(self) -> float:
        """Gradients of a layer's weights on their way; in tiles they are summed in fp32 first."""
        mlp = 3 * self.shape.hidden * self.shape.intermediate
        largest = self.shape.hidden * self.shape.intermediate
        return (HALF + FULL) * mlp if self.policy.mlp_tiles else HALF * largest

    # What layers leave for the backward pass

    def kept(self, layer: int) -> tuple[float, float]:
        """Bytes of a layer on the device and on the host, from its forward pass until its backward pass."""
        tokens, policy = self.held.tokens, self.policy
        if not self.recomputed:
            return tokens * (self.attention_saved() + self.mlp_saved()), 0.0
        if policy.activation_checkpointing == "full":
            return 0.0, 0.0
        attention = tokens * (self.queries + self._sums)
        first = self.shape.num_layers - policy.keep_products
        if layer < first:
            return attention, 0.0
        everything = attention + tokens * (self.queries + 2 * self.keys + self.hidden + 2 * self.inner)
        return (0.0, everything) if layer in self.hosts else (everything, 0.0)

    def _host_layers(self) -> set[int]:
        keep, on_host = self.policy.keep_products, self.policy.keep_on_host
        first = self.shape.num_layers - keep
        return {first + number * keep // on_host for number in range(on_host)}

    def leaving(self) -> float:
        """The last kept results of the last host layer, which no later one has pushed out."""
        return min(MOST_LEAVING, 2 * self.inner * self.held.tokens) if self.policy.keep_on_host else 0.0

    def checkpoints(self, until: int) -> tuple[float, float]:
        """Bytes of inputs of the groups that begin up to layer `until`: on the device, and on the host."""
        if not self.recomputed:
            return 0.0, 0.0
        every, one = self.policy.layers_per_checkpoint, self.hidden * self.held.tokens
        groups = -(-self.shape.num_layers // every)
        begun = until // every + 1
        if not self.policy.offload:
            return begun * one, 0.0
        # The last group's stays; of the others one is on its way, in either direction.
        on_device = (begun == groups) + (begun > 1)
        return on_device * one + (begun < groups) * one, (groups - 1) * one

    # Moments

    def _base(self, moment: str, params: float, layers: int) -> Footprint:
        """What is there while `layers` layers still wait for their backward pass, and `params` have had theirs."""
        on_device, _ = self.checkpoints(layers - 1) if layers else (0.0, 0.0)
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
            batch=self.held.tokens * (_NUMBERS + tables),
            host=self.host(),
        )

    def host(self) -> float:
        per_param = 2 * FULL + self.held.optimizer.state_bytes()  # weight and gradient, states
        states = per_param * self.shape.params / self.held.parts if self.held.on_host else 0.0
        return states + self.moved()

    def moved(self) -> float:
        """Bytes that go to the host in every forward pass, and come back."""
        return self.checkpoints(self.shape.num_layers - 1)[1] + self.kept_on_host

    def at_start(self) -> Footprint:
        """One device loads the model in fp32; of several, each gets its part."""
        base = self._base("loading the model", 0, 0)
        loaded = FULL * self.shape.params if self.held.alone else base.weights
        return replace(base, weights=loaded, optimizer=0.0, gradients=0.0, batch=0.0)

    def at_loss(self) -> Footprint:
        shape, tokens = self.shape, self.held.tokens
        logits = min(LOGITS_BYTES, HALF * shape.vocabulary * tokens)
        chunk = logits / (HALF * shape.vocabulary)
        base = self._base("the loss", 0, shape.num_layers)
        # The head's gradient in fp32, that of the states, a chunk of logits and what becomes of it.
        loss = FULL * shape.table_params + self.hidden * tokens + logits + chunk * self.hidden
        # The last layer's result, as the last norm keeps it, and the norm's own.
        last = 2 * self.hidden if self.held.compiled else 4 * self.hidden
        return replace(base, loss=loss, kept=base.kept + self.leaving(), batch=base.batch + last * tokens)

    def at_layer(self, first: int) -> Footprint:
        """The backward pass of the group of layers that begins with `first`."""
        shape, tokens = self.shape, self.held.tokens
        every = self.policy.layers_per_checkpoint if self.recomputed else 1
        last = min(first + every, shape.num_layers) - 1
        done = shape.table_params + (shape.num_layers - 1 - last) * shape.layer_params
        base = self._base(f"the backward pass of layer {last + 1} of {shape.num_layers}", done, first)
        on_device, _ = self.checkpoints(last)
        kept = base.kept
        if self.policy.keep_on_host:
            if first - 1 in self.hosts:
                kept += self.kept(first - 1)[1]
            elif first > max(self.hosts):
                kept += self.leaving()
        # Of the layers of a group all but one wait as they are.
        waiting = (last - first) * (self.attention_saved() + self.mlp_saved())
        own = self.layer_peak() + waiting
        # The group's input is counted with the checkpoints; a norm that is not fused keeps one of its own, in fp32.
        own -= self.hidden if self.recomputed and (self.held.compiled or self.policy.mlp_tiles) else 0.0
        return replace(
            base,
            checkpoints=on_device,
            kept=kept,
            layer=own * tokens + self.weight_sums(),
            loss=self._head_on_its_way(),
        )

    def _head_on_its_way(self) -> float:
        """Where several devices share weights, the head's gradient is whole until the end; likewise a tied one."""
        table = self.shape.table_params
        if not self.held.alone:
            return (HALF + FULL) * table if self.shape.tied else FULL * table
        return HALF * table if self.shape.tied else 0.0

    def at_embedding(self) -> Footprint:
        shape = self.shape
        layers = shape.num_layers * shape.layer_params
        base = self._base("the embedding's gradient", layers + (0 if shape.tied else shape.table_params), 0)
        # As it comes, and in fp32 where AdamW takes it so; a tied one has the head's to be added to.
        in_fp32 = self.grad_bytes == FULL or self.held.micro_batches > 1
        table = (HALF + (FULL if in_fp32 else 0)) * shape.table_params
        tied = HALF * shape.table_params if shape.tied else 0.0
        return replace(base, layer=table + tied + self.hidden * self.held.tokens)
