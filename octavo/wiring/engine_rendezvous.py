"""Rendezvous of engines that share experts: shared memory for the ranks of each stage, and a
connection between each two engines.

Created by the process that starts the engines, which closes its ends once the engines have
inherited theirs. If an engine dies, all others end too, because they cannot compute without its
experts; all restart together as the next generation.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

from octavo.executor.native.ranks import SharedMemory


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """An engine's index and the file descriptors that its process inherits."""

    index: int
    rooms: tuple[int, ...]
    """Shared memory for the ranks of each stage, last stage first."""
    links: tuple[int, ...]
    """Connections to the other engines, by index."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*self.rooms, *self.links)

    def to_numbers(self) -> list[int]:
        return [self.index, len(self.rooms), *self.descriptors]

    @staticmethod
    def from_numbers(numbers: Sequence[int]) -> EngineEndpoint:
        index, num_rooms, *files = numbers
        return EngineEndpoint(index, tuple(files[:num_rooms]), tuple(files[num_rooms:]))


class EngineRendezvous:
    """Memory and connections of one generation, until each engine has started or been skipped."""

    def __init__(self, num_engines: int, num_stages: int) -> None:
        self._rooms = [SharedMemory() for _ in range(num_stages)]
        self._ends: dict[int, dict[int, socket.socket]] = {
            index: {} for index in range(num_engines)
        }
        """Ends of the connections, by the engine that owns them and the peer."""
        for a, b in combinations(range(num_engines), 2):
            self._ends[a][b], self._ends[b][a] = socket.socketpair()

    def get_endpoint(self, engine: int) -> EngineEndpoint:
        ends = self._ends[engine]
        return EngineEndpoint(
            engine,
            tuple(room.address for room in self._rooms),
            tuple(ends[other].fileno() for other in sorted(ends)),
        )

    def leave(self, engine: int) -> None:
        """Closes an engine's ends of the connections in this process: either its process has
        inherited them, or it will never start, and closing them ends the others' wait. Idempotent.
        """
        for end in self._ends.pop(engine, {}).values():
            end.close()
        if not self._ends:
            for room in self._rooms:
                room.close()
            self._rooms.clear()


class EngineGenerations:
    """All generations of one group of engines."""

    def __init__(self, num_engines: int, num_stages: int) -> None:
        self._num_engines = num_engines
        self._num_stages = num_stages
        self._rendezvous: dict[int, EngineRendezvous] = {}
        self._next = [0] * num_engines
        """For each engine, the first generation that it has neither joined nor skipped."""
        self._lock = threading.Lock()

    @contextmanager
    def open_endpoint(self, engine: int, generation: int) -> Iterator[EngineEndpoint]:
        """Yields an engine's endpoint in a generation, for starting its process; skips earlier
        generations.
        """
        with self._lock:
            for missed in range(self._next[engine], generation):
                self._get_rendezvous(missed).leave(engine)
            self._next[engine] = generation + 1
            rendezvous = self._get_rendezvous(generation)
            try:
                yield rendezvous.get_endpoint(engine)
            finally:
                rendezvous.leave(engine)
                done = min(self._next)
                self._rendezvous = {
                    index: one for index, one in self._rendezvous.items() if index >= done
                }

    def _get_rendezvous(self, generation: int) -> EngineRendezvous:
        if generation not in self._rendezvous:
            self._rendezvous[generation] = EngineRendezvous(self._num_engines, self._num_stages)
        return self._rendezvous[generation]
