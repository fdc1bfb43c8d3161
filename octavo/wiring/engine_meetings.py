"""The meetings of engines that share their experts: memory for the ranks of each stage, and a
connection between any two engines.

Made by the process that starts the engines, which holds nothing of a meeting once all of them have
their ends. Where one engine dies the others end too, since they can compute nothing without it, and
all meet again as the next generation.
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
class EnginePlace:
    """One engine's place in a meeting, by the descriptors that its process inherits."""

    index: int
    rooms: tuple[int, ...]
    """Memory for the ranks of each stage, the last stage's first."""
    links: tuple[int, ...]
    """Connections to the other engines, in their order."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*self.rooms, *self.links)

    def to_numbers(self) -> list[int]:
        return [self.index, len(self.rooms), *self.descriptors]

    @staticmethod
    def of_numbers(numbers: Sequence[int]) -> EnginePlace:
        index, num_rooms, *files = numbers
        return EnginePlace(index, tuple(files[:num_rooms]), tuple(files[num_rooms:]))


class EngineMeeting:
    """One generation's memory and connections, until every engine has taken or left its place."""

    def __init__(self, num_engines: int, num_stages: int) -> None:
        self._rooms = [SharedMemory() for _ in range(num_stages)]
        self._ends: dict[int, dict[int, socket.socket]] = {at: {} for at in range(num_engines)}
        """Ends of the connections by the engine that has them and the one that they lead to."""
        for a, b in combinations(range(num_engines), 2):
            self._ends[a][b], self._ends[b][a] = socket.socketpair()

    def place_of(self, engine: int) -> EnginePlace:
        ends = self._ends[engine]
        return EnginePlace(
            engine,
            tuple(room.address for room in self._rooms),
            tuple(ends[other].fileno() for other in sorted(ends)),
        )

    def leave(self, engine: int) -> None:
        """Closes an engine's ends here: its process has them, or it will never come, which ends
        the wait of the others. Does nothing the second time.
        """
        for end in self._ends.pop(engine, {}).values():
            end.close()
        if not self._ends:
            for room in self._rooms:
                room.close()
            self._rooms.clear()


class EngineMeetings:
    """The generations of one group of engines."""

    def __init__(self, num_engines: int, num_stages: int) -> None:
        self._num_engines = num_engines
        self._num_stages = num_stages
        self._meetings: dict[int, EngineMeeting] = {}
        self._next = [0] * num_engines
        """The first generation that each engine has neither taken part in nor left."""
        self._lock = threading.Lock()

    @contextmanager
    def place(self, engine: int, generation: int) -> Iterator[EnginePlace]:
        """Lets an engine's process be started at its place in a generation; it takes part in no
        earlier one any more.
        """
        with self._lock:
            for missed in range(self._next[engine], generation):
                self._meeting(missed).leave(engine)
            self._next[engine] = generation + 1
            meeting = self._meeting(generation)
            try:
                yield meeting.place_of(engine)
            finally:
                meeting.leave(engine)
                done = min(self._next)
                self._meetings = {at: one for at, one in self._meetings.items() if at >= done}

    def _meeting(self, generation: int) -> EngineMeeting:
        if generation not in self._meetings:
            self._meetings[generation] = EngineMeeting(self._num_engines, self._num_stages)
        return self._meetings[generation]
