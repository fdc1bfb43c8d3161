"""Estimates of a decode step on several NUMA nodes, and which layout `octavo plan` suggests.

Counts what each node reads and how often threads wait for each other. The times are a model: reads
run at a node's bandwidth, waits cost transfers of cache lines. It knows nothing of contention on
the interconnect, of KV reads or of compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.worker.machine import NumaNode
from octavo.worker.numa import GROUP_THREADS

LOCAL_HOP_S, REMOTE_HOP_S = 45e-9, 170e-9
"""Seconds for a cache line between two cores of a third-level cache, and of different ones.
Measured on Zen 4; `octavo bench --profile` shows this machine's.
"""
REMOTE_SHARE = 0.4
"""Bandwidth of another node's memory over that of a node's own. Assumed."""
REMOTE_READS = 0.1
"""Share of weights that one process reads from other nodes, since a matmul over several matrices
divides their rows differently from packing. csrc/tests/thread_pool_test.cpp counts it: 4% for
Llama's shapes on two nodes, 10% on eight. Huge pages at the boundaries of nodes and stolen work are
not counted.
"""

Layout = Literal["process", "ranks", "engines"]
"""One process on all nodes; a tensor-parallel rank per node; a data-parallel engine per node."""


@dataclass(frozen=True, slots=True)
class NumaMachine:
    """Nodes of equal size. `bandwidth`: bytes per second of all nodes together."""

    num_nodes: int
    cores_per_node: int
    bandwidth: float
    bytes_per_node: int | None = None

    @staticmethod
    def of(nodes: Sequence[NumaNode], bandwidth: float) -> NumaMachine:
        """Returns the machine of these nodes; each is as large as the smallest."""
        sizes = [node.num_bytes for node in nodes if node.num_bytes is not None]
        return NumaMachine(
            len(nodes),
            min(node.num_cores for node in nodes),
            bandwidth,
            min(sizes) if len(sizes) == len(nodes) else None,
        )


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one decode step: bytes of weights it reads, phases, and exchanges between ranks."""

    weight_bytes: int
    num_phases: int
    num_exchanges: int


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Counts and time of one decode step. An exchange is a wait of ranks for each other."""

    stored_bytes: int
    """Bytes of weights in the memory of each node."""
    local_bytes: float
    """Bytes that each node reads from its own memory."""
    remote_bytes: float
    """Bytes that each node reads from other nodes."""
    num_waits: int
    """Number of times that all threads of a process wait for each other."""
    seconds: float
    num_steps: int
    """Number of steps that run at once, each with its own requests."""


def estimate(machine: NumaMachine, work: StepWork, layout: Layout) -> StepEstimate:
    """Returns the counts and the time of a step in this layout."""
    nodes = machine.num_nodes
    stored = work.weight_bytes if layout == "engines" else work.weight_bytes // nodes
    # One process packs most weights on the nodes that read them; a thread that runs out of work
    # reads from others.
    remote = stored * REMOTE_READS if layout == "process" and nodes > 1 else 0
    num_threads = machine.cores_per_node * (nodes if layout == "process" else 1)
    num_exchanges = work.num_exchanges if layout == "ranks" else 0
    local = stored - remote
    reading = (local + remote / REMOTE_SHARE) / (machine.bandwidth / nodes)
    waiting = work.num_phases * wait_s(num_threads) + num_exchanges * nodes * REMOTE_HOP_S
    return StepEstimate(
        stored_bytes=stored,
        local_bytes=local,
        remote_bytes=remote,
        num_waits=work.num_phases + num_exchanges,
        seconds=reading + waiting,
        num_steps=nodes if layout == "engines" else 1,
    )


def wait_s(num_threads: int, group_threads: int = GROUP_THREADS) -> float:
    """Returns the seconds in which the threads of a process wait for each other, in groups
    (csrc/runtime/thread_pool.h).

    Each thread takes its group's line in turn, then each group takes the common line, and the last
    one releases all groups.
    """
    num_groups = math.ceil(num_threads / group_threads)
    if num_groups == 1:
        return num_threads * LOCAL_HOP_S
    return math.ceil(num_threads / num_groups) * LOCAL_HOP_S + 2 * num_groups * REMOTE_HOP_S


def suggest(machine: NumaMachine, work: StepWork, kv_bytes: int) -> Layout:
    """Returns one engine per node if the weights and `kv_bytes` of KV cache fit in each node's
    memory, for the highest throughput; else one rank per node, or one process if that is faster.
    """
    if machine.num_nodes == 1:
        return "process"
    needed = work.weight_bytes + kv_bytes
    if machine.bytes_per_node is not None and needed <= machine.bytes_per_node:
        return "engines"
    layouts: tuple[Layout, Layout] = ("ranks", "process")
    return min(layouts, key=lambda layout: estimate(machine, work, layout).seconds)
