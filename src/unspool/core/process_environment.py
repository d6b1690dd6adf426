"""Environment variables that libraries read at import. Values that the user has set are kept."""

import os
from collections.abc import MutableMapping

# Waiting threads sleep after a short while. By default they spin for milliseconds, and next to a busy process on the
# same cores they take time from the thread that has the work. The number is for libgomp, torch's OpenMP on Linux, and
# is about 30 µs: as long as most waits on idle cores, so it costs nothing there.
_WAITING = {"GOMP_SPINCOUNT": "2000", "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
# Device memory freed in one size can be used in another. Several threads pin host memory, which otherwise takes a
# second per GiB.
_ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
_ALLOCATING = {"PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR}
# Another name of the same setting.
_ALLOCATING_TOO = ("PYTORCH_ALLOC_CONF",)


def set_process_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Call before torch is imported; processes that this one starts inherit the settings."""
    for defaults, others in ((_WAITING, ()), (_ALLOCATING, _ALLOCATING_TOO)):
        if not any(name in environment for name in (*defaults, *others)):
            environment.update(defaults)
