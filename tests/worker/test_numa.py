"""Which NUMA nodes each process is bound to."""

import os

import pytest

from octavo.api.errors import ConfigError
from octavo.worker.machine import Machine, NumaNode
from octavo.worker.numa import bind, chosen_nodes, process_nodes

NODES = [NumaNode(index, frozenset({2 * index, 2 * index + 1}), 2, None) for index in range(4)]


class FourNodes(Machine):
    def nodes(self):
        return NODES


@pytest.fixture
def bound(monkeypatch):
    """CPUs that the process was bound to."""
    masks = []
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cpus: masks.append(cpus), raising=False
    )
    return masks


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4, 5, 8, 9])
def test_processes_divide_the_nodes(num_processes):
    shares = [process_nodes(NODES, index, num_processes) for index in range(num_processes)]
    assert {node.index for share in shares for node in share} == {0, 1, 2, 3}
    assert all(shares)
    sizes = [len(share) for share in shares]
    assert sum(sizes) == max(4, num_processes), "nodes are shared only if there are too few"


def test_a_single_process_uses_all_nodes(bound):
    bind(FourNodes(), None, 0, 1)
    assert bound == []


def test_ranks_are_bound_to_their_nodes(bound):
    for rank in range(2):
        bind(FourNodes(), None, rank, 2)
    assert bound == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_given_nodes(bound):
    bind(FourNodes(), "3,0", 0, 1)
    bind(FourNodes(), "3,0", 0, 2)
    assert bound == [{6, 7, 0, 1}, {6, 7}]


def test_off_binds_nothing(bound):
    bind(FourNodes(), "off", 1, 2)
    assert bound == []


@pytest.mark.parametrize("text", ["", "x", "0,0", "-1", "0;1"])
def test_numbers_that_are_none(text):
    with pytest.raises(ConfigError, match=r"numa_bind_nodes: got .*, expected different node num"):
        chosen_nodes(FourNodes(), text)


def test_a_node_that_the_process_does_not_have():
    with pytest.raises(ConfigError, match=r"got node 7, expected nodes with CPUs .*: 0, 1, 2, 3"):
        chosen_nodes(FourNodes(), "0,7")
