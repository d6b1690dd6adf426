"""Settings that libraries read from the environment when they are loaded. Those that the user set stay as they are."""

import os
from collections.abc import MutableMapping

# Threads that wait for work sleep. By default they spin, and next to a busy process on the same cores they take the
# time that the thread with the work needs. Any of these variables decides about that.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Device memory freed in one size can be used in another; host memory is pinned by several threads, not a second a GiB.
_ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
_ALLOCATING = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def set_library_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Call before torch is imported; processes that this one starts inherit the settings."""
    for names, value in ((_WAITING, "PASSIVE"), (_ALLOCATING, _ALLOCATOR)):
        if not any(name in environment for name in names):
            environment[names[0]] = value
