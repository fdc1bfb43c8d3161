"""Compute threads, NUMA nodes and memory available to this process, under affinity masks, control
groups (v1 and v2) and `ulimit -v`.

Read-only. Every path is below `root`, so tests can simulate other machines. Source: the kernel
documentation of cgroup-v1, cgroup-v2, sysfs. On macOS: sysctl(3), vm_stat(1).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

UNLIMITED_BYTES = 1 << 60
"""Limits from here on count as no limit: cgroup v1 reports "no limit" as a number near 2^63."""


ARM_CORES = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse N1",
    (0x41, 0xD40): "Neoverse V1",
    (0x41, 0xD49): "Neoverse N2",
    (0x41, 0xD4F): "Neoverse V2",
    (0x41, 0xD84): "Neoverse V3",
    (0x41, 0xD8E): "Neoverse N3",
    (0xC0, 0xAC3): "AmpereOne",
}
"""Names by implementer and part number, since Linux reports only these. Source: util-linux,
lscpu-arm.c.
"""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """CPUs with memory of their own. `cpus` are hardware threads."""

    index: int
    cpus: frozenset[int]
    num_cores: int
    num_bytes: int | None
    """Memory of the node; None if the system does not report it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of the machine that are available to this process.

    `affinity`: CPUs that the process may use; None: those of its affinity mask.
    """

    root: Path = Path("/")
    affinity: frozenset[int] | None = None

    def num_threads(self, nodes: Sequence[NumaNode] | None = None) -> int:
        """Returns the number of physical cores in the affinity mask, or of these nodes, or the CPU
        quota of the control groups if lower; at least 1. On macOS, performance cores only.
        """
        num_cores = (
            self._num_physical_cores(self._cpus())
            if nodes is None
            else sum(node.num_cores for node in nodes)
        )
        return max(1, int(min([float(num_cores), *self._cpu_quotas()])))

    def nodes(self) -> list[NumaNode]:
        """Returns the NUMA nodes that have CPUs for this process; one node if the system reports
        none.
        """
        cpus, nodes = self._cpus(), []
        for path in (self.root / "sys/devices/system/node").glob("node[0-9]*"):
            own = cpus & _parse_cpu_list(_read(path / "cpulist") or "")
            total = re.search(r"MemTotal:\s+(\d+) kB", _read(path / "meminfo") or "")
            num_bytes = None if total is None else int(total[1]) * 1024
            if own:
                num_cores = self._num_physical_cores(own)
                nodes.append(NumaNode(int(path.name[4:]), own, num_cores, num_bytes))
        nodes.sort(key=lambda node: node.index)
        return nodes or [NumaNode(0, cpus, self._num_physical_cores(cpus), None)]

    def caches(self) -> list[list[frozenset[int]]]:
        """Returns the hardware threads of each core, by third-level cache, node by node. Without
        such caches, by node.
        """
        caches: dict[tuple[int, str], set[frozenset[int]]] = {}
        for node in self.nodes():
            for cpu in node.cpus:
                path = self.root / f"sys/devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list"
                core = _parse_cpu_list(self._get_core(cpu)) & node.cpus or frozenset({cpu})
                caches.setdefault((node.index, _read(path) or ""), set()).add(core)
        by_node = sorted(caches.items(), key=lambda item: (item[0][0], min(map(min, item[1]))))
        return [sorted(cores, key=min) for _, cores in by_node]

    def cpu_name(self) -> str:
        """Returns the processor's model name."""
        if self._is_macos():
            return _sysctl("machdep.cpu.brand_string") or "unnamed CPU"
        fields = {
            name.strip(): value.strip()
            for name, _, value in (
                line.partition(":")
                for line in (_read(self.root / "proc/cpuinfo") or "").splitlines()
            )
        }
        if "model name" in fields:
            return fields["model name"]
        implementer, part = fields.get("CPU implementer"), fields.get("CPU part")
        if implementer is None or part is None:
            return "unnamed CPU"
        name = ARM_CORES.get((int(implementer, 16), int(part, 16)))
        return name or f"ARM implementer {implementer} part {part}"

    def available_bytes(self) -> int | None:
        """Returns the memory that can be allocated without swapping or being killed. Returns None
        if the system does not report it.
        """
        limits = [
            value
            for value in (
                self._free_bytes(),
                self._address_space_bytes(),
                *self._group_free_bytes(),
            )
            if value is not None
        ]
        return max(0, min(limits)) if limits else None

    def _is_macos(self) -> bool:
        return sys.platform == "darwin" and self.root == Path("/")

    def _cpus(self) -> frozenset[int]:
        """Returns the hardware threads that this process may use, without offline ones."""
        cpus = self.affinity
        if cpus is None and hasattr(os, "sched_getaffinity"):
            cpus = frozenset(os.sched_getaffinity(0))
        if cpus is None:
            cpus = frozenset(range(os.cpu_count() or 1))
        online = _parse_cpu_list(_read(self.root / "sys/devices/system/cpu/online") or "")
        return cpus & online or cpus

    def _num_physical_cores(self, cpus: frozenset[int]) -> int:
        if self._is_macos():
            fast = _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu")
            return int(fast) if fast else len(cpus)
        return len({self._get_core(cpu) for cpu in cpus})

    def _get_core(self, cpu: int) -> str:
        """Returns a key that is equal for the hardware threads of one core."""
        topology = self.root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        return siblings or f"cpu{cpu}"

    def _cpu_quotas(self) -> Iterator[float]:
        """Yields the CPU quotas of the control groups, in cores."""
        for group in self._groups(""):
            words = (_read(group / "cpu.max") or "").split()
            if len(words) == 2 and words[0] != "max":
                yield int(words[0]) / int(words[1])
        for group in self._groups("cpu"):
            quota, period = (
                _read_int(group / "cpu.cfs_quota_us"),
                _read_int(group / "cpu.cfs_period_us"),
            )
            if quota is not None and period and quota > 0:
                yield quota / period

    def _free_bytes(self) -> int | None:
        if self._is_macos():
            return _parse_vm_stat(_output_of("vm_stat"))
        for line in (_read(self.root / "proc/meminfo") or "").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
        if self.root == Path("/") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return None

    def _address_space_bytes(self) -> int | None:
        """Returns the bytes that `ulimit -v` leaves to this process. Returns None without a
        limit.
        """
        limit = re.search(
            r"^Max address space +(\d+)", _read(self.root / "proc/self/limits") or "", re.MULTILINE
        )
        taken = re.search(
            r"^VmSize:\s+(\d+) kB", _read(self.root / "proc/self/status") or "", re.MULTILINE
        )
        return int(limit[1]) - int(taken[1]) * 1024 if limit and taken else None

    def _group_free_bytes(self) -> Iterator[int]:
        """Yields the remaining bytes of each control group's limit; reclaimable page cache counts
        as free.
        """
        names = {
            "": ("memory.max", "memory.current", "inactive_file"),
            "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }
        for controller, (limit_name, usage_name, cached_name) in names.items():
            for group in self._groups(controller):
                limit, usage = _read_int(group / limit_name), _read_int(group / usage_name)
                if limit is not None and usage is not None and limit < UNLIMITED_BYTES:
                    yield limit - usage + _statistic(group / "memory.stat", cached_name)

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yields the directories of this process's control group for a v1 controller ("": v2), and
        of all its parent groups.
        """
        mount = self.root / "sys/fs/cgroup"
        for line in (_read(self.root / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller not in controllers.split(","):
                continue
            base = (
                mount / controllers
                if controller and (mount / controllers).is_dir()
                else mount / controller
            )
            group = base / path.lstrip("/")
            yield group
            while group not in (base, mount):
                group = group.parent
                yield group


def _parse_cpu_list(text: str) -> frozenset[int]:
    """Returns the CPUs of a list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in text.replace("\n", ",").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _parse_vm_stat(text: str) -> int | None:
    """Returns the bytes of free pages and of those that macOS reclaims without swapping."""
    page = re.search(r"page size of (\d+) bytes", text)
    kinds = r"^Pages (?:free|inactive|speculative|purgeable): +(\d+)"
    counts = re.findall(kinds, text, re.MULTILINE)
    return int(page[1]) * sum(map(int, counts)) if page and counts else None


def _sysctl(name: str) -> str:
    """Returns a value of sysctl(3); "" if the system does not know it."""
    return _output_of("sysctl", "-n", name)


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in (_read(path) or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name:
            return int(words[1])
    return 0
