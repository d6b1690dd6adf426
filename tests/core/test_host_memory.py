"""Host memory is what the machine has left, or what a container still allows."""

from pathlib import Path

import pytest

from unspool.core.host_memory import HostMemory, measure_host_memory

GIB = 1 << 30
MEMINFO = "MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\nHugePages_Total: 0\n"


Files = dict[str, object]


def fake(root: Path, cgroup: str = "", groups: dict[str, Files] | None = None) -> Path:
    """A machine of 128 GiB with 120 available, and the files of control groups by folder."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO.format(total=128 << 20, available=120 << 20))
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, files in (groups or {}).items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(str(content))
    return root


def v2(limit: object, current: int, cache: int = 0) -> Files:
    stat = f"anon 5\ninactive_file {cache}\nactive_file 0\nslab_reclaimable 0\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{current}\n", "memory.stat": stat}


def v1(limit: int, usage: int, cache: int = 0) -> Files:
    stat = f"inactive_file 7\ntotal_inactive_file {cache}\ntotal_active_file 0\n"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}


def test_without_a_container_the_machine_counts(tmp_path):
    found = measure_host_memory(fake(tmp_path))
    assert found == HostMemory(total=128 * GIB, available=120 * GIB)
    assert found.owner == "this machine"


def test_a_container_counts_where_it_allows_less_and_file_cache_is_available(tmp_path):
    root = fake(tmp_path, "0::/\n", {"": v2(64 * GIB, 40 * GIB, cache=30 * GIB)})
    assert measure_host_memory(root) == HostMemory(total=64 * GIB, available=54 * GIB, container_limit=64 * GIB)


def test_the_tightest_group_above_the_process_counts(tmp_path):
    root = fake(
        tmp_path,
        "0::/job/step/task\n",
        {
            "job": v2(50 * GIB, 45 * GIB),
            "job/step": v2(60 * GIB, 10 * GIB),
            "job/step/task": v2("max", 10 * GIB),
        },
    )
    assert measure_host_memory(root) == HostMemory(total=50 * GIB, available=5 * GIB, container_limit=50 * GIB)


def test_a_container_that_sees_only_its_own_group(tmp_path):
    """The path is that of the host, and its folders are not mounted."""
    root = fake(tmp_path, "0::/docker/0123\n", {"": v2(32 * GIB, 2 * GIB)})
    assert measure_host_memory(root) == HostMemory(total=32 * GIB, available=30 * GIB, container_limit=32 * GIB)


def test_groups_of_version_1(tmp_path):
    groups = {"memory": v1(2**63 - 4096, 9 * GIB), "memory/job": v1(20 * GIB, 12 * GIB, cache=2 * GIB)}
    root = fake(tmp_path, "5:cpu,cpuacct:/job\n4:memory:/job\n", groups)
    assert measure_host_memory(root) == HostMemory(total=20 * GIB, available=10 * GIB, container_limit=20 * GIB)


@pytest.mark.parametrize("limit", ["max", 2**63 - 4096, 500 * GIB])
def test_a_limit_above_the_machines_memory_is_ignored(tmp_path, limit):
    found = measure_host_memory(fake(tmp_path, "0::/\n", {"": v2(limit, 100 * GIB)}))
    assert found == HostMemory(total=128 * GIB, available=120 * GIB)


def test_more_in_use_than_allowed_leaves_nothing(tmp_path):
    found = measure_host_memory(fake(tmp_path, "0::/\n", {"": v2(10 * GIB, 11 * GIB)}))
    assert found is not None and found.available == 0


def test_other_systems_report_nothing(tmp_path):
    assert measure_host_memory(tmp_path) is None
