"""Model shapes, bytes that ranks send, and the GPUs that `plan` knows.

Layers compute in bf16 (2 bytes). Sizes follow training/parallel; a test compares both.
"""

from dataclasses import dataclass

from unspool.core.config import lookup
from unspool.training.parallel.config import Layout

HALF, FULL = 2, 4  # bytes of bf16 and fp32
# Size of the logits chunk of models/loss.py on a GPU.
LOGITS_BYTES = 384 << 20
CPU_CHUNK = 2048  # tokens per chunk of logits on a CPU


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a Llama-like decoder."""

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
        """Parameters of the head, or of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def params(self) -> int:
        return self.num_layers * self.layer_params + (1 if self.tied else 2) * self.table_params + self.hidden

    @property
    def matmul_params(self) -> int:
        """Parameters that multiply every token."""
        return self.num_layers * self.layer_params + self.table_params


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that one rank sends for one row: forward, recomputation, backward."""

    weights: float  # FSDP: layers gathered twice, embedding and head once, gradients reduced
    copies: float  # gradients reduced over replicas; this happens once per step, here counted for one row
    heads: float  # Ulysses
    keys: float  # ring


# Share of a data sheet's bandwidth that collectives are assumed to reach.
REACHED = 0.8


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second between devices."""

    inside: float = REACHED * 450e9  # NVLink 4, each direction, per device
    between: float = REACHED * 50e9  # a 400 Gbit/s card per device
    node: int = 8  # devices


def own_tokens(layout: Layout, row: int) -> int:
    return -(-row // layout.sequence_ranks)


def kv_slices(shape: Shape, ulysses: int) -> int:
    """Return the KV heads sent per token: all of them, or one per rank if ranks share them."""
    return max(shape.num_kv_heads, ulysses)


def ulysses_elements(shape: Shape, ulysses: int, tokens: int) -> int:
    """Return the elements of the two messages of one layer's forward pass: to heads, and back to tokens."""
    slices = 2 * shape.num_heads + 2 * kv_slices(shape, ulysses)
    return slices * shape.head_dim * tokens


def sent(shape: Shape, layout: Layout, row: int, *, recomputed: bool = True) -> Sent:
    """Count the bytes that one rank sends; `recomputed` layers repeat their exchanges of heads and keys."""
    tokens = own_tokens(layout, row)
    parts = layout.shard * layout.sequence_ranks
    others = (parts - 1) / parts
    degree, ring = layout.ulysses, layout.ring
    keys = 2 * kv_slices(shape, degree) * shape.head_dim * tokens * shape.num_layers
    gathered = HALF * (shape.params + shape.num_layers * shape.layer_params)
    passes = 2 + recomputed
    return Sent(
        weights=(gathered + FULL * shape.params) * others,
        copies=2 * FULL * shape.params / parts * (layout.replicate - 1) / layout.replicate,
        heads=passes * HALF * ulysses_elements(shape, degree, tokens) * shape.num_layers * (degree - 1) / degree,
        # In the backward pass, the gradients need one more turn to return to their rank.
        keys=(passes * HALF * (ring - 1) + FULL * ring) * keys if ring > 1 else 0.0,
    )


GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    title: str
    gib: float  # usable by a program
    tflops: float  # dense bf16, from the data sheet
    bandwidth: float  # TB/s of device memory
    link: float  # GB/s to the other GPUs of a machine, each direction
    host: float  # GB/s to host memory, as reached in practice
    measured: bool = False
    is_cpu: bool = False  # computes in fp32, with rates measured on this machine

    @property
    def has_fp8(self) -> bool:
        return self.name not in WITHOUT_FP8

    @property
    def rates(self) -> str:
        return f"fp32 matrix products {1000 * self.tflops:,.0f} GFLOP/s, memory {1000 * self.bandwidth:,.0f} GB/s"

    @property
    def memory(self) -> float:
        return self.gib * GIB


# Older than compute capability 8.9.
WITHOUT_FP8 = ("a100", "a100-40", "a6000", "3090")
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
    return lookup(GPUS, name.lower(), kind="`gpu`")


def match_gpu(device_name: str, memory: float) -> Gpu | None:
    """Find the GPU by its driver's name, such as `NVIDIA H100 80GB HBM3`; of several, the nearest in memory."""
    words = device_name.lower().replace("-", " ").split()
    fitting = [gpu for gpu in _ALL if gpu.name.split("-")[0] in words]
    return min(fitting, key=lambda gpu: abs(gpu.memory - memory)) if fitting else None
