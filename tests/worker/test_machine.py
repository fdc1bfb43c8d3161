"""Limits of machines that are described by files."""

import os

import pytest

from octavo.worker.machine import Machine

GIB = 1 << 30


def draw(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root)


@pytest.fixture
def four_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)


def test_hyperthreads_of_one_core_count_once(tmp_path, four_cpus):
    topology = {
        f"sys/devices/system/cpu/cpu{i}/topology/core_cpus_list": f"{i % 2},{i % 2 + 2}\n"
        for i in range(4)
    }
    assert draw(tmp_path, topology).num_threads() == 2


def test_without_topology_every_cpu_counts(tmp_path, four_cpus):
    assert draw(tmp_path, {}).num_threads() == 4


@pytest.mark.parametrize(
    ("quota", "threads"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_quota_of_cgroup_v2(tmp_path, four_cpus, quota, threads):
    files = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": quota}
    assert draw(tmp_path, files).num_threads() == threads


def test_quota_of_cgroup_v1(tmp_path, four_cpus):
    group = "sys/fs/cgroup/cpu,cpuacct/box"
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/box\n",
        f"{group}/cpu.cfs_quota_us": "300000",
        f"{group}/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
    }
    assert draw(tmp_path, files).num_threads() == 3


MEMINFO = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}


def test_free_memory_of_the_machine(tmp_path):
    assert draw(tmp_path, MEMINFO).available_bytes() == 8 * GIB
    assert draw(tmp_path / "empty", {}).available_bytes() is None


def test_limit_of_cgroup_v2_with_droppable_pages(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": str(4 * GIB),
        "sys/fs/cgroup/a/memory.current": str(3 * GIB),
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/fs/cgroup/memory.max": "max",
    }
    assert draw(tmp_path, MEMINFO | files).available_bytes() == 2 * GIB


@pytest.mark.parametrize(
    ("limit", "free"), [(str(3 * GIB), 2 * GIB), ("unlimited", 8 * GIB), (str(GIB // 2), 0)]
)
def test_limit_of_the_address_space(tmp_path, limit, free):
    files = {
        "proc/self/limits": (
            f"Max address space         {limit}   unlimited   bytes\nMax file locks 5 5\n"
        ),
        "proc/self/status": f"Name: x\nVmPeak: 9 kB\nVmSize:\t {GIB // 1024} kB\n",
    }
    assert draw(tmp_path, MEMINFO | files).available_bytes() == free


def test_limit_of_cgroup_v1(tmp_path):
    files = {
        "proc/self/cgroup": "4:memory:/a/b\n0::/\n",
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "5",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(GIB),
    }
    assert draw(tmp_path, MEMINFO | files).available_bytes() == GIB


def test_this_machine():
    assert 1 <= Machine().num_threads() <= (os.cpu_count() or 1)
    assert (Machine().available_bytes() or 1) > 0
