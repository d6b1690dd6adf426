"""Host memory available to this process, on the machine or within its container's limit.

Containers and batch systems limit memory with control groups (cgroups), version 1 or 2. Every group above the process
can have a limit. File cache counts as available, because the kernel frees it on demand, as in `MemAvailable`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60  # version 1 writes a number near 2⁶³ where there is no limit
_RECLAIMABLE = {"active_file", "inactive_file", "slab_reclaimable"}


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory in bytes: the machine's, or the container's limit if that is lower."""

    total: int
    available: int
    container_limit: int | None = None  # None: no limit below the machine's memory

    @property
    def owner(self) -> str:
        return "this machine" if self.container_limit is None else "this container"


def measure_host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Read the kernel's figures under `root`; None where there are none, as outside Linux."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
        total, available = kilobytes["MemTotal"] << 10, kilobytes["MemAvailable"] << 10
    except (OSError, ValueError, KeyError):
        return None
    limits = [(limit, used) for limit, used in _group_limits(root) if limit < total]
    return HostMemory(
        total=min([total, *(limit for limit, _ in limits)]),
        available=max(0, min([available, *(limit - used for limit, used in limits)])),
        container_limit=min((limit for limit, _ in limits), default=None),
    )


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and usage, without file cache, of each control group of this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from _limits_above(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _limits_above(root / "sys/fs/cgroup/memory", path, *names)


def _limits_above(mount: Path, path: str, limit: str, used: str, prefix: str) -> Iterator[tuple[int, int]]:
    """Yield limits from the group at `path` up to the mount; a container may see only the mount."""
    inside = PurePosixPath(path.lstrip("/"))
    for group in dict.fromkeys((mount / inside, *(mount / parent for parent in inside.parents), mount)):
        try:
            allowed, taken = (group / limit).read_text().strip(), int((group / used).read_text())
            entries = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            cache = sum(
                int(value)
                for name, value in entries
                if name.removeprefix(prefix) in _RECLAIMABLE and name.startswith(prefix)
            )
        except (OSError, ValueError):
            continue
        if allowed.isdecimal() and int(allowed) < _UNLIMITED:
            yield int(allowed), max(0, taken - cache)
