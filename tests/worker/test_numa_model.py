"""Bytes per node, waits per step and the suggested layout, on simulated machines."""

import pytest

from octavo.worker.machine import NumaNode
from octavo.worker.numa_model import NumaMachine, StepWork, estimate, suggest, wait_s

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


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 8])
def test_one_process_reads_from_all_nodes(num_nodes):
    step = estimate(machine(num_nodes), WORK, "process")
    assert step.stored_bytes == WORK.weight_bytes // num_nodes
    assert step.local_bytes == step.stored_bytes // num_nodes
    assert step.remote_bytes == step.stored_bytes - step.local_bytes


def test_waits_per_step():
    assert estimate(machine(4), WORK, "process").num_waits == 300
    assert estimate(machine(4), WORK, "ranks").num_waits == 364
    assert estimate(machine(4), WORK, "engines").num_waits == 300


def test_threads_wait_longer_for_each_other_across_nodes():
    assert wait_s(machine(2), is_process=True) > 2 * wait_s(machine(2), is_process=False)
    assert wait_s(machine(1), is_process=True) == wait_s(machine(1), is_process=False)


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
