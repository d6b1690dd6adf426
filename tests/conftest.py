"""What holds for every test: one thread, so that sums come out the same each time, and `gpu` marks that skip."""

import os

import pytest

# Before torch is imported: one core is shared by whatever else runs, and a fork must not meet a pool of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Asking the driver whether there is a device would spoil it for every process forked later.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
