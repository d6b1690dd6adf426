"""GPUs that a stage can be planned for: memory, and how fast they are beside the one that was measured.

In: a name such as `h100`. Out: a `Gpu`.
Promise: the H200's rates are those of docs/scaling.md and LOG.md, taken on one; all others are scaled by what the
makers' data sheets say of bf16, memory and links, and are marked as estimates.
"""

from dataclasses import dataclass

from unspool.base.lookup import lookup

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
