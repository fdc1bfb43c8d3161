"""A simulation of feed-forward layers whose cold neurons are multiplied inside memory modules, each
with a rate of its own.

A layer takes as long as its busiest module. Neurons are dealt out in turn, or again after each
window of tokens by how often they were active in it, the busiest ones to the module with the least
to do; what moves is paid for at the link's rate. Knows traces and rates, and no machine: its
results are a simulation's. Source: Hermes (Liu et al. 2025, arXiv 2502.16963).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Trace = Sequence[Sequence[Sequence[int]]]
"""Active neurons of each layer of each token, `[tokens][layers]`."""


@dataclass(frozen=True, slots=True)
class NdpMachine:
    """The simulated memory modules and what lies before them."""

    num_modules: int
    module_rate: float
    """Bytes per second that a module multiplies of its own memory."""
    host_rate: float
    """Bytes per second of the neurons that the host keeps."""
    link_rate: float
    """Bytes per second between modules."""


@dataclass(frozen=True, slots=True)
class NdpResult:
    """Simulated time of one way to place neurons."""

    seconds: float
    moved_bytes: int
    balance: float
    """Work of all modules by that of as many that are all as busy as the busiest, 0 to 1."""


def simulate(
    trace: Trace,
    machine: NdpMachine,
    *,
    num_neurons: int,
    neuron_bytes: int,
    hot_share: float = 0.0,
    hot_tokens: int = 1,
    window: int = 0,
) -> NdpResult:
    """Simulates a trace. The `hot_share` of each layer's neurons that were active most often in the
    first `hot_tokens` stay with the host; `window` 0: nothing moves.
    """
    num_layers = len(trace[0])
    counts = _counts(trace[:hot_tokens], num_layers, num_neurons)
    hot = [set(_by_use(each)[: round(hot_share * num_neurons)]) for each in counts]
    homes = [[neuron % machine.num_modules for neuron in range(num_neurons)] for _ in counts]
    seconds, moved, work, busiest = 0.0, 0, 0, 0
    for index, token in enumerate(trace):
        if window and index and index % window == 0:
            seen = _counts(trace[index - window : index], num_layers, num_neurons)
            for layer, each in enumerate(seen):
                placed = _balanced(each, homes[layer], hot[layer], machine.num_modules)
                changed = sum(one != other for one, other in zip(placed, homes[layer], strict=True))
                moved += changed * neuron_bytes
                homes[layer] = placed
        for layer, active in enumerate(token):
            loads = [0] * machine.num_modules
            with_host = 0
            for neuron in active:
                if neuron in hot[layer]:
                    with_host += 1
                else:
                    loads[homes[layer][neuron]] += 1
            work += sum(loads)
            busiest += max(loads)
            seconds += max(
                max(loads) * neuron_bytes / machine.module_rate,
                with_host * neuron_bytes / machine.host_rate,
            )
    balance = work / (busiest * machine.num_modules) if busiest else 1.0
    return NdpResult(seconds + moved / machine.link_rate, moved, balance)


def skewed(trace: Trace, share: float) -> list[list[list[int]]]:
    """Returns a trace in which a share of the active neurons of each layer and token are the ones
    with the lowest even numbers, so that these are active far more often than others, and all of
    them lie in half of the modules where neurons are dealt out in turn.
    """
    return [[_skewed(active, share) for active in token] for token in trace]


def _skewed(active: Sequence[int], share: float) -> list[int]:
    count = round(share * len(active))
    always = range(0, 2 * count, 2)
    others = [neuron for neuron in active if neuron not in always]
    return sorted([*always, *others[: len(active) - count]])


def _counts(trace: Trace, num_layers: int, num_neurons: int) -> list[list[int]]:
    counts = [[0] * num_neurons for _ in range(num_layers)]
    for token in trace:
        for layer, active in enumerate(token):
            for neuron in active:
                counts[layer][neuron] += 1
    return counts


def _by_use(counts: Sequence[int]) -> list[int]:
    """Returns the neurons, those that are active most often first."""
    return sorted(range(len(counts)), key=lambda neuron: -counts[neuron])


def _balanced(
    counts: Sequence[int], homes: Sequence[int], hot: set[int], num_modules: int
) -> list[int]:
    """Returns homes by which modules have equal work: the neurons that were active go one by one to
    the module with the least; the others stay.
    """
    loads, placed = [0] * num_modules, list(homes)
    for neuron in _by_use(counts):
        if neuron in hot or not counts[neuron]:
            continue
        home = min(range(num_modules), key=lambda module: (loads[module], module != homes[neuron]))
        placed[neuron] = home
        loads[home] += counts[neuron]
    return placed
