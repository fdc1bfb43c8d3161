"""Bytes per node, waits per step and the suggested layout, on simulated machines."""

import pytest

from octavo.worker.machine import NumaNode
from octavo.worker.numa import thread_groups
from octavo.worker.numa_model import NumaMachine, StepWork, estimate, suggest, wait_s
from tests.support.fake_machines import many_cores

GB = 10**9
WORK = StepWork(weight_bytes=8 * GB, num_phases=300, num_exchanges=64)


def machine(num_nodes, cores=48, gigabytes=64):
    return NumaMachine(num_nodes, cores, num_nodes * 200e9, gigabytes * GB)


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["process", "ranks", "engines"])
def test_each_node_reads_its_own_memory(num_nodes, layout):
    step = estimate(machine(num_nodes), WORK, layout)
    share = WORK.weight_bytes if layout == "engines" else WORK.weight_bytes // num_nodes
    assert step.local_bytes == step.stored_bytes == [share] * num_nodes
    assert step.remote_bytes == [0] * num_nodes
    assert step.num_steps == (num_nodes if layout == "engines" else 1)


def test_weights_on_one_node_limit_all_to_its_bandwidth():
    step = estimate(machine(2), WORK, "first_node")
    assert (step.stored_bytes, step.local_bytes) == ([8 * GB, 0], [4 * GB, 0])
    assert step.remote_bytes == [0, 4 * GB]
    assert step.seconds > 2 * estimate(machine(2), WORK, "process").seconds - 0.02


def test_waits_per_step():
    assert estimate(machine(4), WORK, "process").num_waits == 300
    assert estimate(machine(4), WORK, "ranks").num_waits == 364
    assert estimate(machine(4), WORK, "engines").num_waits == 300


@pytest.mark.parametrize("num_threads", [32, 64, 96, 128, 192])
def test_groups_wait_shorter_than_one_line_for_all(num_threads):
    assert wait_s(num_threads) < wait_s(num_threads, group_threads=num_threads)


def test_a_model_that_fits_in_a_node_gets_one_engine_per_node():
    assert suggest(machine(2), WORK, kv_bytes=16 * GB) == "engines"
    assert suggest(machine(1), WORK, kv_bytes=16 * GB) == "process"


def test_a_model_that_does_not_fit_in_a_node_gets_all():
    assert suggest(machine(2, gigabytes=20), WORK, kv_bytes=16 * GB) == "ranks"
    one_phase = StepWork(WORK.weight_bytes, num_phases=1, num_exchanges=1000)
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
        (96, 96, 96, [16] * 6),  # a cache of many cores is divided
        (96, 24, 96, [12] * 8),
        (64, 8, 40, [0] * 3),  # not one thread per core: not bound
        (64, 0, 64, [16] * 4),  # no third-level cache
    ],
)
def test_groups_of_threads(tmp_path, cores, cache, num_threads, sizes):
    groups = thread_groups(many_cores(tmp_path, cores, cache), num_threads)
    assert [len(cpus) // 2 for cpus in groups] == sizes  # two hardware threads per core
    bound = sorted(cpu for cpus in groups for cpu in cpus)
    assert bound == (list(range(2 * cores)) if any(sizes) else [])
