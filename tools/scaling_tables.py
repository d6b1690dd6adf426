"""Print tables of memory and speed on several GPUs: `python tools/scaling_tables.py`.

All numbers are computed from a model's shape, rates measured on one H200, and stated link speeds. Layers compute in
bf16 and are recomputed in the backward pass, ranks keep fp32 shards of weights, moments and gradients, and one row is
one micro-batch. The allocator's gaps, NCCL's buffers (about 1 GiB) and the CUDA context (about 0.5) are not included.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from unspool.core.sizes import format_size
from unspool.planning.cost import FULL, HALF, LOGITS_BYTES, Links, Shape, kv_slices, own_tokens, sent
from unspool.training.parallel.config import Layout, fits_heads

MODELS = {
    "8B": Shape(
        num_layers=32, hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8, head_dim=128, vocabulary=128256
    ),
    "70B": Shape(
        num_layers=80, hidden=8192, intermediate=28672, num_heads=64, num_kv_heads=8, head_dim=128, vocabulary=128256
    ),
}
CONTEXTS = [1 << power for power in range(16, 23)]
DEVICES = (8, 16, 32, 64, 128, 256, 512)
GIB = 1 << 30
# Available for tensors on a device of 80 GB, after the CUDA context, NCCL and the allocator's gaps.
ROOM = 68 * GIB
HOST_ROOM = 128 * GIB  # for one device: half of what machines with eight of them usually have
BATCH = 8 << 20  # tokens of a step, ProLong's


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Memory settings of a stage (docs/concepts/memory.md)."""

    offload: bool = True
    layers_per_checkpoint: int = 1
    mlp_tiles: int | None = 16384


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device while the backward pass recomputes a layer, and on its host."""

    states: float  # this rank's parts of masters, moments and gradients
    gathered: float  # gathered layers: the current one, the next, and its gradient in flight
    head: float  # the head, gathered for the whole step, and its gradient
    checkpoints: float  # inputs of layers
    layer: float  # tensors of one layer
    loss: float  # a chunk of logits, gradients of states
    host: float  # offloaded activation checkpoints of this rank

    @property
    def device(self) -> float:
        """Peak bytes; the loss is computed while no layer is."""
        return self.states + self.gathered + self.head + self.checkpoints + max(self.layer, self.loss)


@dataclass(frozen=True, kw_only=True)
class Rates(Links):
    """Operations and bytes per second, measured on one H200."""

    matmul: float = 750e12
    attention_forward: float = 617e12
    attention_backward: float = 543e12


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one row on one rank; weights overlap with computation, keys with attention, heads with nothing."""

    matmul: float
    attention: float
    weights: float
    heads: float
    keys: float

    @property
    def row(self) -> float:
        """Seconds with full overlap."""
        computing = self.matmul + max(self.attention, self.keys)
        return max(computing, self.weights) + self.heads


def memory(shape: Shape, layout: Layout, row: int, settings: Settings | None = None) -> Memory:
    """Return the memory of a rank that trains rows of `row` tokens, one at a time."""
    settings = settings or Settings()
    parts = layout.shard * layout.sequence_ranks
    tokens = own_tokens(layout, row)
    checkpoints = shape.num_layers / settings.layers_per_checkpoint * tokens * shape.hidden * HALF
    together = settings.layers_per_checkpoint * shape.layer_params
    alone = parts * layout.replicate == 1
    return Memory(
        states=4 * FULL * shape.params / parts,
        # The current layer, the next one, and one gradient as computed and as summed.
        gathered=HALF * shape.params if alone else (2 * HALF + HALF + FULL) * together,
        head=0 if alone else (HALF + FULL) * shape.table_params,
        checkpoints=0 if settings.offload else checkpoints,
        layer=settings.layers_per_checkpoint * _layer(shape, layout, tokens, settings),
        loss=min(LOGITS_BYTES, HALF * shape.vocabulary * tokens) + 2 * HALF * shape.hidden * tokens,
        host=checkpoints if settings.offload else 0,
    )


def _layer(shape: Shape, layout: Layout, tokens: int, settings: Settings) -> float:
    """Return the larger of the backward passes of attention and MLP, plus input, gradient, norm and residual."""
    queries = shape.num_heads * shape.head_dim
    keys = 2 * kv_slices(shape, layout.ulysses) * shape.head_dim
    # Queries, keys, values and output with their gradients; the kernel sums the queries' gradient in fp32.
    attention = HALF * 2 * (2 * queries + keys) + FULL * queries
    if layout.ulysses > 1:
        # The larger message, sent and received.
        attention += HALF * 2 * (queries + keys)
    if layout.ring > 1:
        # Keys and values of two ranks, and their gradients in fp32, each sent and received.
        attention += 2 * (HALF + FULL) * keys
    # Gate, up, their product, and the gradients of all three.
    inside = HALF * 6 * shape.intermediate * min(tokens, settings.mlp_tiles or tokens)
    return max(attention * tokens, inside) + 4 * HALF * shape.hidden * tokens


def seconds(shape: Shape, layout: Layout, row: int, rates: Rates | None = None) -> Seconds:
    """`row` is one document: attention of shorter ones takes less."""
    rates = rates or Rates()
    tokens = own_tokens(layout, row)
    forward = attention_flops(shape, row) / layout.sequence_ranks
    bytes_sent = sent(shape, layout, row)
    parts = layout.shard * layout.sequence_ranks
    # Rings over whole nodes use all network cards; keys go from one device to one other.
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
    """Return the FLOPs of the forward pass over one causal row: half of all scores and sums of values."""
    return 2.0 * row * row * shape.num_heads * shape.head_dim * shape.num_layers


def choose(shape: Shape, context: int, devices: int, *, ring: bool = True) -> Layout | None:
    """Return the smallest layout in which a row fits, with a row for each group; None if there is none."""
    node = Rates().node
    for ranks in (1 << power for power in range(10)):
        ulysses = min(ranks, node)
        rest = ranks // ulysses
        if ranks > devices or (rest > 1 and not ring) or not fits_heads(ulysses, shape.num_heads, shape.num_kv_heads):
            continue
        layout = Layout(replicate=1, shard=devices // ranks, ring=rest, ulysses=ulysses)
        held = memory(shape, layout, context)
        enough_rows = layout.shard * context <= max(BATCH, context)
        if enough_rows and held.device <= ROOM and held.host <= HOST_ROOM:
            return layout
    return None


def spelled(layout: Layout) -> str:
    axes = {name: getattr(layout, name) for name in ("shard", "ulysses", "ring")}
    return " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1)


def line(shape: Shape, context: int, devices: int, layout: Layout) -> str:
    held, time = memory(shape, layout, context), seconds(shape, layout, context)
    messages = sent(shape, layout, context)
    speed = layout.shard * context / time.row / devices
    cells = [
        format_size(context),
        str(devices),
        spelled(layout),
        f"{held.device / GIB:.0f}",
        f"{held.host / GIB:.0f}",
        f"{time.row:.1f}" if time.row < 100 else f"{time.row:,.0f}",
        triple(part / 1e9 for part in (messages.weights, messages.heads, messages.keys)),
        triple((time.weights, time.heads, time.keys)),
        f"{speed:,.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def triple(numbers: Iterable[float]) -> str:
    return " / ".join(f"{number:.0f}" if number >= 10 else f"{number:.1g}" for number in numbers)


HEADER = (
    "| row | GPUs | layout | GiB on a GPU | host GiB for it | s for a row | GB sent: weights / heads / keys | "
    "s for that | tokens a second and GPU |\n" + "| --- " * 9 + "|"
)


def model_table(name: str) -> str:
    lines = []
    for context in CONTEXTS:
        fitting = {devices: choose(MODELS[name], context, devices) for devices in DEVICES}
        chosen = [(devices, layout) for devices, layout in fitting.items() if layout is not None]
        # The smallest sufficient number, 64 and 512.
        wanted = {chosen[0][0], 64, 512} if chosen else set()
        lines += [line(MODELS[name], context, devices, layout) for devices, layout in chosen if devices in wanted]
    return "\n".join([HEADER, *lines])


def parts_table() -> str:
    """Return the table of memory by part."""
    rows = ["| model | row | layout | states | layers gathered | head | one layer | loss | GiB |", "| --- " * 9 + "|"]
    for name, context, devices in (("8B", 1 << 16, 8), ("8B", 1 << 19, 8), ("8B", 1 << 22, 64), ("70B", 1 << 19, 64)):
        layout = choose(MODELS[name], context, devices)
        assert layout is not None
        held = memory(MODELS[name], layout, context)
        parts = (held.states, held.gathered, held.head, held.layer, held.loss, held.device)
        cells = [name, format_size(context), spelled(layout), *(f"{part / GIB:.1f}" for part in parts)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def prolong_table() -> str:
    """Return the table of recipe prolong-512k: 8M tokens a step, no ring (document masks), one document per row."""
    rows = [
        "| GPUs | `parallel` | micro-batches of each group in a step | GiB on a GPU | host GiB for it | "
        "s for a step, at most | tokens a second and GPU, at least |",
        "| --- " * 7 + "|",
    ]
    context = 1 << 19
    for devices in (8, 16, 32, 64, 128):
        layout = Layout(replicate=1, shard=devices // 8, ring=1, ulysses=8)
        held, time = memory(MODELS["8B"], layout, context), seconds(MODELS["8B"], layout, context)
        micro = BATCH // context // layout.shard
        step = micro * time.row
        cells = [
            str(devices),
            f"`{{shard: {layout.shard}, ulysses: 8}}`",
            str(micro),
            f"{held.device / GIB:.0f}",
            f"{held.host / GIB:.0f}",
            f"{step:,.0f}",
            f"{BATCH / step / devices:,.0f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def tables() -> dict[str, str]:
    return {"8B": model_table("8B"), "70B": model_table("70B"), "parts": parts_table(), "prolong": prolong_table()}


def main() -> None:
    for name, table in tables().items():
        print(f"{name}\n\n{table}\n")


if __name__ == "__main__":
    main()
