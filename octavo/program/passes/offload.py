"""Offload pass: chooses which weights stay in memory and which are streamed from a file at each
step, and their offsets.

Works on matmuls in step order and on their sizes. Source: FlexGen (arXiv 2303.06865); schedule
`layers`: ZeRO-Inference (arXiv 2206.01861).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from octavo.api.errors import ConfigError
from octavo.config.sizes import format_bytes

ALIGN = 4096
"""Alignment of offsets and lengths in the file and in memory, required by direct I/O."""

Schedule = Literal["pinned", "layers"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights of one matmul."""

    name: str
    num_bytes: int
    """Bytes in the file, a multiple of ALIGN."""
    range: int
    """Index of the matmul's range of stages; the executor waits for all of a range's weights at
    once.
    """


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring units that are read together."""

    units: range
    offset: int
    """Offset in memory."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """Memory layout of all units."""

    resident: tuple[Chunk, ...]
    """Units that are read once; placed after the ring buffer."""
    streamed: tuple[Chunk, ...]
    """Units that each step reads, in order."""
    ring_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of the ring buffer and the resident units."""
        return self.ring_bytes + sum(chunk.num_bytes for chunk in self.resident)

    @property
    def step_bytes(self) -> int:
        """Bytes that each step reads."""
        return sum(chunk.num_bytes for chunk in self.streamed)


def plan_offload(
    units: Sequence[Unit], *, allowed_bytes: int, other_bytes: int, schedule: Schedule
) -> OffloadPlan:
    """Decides which units stay resident and where each is placed.

    `other_bytes` of the allowed bytes are reserved for weights outside the units. Raises
    ConfigError, with the smallest allowed size, if two layers do not fit.
    """
    total = sum(unit.num_bytes for unit in units)
    budget = allowed_bytes - other_bytes
    if budget >= total:
        everything = tuple(_chunks([range(i, i + 1) for i in range(len(units))], units))
        return OffloadPlan(everything, (), 0)
    ring = least_ring(units)
    if budget < ring:
        raise ConfigError(
            f"weights_memory_bytes: got {format_bytes(allowed_bytes)}, expected at least"
            f" {format_bytes(other_bytes + ring)}: two layers ({format_bytes(ring)}) and the"
            f" weights that always stay in memory ({format_bytes(other_bytes)})",
            hint=f"set weights_memory_bytes to {other_bytes + ring} or more",
        )
    if schedule == "layers":
        whole = list(_by_range(units))
        return OffloadPlan((), _in_ring(whole, units, budget), budget // ALIGN * ALIGN)
    largest = max(range(len(units)), key=lambda index: units[index].num_bytes)
    plans = [_pinned_plan(units, budget, first) for first in (None, largest)]
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.step_bytes)


def _pinned_plan(units: Sequence[Unit], budget: int, first: int | None) -> OffloadPlan | None:
    """Plans the smallest ring buffer and keeps as many units resident as fit beside it.

    The unit `first` has priority; returns None if it does not fit. An output layer is often so
    large that the ring buffer is much smaller without it.
    """
    streamed = [unit for index, unit in enumerate(units) if index != first]
    remaining_bytes = budget - (0 if first is None else units[first].num_bytes)
    if not streamed or remaining_bytes < least_ring(streamed):
        return None
    ring = least_ring(streamed)
    pinned = _pinned(units, remaining_bytes - ring, first)
    resident = _chunks([range(i, i + 1) for i in sorted(pinned)], units, start=ring)
    rest = [range(i, i + 1) for i in range(len(units)) if i not in pinned]
    return OffloadPlan(tuple(resident), _in_ring(rest, units, ring), ring)


def least_ring(units: Sequence[Unit]) -> int:
    """Returns twice the bytes of the largest range, so that one is computed while the next is read.

    The last range, which contains the output layer, is not doubled.
    """
    sizes: defaultdict[int, int] = defaultdict(int)
    for unit in units:
        sizes[unit.range] += unit.num_bytes
    last = sizes.pop(max(sizes))
    return max(last, 2 * max(sizes.values(), default=0))


def _pinned(units: Sequence[Unit], budget: int, first: int | None) -> set[int]:
    """Returns the resident units: `first`, then others spread evenly over the step within the
    budget, so that reading never pauses.
    """
    pinned = set[int]() if first is None else {first}
    total = sum(unit.num_bytes for index, unit in enumerate(units) if index not in pinned)
    used = passed = 0
    for index, unit in enumerate(units):
        if index in pinned:
            continue
        passed += unit.num_bytes
        if (used + unit.num_bytes) * total <= budget * passed:
            pinned.add(index)
            used += unit.num_bytes
    for index, unit in enumerate(units):
        if index not in pinned and used + unit.num_bytes <= budget:
            pinned.add(index)
            used += unit.num_bytes
    return pinned


def _by_range(units: Sequence[Unit]) -> Iterator[range]:
    first = 0
    for index in range(1, len(units) + 1):
        if index == len(units) or units[index].range != units[first].range:
            yield range(first, index)
            first = index


def _chunks(parts: Sequence[range], units: Sequence[Unit], *, start: int = 0) -> Iterator[Chunk]:
    """Places parts one after another."""
    for part in parts:
        size = sum(units[i].num_bytes for i in part)
        yield Chunk(part, start, size)
        start += size


def _in_ring(parts: Sequence[range], units: Sequence[Unit], ring_bytes: int) -> tuple[Chunk, ...]:
    """Places parts in the ring buffer, wrapping around before a range that does not fit, so that a
    range's parts never overlap.
    """
    ring_chunks: list[Chunk] = []
    offset = 0
    for _, group in groupby(parts, key=lambda part: units[part[0]].range):
        together = list(group)
        if offset + sum(units[i].num_bytes for part in together for i in part) > ring_bytes:
            offset = 0
        chunks = list(_chunks(together, units, start=offset))
        ring_chunks += chunks
        offset += sum(chunk.num_bytes for chunk in chunks)
    return tuple(ring_chunks)
