"""Limits of machines that are described by files."""

import os
import sys

import pytest

from octavo.worker.machine import Machine
from tests.support.fake_machines import draw, two_sockets

GIB = 1 << 30


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


def test_nodes_have_the_cores_that_are_online(tmp_path):
    machine = two_sockets(tmp_path)
    first, second = machine.nodes()
    assert (first.index, sorted(first.cpus), first.num_cores) == (0, [0, 1, 2, 3, 8, 9, 10, 11], 4)
    assert (second.index, second.num_cores, second.num_bytes) == (1, 3, 2 << 20)
    assert machine.num_threads() == 7
    assert machine.num_threads([second]) == 3


def test_nodes_have_the_cores_of_the_affinity_mask(tmp_path):
    (node,) = two_sockets(tmp_path, affinity={4, 12, 5}).nodes()
    assert (node.index, node.cpus, node.num_cores) == (1, {4, 5, 12}, 2)


def test_a_quota_limits_the_threads_of_nodes(tmp_path):
    machine = two_sockets(tmp_path)
    draw(tmp_path, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "200000 100000"})
    assert machine.num_threads(machine.nodes()) == 2


def test_a_system_without_nodes_has_one(tmp_path, four_cpus):
    (node,) = draw(tmp_path, {}).nodes()
    assert (node.index, node.num_cores, node.num_bytes) == (0, 4, None)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("model name\t: A CPU\n", "A CPU"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "Neoverse V2"),
        ("CPU implementer\t: 0x99\nCPU part\t: 0x1\n", "ARM implementer 0x99 part 0x1"),
        ("", "unnamed CPU"),
    ],
)
def test_names_of_processors(tmp_path, cpuinfo, name):
    assert draw(tmp_path, {"proc/cpuinfo": cpuinfo}).cpu_name() == name


MACOS = {
    "sysctl": 'case $2 in hw.perflevel0*) echo 4;; *brand_string) echo "Apple M2";; esac',
    "vm_stat": "echo 'Mach Virtual Memory Statistics: (page size of 16384 bytes)'\n"
    "echo 'Pages free:        10.'\necho 'Pages active:   99.'\necho 'Pages inactive:  5.'",
}


def test_macos_reports_performance_cores_and_free_memory(tmp_path, monkeypatch):
    for name, script in MACOS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert Machine().num_threads() == 4
    assert Machine().cpu_name() == "Apple M2"
    assert Machine().available_bytes() == 15 * 16384


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
