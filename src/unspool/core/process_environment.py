"""Settings that libraries read from the environment when they are loaded. Those that the user set stay as they are."""

import os
from collections.abc import MutableMapping

# Threads that wait for work sleep after a short while. By default they spin for milliseconds, and next to a busy
# process on the same cores they take the time that the thread with the work needs. The number is of libgomp, torch's
# OpenMP on Linux, and some 30 µs: as long as most waits on idle cores, which then cost nothing.
_WAITING = {"GOMP_SPINCOUNT": "2000", "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
# Device memory freed in one size can be used in another; host memory is pinned by several threads, not a second a GiB.
_ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
_ALLOCATING = {"PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR}
# Another name of the same setting.
_ALLOCATING_TOO = ("PYTORCH_ALLOC_CONF",)


def set_process_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Call before torch is imported; processes that this one starts inherit the settings."""
    for defaults, others in ((_WAITING, ()), (_ALLOCATING, _ALLOCATING_TOO)):
        if not any(name in environment for name in (*defaults, *others)):
            environment.update(defaults)
