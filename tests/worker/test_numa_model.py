"""Bytes per node, waits per step and the suggested layout, on simulated machines."""

import math

import pytest

from octavo.worker.machine import Machine, NumaNode
from octavo.worker.numa import nodes_of_groups, thread_groups
from octavo.worker.numa_model import (
    REMOTE_HOP_S,
    REMOTE_READS,
    NumaMachine,
    StepWork,
    estimate,
    suggest,
    wait_s,
)
from tests.support.fake_machines import many_cores

GB = 10**9
WORK = StepWork(weight_bytes=8 * GB, num_phases=300, num_exchanges=64)


def machine(num_nodes, cores=48, gigabytes=64):
    return NumaMachine(num_nodes, cores, num_nodes * 200e9, gigabytes * GB)


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["ranks", "engines"])
def test_bound_processes_read_memory_of_their_own_node(num_nodes, layout):
    step = estimate(machine(num_nodes), WORK, layout)
    share = WORK.weight_bytes if layout == "engines" else WORK.weight_bytes // num_nodes
    assert step.local_bytes == step.stored_bytes == share
    assert step.remote_bytes == 0
    assert step.num_steps == (num_nodes if layout == "engines" else 1)


@pytest.mark.parametrize("num_nodes", [2, 4, 8])
def test_one_process_reads_most_weights_from_the_own_node(num_nodes):
    step = estimate(machine(num_nodes), WORK, "process")
    assert step.stored_bytes == WORK.weight_bytes // num_nodes
    assert step.remote_bytes == step.stored_bytes * REMOTE_READS
    assert step.local_bytes == step.stored_bytes - step.remote_bytes


def test_waits_per_step():
    assert estimate(machine(4), WORK, "process").num_waits == 300
    assert estimate(machine(4), WORK, "ranks").num_waits == 364
    assert estimate(machine(4), WORK, "engines").num_waits == 300


@pytest.mark.parametrize("num_threads", [32, 64, 96, 128, 192])
def test_groups_wait_less_than_threads_across_nodes(num_threads):
    assert wait_s(16) < wait_s(num_threads) < num_threads * REMOTE_HOP_S / 2


def test_a_model_that_fits_in_a_node_gets_one_engine_per_node():
    assert suggest(machine(2), WORK, kv_bytes=16 * GB) == "engines"
    assert suggest(machine(1), WORK, kv_bytes=16 * GB) == "process"


def test_a_model_that_does_not_fit_in_a_node_gets_all():
    assert suggest(machine(2, gigabytes=20), WORK, kv_bytes=16 * GB) == "ranks"
    one_phase = StepWork(WORK.weight_bytes, num_phases=1, num_exchanges=1_000_000)
    assert suggest(machine(2, gigabytes=20), one_phase, kv_bytes=16 * GB) == "process"


def test_the_machine_of_unequal_nodes_is_that_of_the_smallest():
    nodes = [NumaNode(0, frozenset(), 8, 5), NumaNode(1, frozenset(), 6, 7)]
    assert NumaMachine.of(nodes, 1.0) == NumaMachine(2, 6, 1.0, 5)
    assert NumaMachine.of([nodes[0], NumaNode(1, frozenset(), 6, None)], 1.0).bytes_per_node is None


@pytest.mark.parametrize(
    ("cores", "cache", "num_threads", "sizes"),
    [
        (16, 8, 16, []),  # few threads
        (64, 8, 64, [8] * 8),  # a group per cache
        (96, 48, 96, [16] * 6),  # a cache of many cores is divided
        (96, 24, 96, [12] * 8),
        (192, 16, 192, [16] * 12),
        (64, 8, 40, [0] * 3),  # fewer threads than cores: not bound
        (64, 0, 64, [16] * 4),  # no third-level cache
    ],
)
def test_groups_of_threads(tmp_path, cores, cache, num_threads, sizes):
    simulated = many_cores(tmp_path, cores, cache)
    groups = thread_groups(simulated, None, num_threads)
    assert [len(cpus) // 2 for cpus in groups] == sizes  # two hardware threads per core
    bound = sorted(cpu for cpus in groups for cpu in cpus)
    assert bound == (list(range(2 * cores)) if any(sizes) else [])
    unbound = thread_groups(simulated, "off", num_threads)
    assert unbound == [[]] * math.ceil(num_threads / 16) * (num_threads > 16)


def test_an_offline_core_leaves_groups_of_unequal_size(tmp_path):
    simulated = many_cores(tmp_path, 64, 8, offline=63)
    groups = thread_groups(simulated, None, simulated.num_threads())
    assert [len(cpus) // 2 for cpus in groups] == [7, 8, 8, 8, 8, 8, 8, 8]
    assert sorted(cpu for cpus in groups for cpu in cpus) == [*range(63), *range(64, 127)]


def test_nodes_divide_the_heads_if_all_groups_are_bound(tmp_path):
    simulated = many_cores(tmp_path, 64, 8)
    assert nodes_of_groups(simulated, thread_groups(simulated, None, 64)) == [0, 1]
    assert nodes_of_groups(simulated, thread_groups(simulated, "off", 64)) == []
    assert nodes_of_groups(simulated, thread_groups(simulated, None, 40)) == []
    assert nodes_of_groups(simulated, []) == []
    rank = Machine(tmp_path, simulated.nodes()[1].cpus)
    assert nodes_of_groups(rank, thread_groups(rank, None, 32)) == []


def test_nodes_of_unequal_size_do_not_divide_the_heads(tmp_path):
    simulated = many_cores(tmp_path, 64, 8, offline=63)
    assert nodes_of_groups(simulated, thread_groups(simulated, None, 63)) == []
