"""Rendezvous of all ranks of one engine: shared memory or a store for the ranks of each stage, and
pipes between stages.

Created by the first rank before it starts the others, which receive their addresses as numbers;
file descriptors among these are inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.config.engine_config import EngineConfig
from octavo.config.rank_address import parse_rank_address
from octavo.executor.devices import Device, choose_device
from octavo.executor.rank_grid import RankGrid
from octavo.executor.ranks import Ranks
from octavo.wiring.rank_connections import RankConnections, get_expert_grid, get_rank_grid
from octavo.worker.stages.stage_link import StagePipes, join_stage

if TYPE_CHECKING:
    from octavo.executor.native.ranks import SharedMemory
    from octavo.executor.torch.ranks import Rendezvous
    from octavo.wiring.engine_rendezvous import EngineEndpoint

LOOPBACK = "127.0.0.1"
NUM_PIPES = 2
"""How many numbers of an address are for pipes: to the previous stage and to the next."""
NUM_OF_ENGINE = 2
"""How many numbers of an address are for expert sharing: the engine's index and the shared memory's
descriptor.
"""


class ModelRendezvous:
    """Implements `ranks.RankRendezvous`."""

    def __init__(self, config: EngineConfig, engine: EngineEndpoint | None = None) -> None:
        """`engine` is the engine's place among those that share experts."""
        options = config.backend
        self._config = config
        self._engine = engine
        self._num_stages = options.pipeline_parallel_size
        self._num_ranks = options.num_stage_ranks
        """Ranks of one stage."""
        self._rooms = [
            _make_room(config) for _ in range(self._num_stages if self._num_ranks > 1 else 0)
        ]
        """A rendezvous for the ranks of each stage, last stage first."""
        self._pipes = [
            StagePipes(self._num_stages)
            for _ in range(self._num_ranks if self._num_stages > 1 else 0)
        ]
        """Chains of pipes through the stages, one for each rank within a stage."""

    def get_address(self, rank: int) -> list[int]:
        block, within = divmod(rank, self._num_ranks)
        room = self._rooms[block].get_address(within) if self._rooms else []
        if self._engine is not None:
            room = [*room, self._engine.index, self._engine.rooms[block]]
        return room + (self._pipes[within].get_address(block) if self._pipes else [])

    def get_inherited(self, rank: int) -> tuple[int, ...]:
        block, within = divmod(rank, self._num_ranks)
        room = self._rooms[block].get_inherited(within) if self._rooms else ()
        if self._engine is not None:
            room = (*room, self._engine.rooms[block])
        return room + (self._pipes[within].get_inherited(block) if self._pipes else ())

    def join(self) -> RankConnections:
        """Makes this process the first rank, after all others have started."""
        ranks = None
        if self._rooms:
            ranks = _join_ranks(self._config, get_rank_grid(self._config, 0), self._rooms[0])
        connections = RankConnections(ranks=ranks)
        if self._engine is not None:
            connections = join_engines(
                self._config, connections, self._engine.index, self._engine.rooms[0]
            )
        if not self._pipes:
            return connections
        own, *others = self._pipes
        for pipes in others:
            pipes.close()
        return replace(connections, link=own.join())

    def close(self) -> None:
        """Closes the other ranks' ends, or everything if this process has not joined."""
        for room in self._rooms:
            room.close()

    def give_up(self) -> None:
        """Closes the pipes too, after the rendezvous failed."""
        for pipes in self._pipes:
            pipes.close()


def make_join(
    config: EngineConfig, rank: int, address: Sequence[int]
) -> Callable[[], RankConnections]:
    """Returns a function that joins as a rank other than the first; raises SetupError now if a
    requirement is missing.
    """
    options = config.backend
    num_stages = options.pipeline_parallel_size
    room = list(address)
    pipes, of_engine = list[int](), list[int]()
    if num_stages > 1:
        room, pipes = room[:-NUM_PIPES], room[-NUM_PIPES:]
    if config.fleet.num_expert_engines > 1:
        room, of_engine = room[:-NUM_OF_ENGINE], room[-NUM_OF_ENGINE:]
    join_ranks = _make_join_ranks(config, get_rank_grid(config, rank), room[0]) if room else None
    block = rank // options.num_stage_ranks

    def join() -> RankConnections:
        ranks = None if join_ranks is None else join_ranks()
        link = join_stage(block, num_stages, pipes) if pipes else None
        connections = RankConnections(rank, ranks, link)
        return join_engines(config, connections, *of_engine) if of_engine else connections

    return join


def join_engines(
    config: EngineConfig, connections: RankConnections, engine: int, room: int
) -> RankConnections:
    """Adds the ranks of other engines to a rank's place. `engine` is its engine's index, `room` the
    descriptor of the shared memory.
    """
    from octavo.executor.native.ranks import EngineRanks, SharedMemoryRanks

    grid = get_expert_grid(config, connections.rank, engine)
    ranks = SharedMemoryRanks(grid, room)
    return replace(
        connections, engines=EngineRanks(ranks, config.fleet.num_expert_engines), engine=engine
    )


def _make_room(config: EngineConfig) -> SharedMemory | Rendezvous:
    if config.backend.backend == "native":
        from octavo.executor.native.ranks import SharedMemory

        return SharedMemory()
    _choose_device(config)
    from octavo.executor.torch.ranks import Rendezvous

    return Rendezvous(config.backend.num_stage_ranks, _get_host(config))


def _get_host(config: EngineConfig) -> str:
    """Returns the host at which the ranks of a stage connect."""
    address = config.backend.rank_address
    return LOOPBACK if address is None else parse_rank_address(address)[0]


def _choose_device(config: EngineConfig) -> Device:
    """Returns the ranks' device type; checks that there is a device for each rank on this
    machine.
    """
    options = config.backend
    num_devices = options.num_stage_ranks if options.rank_address is None else 1
    return choose_device(options.device, num_devices=num_devices)


def _join_ranks(
    config: EngineConfig, grid: RankGrid, room: SharedMemory | Rendezvous
) -> Ranks[Any]:
    if config.backend.backend == "native":
        return _make_join_ranks(config, grid, room.address)()
    from octavo.executor.torch.ranks import Rendezvous, TorchRanks

    assert isinstance(room, Rendezvous)
    return TorchRanks(grid, _choose_device(config), room, room.host)


def _make_join_ranks(
    config: EngineConfig, grid: RankGrid, address: int
) -> Callable[[], Ranks[Any]]:
    if config.backend.backend == "native":
        from octavo.executor.native.ranks import SharedMemoryRanks

        return lambda: SharedMemoryRanks(grid, address)
    device, host = _choose_device(config), _get_host(config)
    from octavo.executor.torch.ranks import TorchRanks

    return lambda: TorchRanks(grid, device, address, host)
