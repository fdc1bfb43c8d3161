"""Compute threads and memory available to this process, under affinity masks, control groups (v1
and v2) and `ulimit -v`.

Read-only. Every path is below `root`, so tests can simulate other machines. Source: the kernel
documentation of cgroup-v1, cgroup-v2, sysfs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED_BYTES = 1 << 60
"""Limits from here on count as no limit: cgroup v1 reports "no limit" as a number near 2^63."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of the machine that are available to this process."""

    root: Path = Path("/")

    def num_threads(self) -> int:
        """Returns the number of physical cores in the affinity mask, or the CPU quota of the
        control groups if lower; at least 1.
        """
        limits = [float(self._num_physical_cores()), *self._cpu_quotas()]
        return max(1, int(min(limits)))

    def cpu_name(self) -> str:
        """Returns the processor's model name."""
        for line in (_read(self.root / "proc/cpuinfo") or "").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
        return "unnamed CPU"

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

    def _num_physical_cores(self) -> int:
        cpus = (
            os.sched_getaffinity(0)
            if hasattr(os, "sched_getaffinity")
            else set(range(os.cpu_count() or 1))
        )
        cores = {self._get_core(cpu) for cpu in cpus}
        return len(cores)

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
