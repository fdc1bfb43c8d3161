"""Simulates feed-forward layers whose cold neurons are multiplied inside memory modules.

A layer takes as long as its busiest module. Neurons are assigned round robin, or reassigned after
each window of tokens by how often they were active; moving them costs link bandwidth. Nothing here
is measured on hardware. Source: Hermes (Liu et al. 2025, arXiv 2502.16963).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Trace = Sequence[Sequence[Sequence[int]]]
"""Active neurons, indexed `[tokens][layers]`."""


@dataclass(frozen=True, slots=True)
class NdpMachine:
    """The simulated machine: memory modules, host and link."""

    num_modules: int
    module_rate: float
    """Rate in bytes per second at which a module multiplies weights from its own memory."""
    host_rate: float
    """Rate in bytes per second at which the host multiplies weights."""
    link_rate: float
    """Transfer rate between modules in bytes per second."""


@dataclass(frozen=True, slots=True)
class NdpResult:
    """Simulated time of one placement strategy."""

    seconds: float
    moved_bytes: int
    balance: float
    """Mean load of the modules divided by the largest, 0 to 1."""


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
    """Simulates a trace.

    The `hot_share` of each layer's neurons that were most active in the first `hot_tokens` stays on
    the host. `window` 0 disables migration.
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
                placed = _make_balanced_placement(
                    each, homes[layer], hot[layer], machine.num_modules
                )
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
    """Returns a trace in which the fraction `share` of each layer's active neurons is replaced by
    the lowest even indices.

    These neurons become far more active than others and are in half of the modules with round-robin
    placement.
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
    """Returns the neurons, most active first."""
    return sorted(range(len(counts)), key=lambda neuron: -counts[neuron])


def _make_balanced_placement(
    counts: Sequence[int], homes: Sequence[int], hot: set[int], num_modules: int
) -> list[int]:
    """Returns a placement that balances the modules' load.

    Active neurons go one by one to the module with the least load; the others stay.
    """
    loads, placed = [0] * num_modules, list(homes)
    for neuron in _by_use(counts):
        if neuron in hot or not counts[neuron]:
            continue
        home = min(range(num_modules), key=lambda module: (loads[module], module != homes[neuron]))
        placed[neuron] = home
        loads[home] += counts[neuron]
    return placed
