"""NUMA nodes: which of them a process runs on, and its threads.

A process that is bound to a node allocates its weights and KV cache there, since Linux places a
page on the node of the thread that first writes it. Source: the kernel documentation of
numa_memory_policy and sysfs.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence

from octavo.api.errors import ConfigError
from octavo.config.numa_nodes import parse_numa_nodes
from octavo.worker.machine import Machine, NumaNode

GROUP_THREADS = 16
"""Maximum number of threads that wait on one cache line."""


def process_nodes(nodes: Sequence[NumaNode], index: int, num_processes: int) -> list[NumaNode]:
    """Returns the nodes of process `index`: consecutive ones, or one node that several processes
    share if there are fewer nodes than processes.
    """
    first = index * len(nodes) // num_processes
    return list(nodes[first : max(first + 1, (index + 1) * len(nodes) // num_processes)])


def chosen_nodes(machine: Machine, numa_bind_nodes: str | None) -> list[NumaNode]:
    """Returns the nodes of the option; all without one. Raises ConfigError for a node that has no
    CPU for this process.
    """
    nodes = machine.nodes()
    indices = parse_numa_nodes(numa_bind_nodes)
    if indices is None:
        return nodes
    known = {node.index: node for node in nodes}
    for index in indices:
        if index not in known:
            raise ConfigError(
                f"numa_bind_nodes: got node {index}, expected nodes with CPUs for this process:"
                f" {', '.join(map(str, known))}",
                hint="see them with `lscpu`, or remove numa_bind_nodes",
            )
    return [known[index] for index in indices]


def bind(machine: Machine, numa_bind_nodes: str | None, index: int, num_processes: int) -> None:
    """Binds this thread, and the threads that it starts, to the nodes of process `index`.

    Without the option, a single process uses all nodes.
    """
    if numa_bind_nodes == "off" or not hasattr(os, "sched_setaffinity"):
        return
    nodes = chosen_nodes(machine, numa_bind_nodes)
    own = process_nodes(nodes, index, num_processes)
    if len(own) < len(machine.nodes()):
        os.sched_setaffinity(0, frozenset[int]().union(*(node.cpus for node in own)))


def thread_groups(
    machine: Machine, numa_bind_nodes: str | None, num_threads: int
) -> list[list[int]]:
    """Returns the CPUs of each group of compute threads; [] if one group is enough.

    Threads of a group share a third-level cache, and are bound to it if each core has one thread;
    else the groups have no CPUs. ThreadPool (csrc/runtime/thread_pool.h) divides the threads.
    """
    if num_threads <= GROUP_THREADS:
        return []
    caches = machine.caches()
    cores = list(itertools.chain(*caches))
    if numa_bind_nodes == "off" or len(cores) != num_threads:
        return [[] for _ in range(math.ceil(num_threads / GROUP_THREADS))]
    num_groups = sum(math.ceil(len(cache) / GROUP_THREADS) for cache in caches)
    bounds = [num_threads * group // num_groups for group in range(num_groups + 1)]
    return [
        sorted(itertools.chain(*cores[first:last])) for first, last in itertools.pairwise(bounds)
    ]


def nodes_of_groups(machine: Machine, groups: Sequence[Sequence[int]]) -> list[int]:
    """Returns the NUMA nodes of `thread_groups`, in the order of the threads; [] if the groups are
    not bound, or on a single node, or if the nodes have different numbers of cores.
    """
    nodes = machine.nodes()
    equal = len({node.num_cores for node in nodes}) == 1
    return [node.index for node in nodes] if any(groups) and equal and len(nodes) > 1 else []
