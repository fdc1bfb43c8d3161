"""The simulation of layers in memory modules, against results that are computed by hand."""

from __future__ import annotations

import pytest

from octavo.sparsity.ndp_simulation import NdpMachine, simulate, skewed

MACHINE = NdpMachine(num_modules=2, module_rate=100.0, host_rate=1000.0, link_rate=50.0)


def run(trace, **options):
    return simulate(trace, MACHINE, **{"num_neurons": 8, "neuron_bytes": 10} | options)


def test_a_layer_takes_as_long_as_its_busiest_module():
    """Even neurons lie in the first module: three of four are there, and one in the other."""
    result = run([[[0, 2, 4, 1]], [[0, 1, 2, 3]]])
    assert result.seconds == pytest.approx((3 + 2) * 10 / 100)
    assert result.balance == pytest.approx((4 + 4) / (2 * (3 + 2)))
    assert result.moved_bytes == 0


def test_hot_neurons_are_the_hosts():
    """Neurons 0 and 1 stay with the host, 2 and 4 lie in one module."""
    result = run([[[0, 2, 4, 1]]], hot_share=0.25, hot_tokens=1)
    assert result.seconds == pytest.approx(max(2 * 10 / 100, 2 * 10 / 1000))


def test_neurons_are_placed_again_and_what_moves_is_paid_for():
    """Two of the four busy ones move to the other module after the first two tokens."""
    trace = [[[0, 2, 4, 6]]] * 4
    still, moving = run(trace), run(trace, window=2)
    assert still.seconds == pytest.approx(4 * 4 * 10 / 100)
    assert moving.moved_bytes == 2 * 10
    assert moving.seconds == pytest.approx(2 * 0.4 + 2 * 0.2 + 20 / 50)
    assert still.balance == pytest.approx(0.5) and moving.balance > still.balance


def test_skew_keeps_the_number_of_active_neurons():
    trace = [[[1, 3, 5, 7], [0, 1, 2, 3]], [[2, 3, 4, 5], [4, 5, 6, 7]]]
    assert skewed(trace, 0.0) == trace
    for token, made in zip(trace, skewed(trace, 0.5), strict=True):
        for active, changed in zip(token, made, strict=True):
            assert len(changed) == len(active) and {0, 2} <= set(changed)
