"""Estimates of a decode step on several NUMA nodes, and which layout `octavo plan` suggests.

Counts what each node reads and how often threads wait for each other. The times are a model: reads
run at a node's bandwidth, waits cost transfers of cache lines. It knows nothing of contention on
the interconnect, of KV reads or of compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.worker.machine import NumaNode

LOCAL_HOP_S, REMOTE_HOP_S = 45e-9, 170e-9
"""Seconds for a cache line between two cores of a third-level cache, and of different ones.
Measured on Zen 4; `octavo bench --profile` shows this machine's.
"""
REMOTE_SHARE = 0.4
"""Bandwidth of another node's memory over that of a node's own. Assumed."""

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
    local_bytes: int
    """Bytes that each node reads from its own memory."""
    remote_bytes: int
    """Bytes that each node reads from other nodes."""
    num_waits: int
    """Number of times that all threads of a process wait for each other."""
    seconds: float
    num_steps: int
    """Number of steps that run at once, each with its own requests."""


def estimate(machine: NumaMachine, work: StepWork, layout: Layout) -> StepEstimate:
    """Returns the counts and the time of a step in this layout."""
    nodes = machine.num_nodes
    is_process = layout == "process"
    stored = work.weight_bytes if layout == "engines" else work.weight_bytes // nodes
    # One process has its weights on all nodes, and each node reads an equal part of them.
    local = stored // nodes if is_process else stored
    remote = stored - local
    num_exchanges = work.num_exchanges if layout == "ranks" else 0
    reading = (local + remote / REMOTE_SHARE) / (machine.bandwidth / nodes)
    waiting = work.num_phases * wait_s(machine, is_process) + num_exchanges * nodes * REMOTE_HOP_S
    return StepEstimate(
        stored_bytes=stored,
        local_bytes=local,
        remote_bytes=remote,
        num_waits=work.num_phases + num_exchanges,
        seconds=reading + waiting,
        num_steps=nodes if layout == "engines" else 1,
    )


def wait_s(machine: NumaMachine, is_process: bool) -> float:
    """Returns the seconds in which the threads of a process, on all nodes or on one, wait for each
    other: each takes the same cache line in turn (csrc/runtime/thread_pool.h).
    """
    if is_process and machine.num_nodes > 1:
        return machine.num_nodes * machine.cores_per_node * REMOTE_HOP_S
    return machine.cores_per_node * LOCAL_HOP_S


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
