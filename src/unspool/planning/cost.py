"""What a stage on several devices takes of each: memory by what holds it, bytes sent by what sends them, seconds.

In: a model's shape, a layout, the tokens of a row. Out: `Memory`, `Sent` and `Seconds` of one rank.
Convention: layers compute in bf16 (2 bytes), ranks keep their parts of weights, moments and gradients in fp32 (16),
layers are computed again in the backward pass (`recompute: full`), and one row is one micro-batch.
Promise: sizes of what exists are counted as in fsdp.py, ulysses.py, ring.py and loss.py; a test counts them there.
Price: the allocator's gaps, NCCL's own buffers (about 1 GiB) and the CUDA context (about 0.5) are not in it.
Elsewhere: rates that were measured, and the tables made of all this (tools/scaling_tables.py, docs/scaling.md).
"""

from dataclasses import dataclass, fields

from unspool.core.config import lookup
from unspool.training.parallel.config import Layout

HALF, FULL = 2, 4  # bytes of bf16 and fp32
# Masters, two moments and the gradient of each parameter, all of which FSDP divides.
STATE_BYTES = 4 * FULL
# Logits that loss.py holds at a time on a GPU.
LOGITS_BYTES = 384 << 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder as the Llama family builds it."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False

    @property
    def layer_params(self) -> int:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate + 2)

    @property
    def table_params(self) -> int:
        """The head, or the embedding."""
        return self.vocabulary * self.hidden

    @property
    def params(self) -> int:
        return self.num_layers * self.layer_params + (1 if self.tied else 2) * self.table_params + self.hidden

    @property
    def matmul_params(self) -> int:
        """Those that multiply every token."""
        return self.num_layers * self.layer_params + self.table_params


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of the stage, as docs/memory.md tells them."""

    offload: bool = True
    layers_per_checkpoint: int = 1
    mlp_tiles: int | None = 16384


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, at the moment of the backward pass when a layer is computed again; and on its host."""

    states: float  # this rank's parts of masters, moments and gradients
    gathered: float  # layers that are whole: the one at work, the next, and its gradient on the way
    head: float  # the head, whole throughout a step, and its gradient
    checkpoints: float  # inputs of layers
    layer: float  # what one layer has at once
    loss: float  # a chunk of logits, gradients of states
    host: float  # checkpoints that wait there; of this rank

    @property
    def device(self) -> float:
        """The loss is computed when no layer is at work."""
        return self.states + self.gathered + self.head + self.checkpoints + max(self.layer, self.loss)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that one rank sends for one row: forward, computed again, backward."""

    weights: float  # FSDP: layers gathered twice, gradients summed
    copies: float  # gradients summed over whole copies (replicate); once a step in truth, here for one row
    heads: float  # Ulysses
    keys: float  # ring


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Operations and bytes per second. The first three were measured on one H200."""

    matmul: float = 750e12
    attention_forward: float = 617e12
    attention_backward: float = 543e12
    inside: float = 0.8 * 450e9  # NVLink 4, each direction, per device; four fifths of it are reached
    between: float = 0.8 * 50e9  # a 400 Gbit/s card per device
    node: int = 8  # devices


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one row on one rank; weights travel beside computing, keys beside attention, heads beside nothing."""

    matmul: float
    attention: float
    weights: float
    heads: float
    keys: float

    @property
    def row(self) -> float:
        """With all that can be hidden hidden."""
        computing = self.matmul + max(self.attention, self.keys)
        return max(computing, self.weights) + self.heads


def own_tokens(layout: Layout, row: int) -> int:
    return -(-row // layout.sequence_ranks)


def kv_slices(shape: Shape, ulysses: int) -> int:
    """KV heads that are sent of each token: all of them once, or one for each rank where ranks share them."""
    return max(shape.num_kv_heads, ulysses)


def ulysses_elements(shape: Shape, ulysses: int, tokens: int) -> int:
    """Numbers in the two messages of one layer's forward pass: to heads, and back to tokens."""
    slices = 2 * shape.num_heads + 2 * kv_slices(shape, ulysses)
    return slices * shape.head_dim * tokens


def memory(shape: Shape, layout: Layout, row: int, settings: Settings | None = None) -> Memory:
    """Of a rank that trains rows of `row` tokens, one at a time."""
    settings = settings or Settings()
    parts = layout.shard * layout.sequence_ranks
    tokens = own_tokens(layout, row)
    checkpoints = shape.num_layers / settings.layers_per_checkpoint * tokens * shape.hidden * HALF
    together = settings.layers_per_checkpoint * shape.layer_params
    alone = parts * layout.replicate == 1
    return Memory(
        states=STATE_BYTES * shape.params / parts,
        # One at work, one coming, and the gradient of one as it was computed and as it is summed.
        gathered=HALF * shape.params if alone else (2 * HALF + HALF + FULL) * together,
        head=0 if alone else (HALF + FULL) * shape.table_params,
        checkpoints=0 if settings.offload else checkpoints,
        layer=settings.layers_per_checkpoint * _layer(shape, layout, tokens, settings),
        loss=min(LOGITS_BYTES, HALF * shape.vocabulary * tokens) + 2 * HALF * shape.hidden * tokens,
        host=checkpoints if settings.offload else 0,
    )


def _layer(shape: Shape, layout: Layout, tokens: int, settings: Settings) -> float:
    """The larger of attention's backward pass and the MLP's, and four states: input, gradient, norm, residual."""
    queries = shape.num_heads * shape.head_dim
    keys = 2 * kv_slices(shape, layout.ulysses) * shape.head_dim
    # Queries, keys, values and output with their gradients; the kernel sums the queries' gradient in fp32.
    attention = HALF * 2 * (2 * queries + keys) + FULL * queries
    if layout.ulysses > 1:
        # What is sent and what is received of the larger message.
        attention += HALF * 2 * (queries + keys)
    if layout.ring > 1:
        # Keys and values of two ranks, and their gradients in fp32, each coming and going.
        attention += 2 * (HALF + FULL) * keys
    # Gate, up, their product, and the gradients of all three.
    inside = HALF * 6 * shape.intermediate * min(tokens, settings.mlp_tiles or tokens)
    return max(attention * tokens, inside) + 4 * HALF * shape.hidden * tokens


def sent(shape: Shape, layout: Layout, row: int) -> Sent:
    tokens = own_tokens(layout, row)
    parts = layout.shard * layout.sequence_ranks
    others = (parts - 1) / parts
    degree, ring = layout.ulysses, layout.ring
    keys = 2 * kv_slices(shape, degree) * shape.head_dim * tokens * shape.num_layers
    return Sent(
        weights=(2 * HALF + FULL) * shape.params * others,
        copies=2 * FULL * shape.params / parts * (layout.replicate - 1) / layout.replicate,
        # Forward, again, backward.
        heads=3 * HALF * ulysses_elements(shape, degree, tokens) * shape.num_layers * (degree - 1) / degree,
        # Backward, the gradients come home: one turn more.
        keys=(3 * HALF * (ring - 1) + FULL * ring) * keys if ring > 1 else 0.0,
    )


def seconds(shape: Shape, layout: Layout, row: int, rates: Rates | None = None) -> Seconds:
    """`row` is one document: attention of shorter ones takes less."""
    rates = rates or Rates()
    tokens = own_tokens(layout, row)
    forward = attention_flops(shape, row) / layout.sequence_ranks
    bytes_sent = sent(shape, layout, row)
    parts = layout.shard * layout.sequence_ranks
    # Rings over whole nodes use all their cards at once; keys go from one device to one other.
    collective = rates.inside if parts <= rates.node else min(rates.inside, rates.node * rates.between)
    return Seconds(
        matmul=8 * shape.matmul_params * tokens / rates.matmul,
        # The backward pass has five products where the forward pass has two.
        attention=2 * forward / rates.attention_forward + 2.5 * forward / rates.attention_backward,
        weights=bytes_sent.weights / collective,
        heads=bytes_sent.heads / (rates.inside if layout.ulysses <= rates.node else rates.between),
        keys=bytes_sent.keys / (rates.inside if layout.sequence_ranks <= rates.node else rates.between),
    )


def attention_flops(shape: Shape, row: int) -> float:
    """Of the forward pass over one causal row: scores and sums of values, half of them."""
    return 2.0 * row * row * shape.num_heads * shape.head_dim * shape.num_layers


def as_dict(record: Memory | Sent | Seconds) -> dict[str, float]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


# GPUs that a stage can be planned for: memory, and how fast they are beside the one that was measured.


GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    title: str
    gib: float  # that a program sees
    tflops: float  # dense bf16, of the data sheet
    bandwidth: float  # TB/s of its own memory
    link: float  # GB/s to the other GPUs of a machine, each direction
    host: float  # GB/s to host memory that is really reached
    measured: bool = False

    @property
    def memory(self) -> float:
        return self.gib * GIB


_ALL = (
    Gpu(name="h200", title="NVIDIA H200", gib=139.8, tflops=989, bandwidth=4.8, link=450, host=50, measured=True),
    Gpu(name="h100", title="NVIDIA H100 80GB (SXM)", gib=79.1, tflops=989, bandwidth=3.35, link=450, host=50),
    Gpu(name="h100-pcie", title="NVIDIA H100 80GB (PCIe)", gib=79.1, tflops=756, bandwidth=2.0, link=50, host=50),
    Gpu(name="h100-nvl", title="NVIDIA H100 NVL 94GB", gib=93.1, tflops=835, bandwidth=3.9, link=300, host=50),
    Gpu(name="b200", title="NVIDIA B200", gib=178.0, tflops=2250, bandwidth=8.0, link=900, host=50),
    Gpu(name="a100", title="NVIDIA A100 80GB", gib=79.1, tflops=312, bandwidth=2.0, link=300, host=22),
    Gpu(name="a100-40", title="NVIDIA A100 40GB", gib=39.4, tflops=312, bandwidth=1.55, link=300, host=22),
    Gpu(name="l40s", title="NVIDIA L40S 48GB", gib=44.4, tflops=362, bandwidth=0.86, link=25, host=22),
    Gpu(name="a6000", title="NVIDIA RTX A6000 48GB", gib=47.4, tflops=155, bandwidth=0.77, link=25, host=22),
    Gpu(name="l4", title="NVIDIA L4 24GB", gib=22.0, tflops=121, bandwidth=0.3, link=12, host=11),
    Gpu(name="4090", title="NVIDIA RTX 4090 24GB", gib=23.5, tflops=165, bandwidth=1.0, link=22, host=22),
    Gpu(name="5090", title="NVIDIA RTX 5090 32GB", gib=31.3, tflops=209, bandwidth=1.79, link=45, host=45),
    Gpu(name="3090", title="NVIDIA RTX 3090 24GB", gib=23.5, tflops=71, bandwidth=0.94, link=22, host=22),
)
GPUS = {gpu.name: gpu for gpu in _ALL}
REFERENCE = GPUS["h200"]


def find_gpu(name: str) -> Gpu:
    return lookup(GPUS, name.lower(), kind="--gpu")


def named_like(device_name: str, memory: float) -> Gpu | None:
    """The entry for what a driver calls a device, such as `NVIDIA H100 80GB HBM3`; of several, by memory."""
    words = device_name.lower().replace("-", " ").split()
    fitting = [gpu for gpu in _ALL if gpu.name.split("-")[0] in words]
    return min(fitting, key=lambda gpu: abs(gpu.memory - memory)) if fitting else None
