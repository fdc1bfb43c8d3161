"""Starts the other ranks of a model that several processes share out, and loads one rank's part in
each of them.

This process is the first rank. How ranks talk to each other is `octavo/worker/ranks`' business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.backends.devices import choose_device
from octavo.config.engine_config import EngineConfig
from octavo.progress import quiet
from octavo.wiring.model import (
    Model,
    Place,
    build_tokenizer,
    lazy_grammars,
    load_model,
    open_model,
    part_of,
)
from octavo.worker.loaded_model import LoadedModel
from octavo.worker.ranks.messages import RankSetup
from octavo.worker.ranks.start import start_ranks
from octavo.worker.stages.stage_link import StagePipes, joined

if TYPE_CHECKING:
    from octavo.worker.ranks.other_ranks import OtherRanks

LOAD = "octavo.wiring.ranks:load_rank"


def start_other_ranks(model: Model) -> tuple[Place, OtherRanks]:
    """Starts the processes of the other ranks or stages and meets them."""
    config, num_ranks = model.config, model.config.backend.num_ranks
    # A model that cannot be split is refused before any process is started.
    part_of(config, model.checkpoint, model.program(), 0)
    options = model.options() | {"record": None}
    if config.backend.pipeline_parallel_size > 1:
        pipes = StagePipes(num_ranks)
        try:
            return start_ranks(LOAD, options, num_ranks, pipes, pipes.join)
        except BaseException:
            pipes.close()
            raise
    if config.backend.backend == "native":
        from octavo.backends.native.ranks import SharedMemory, SharedMemoryRanks

        memory = SharedMemory()
        try:
            return start_ranks(
                LOAD,
                options,
                num_ranks,
                memory,
                lambda: SharedMemoryRanks(0, num_ranks, memory.address),
            )
        finally:
            memory.close()
    device = choose_device(config.backend.device, num_devices=num_ranks)
    from octavo.backends.torch.ranks import Rendezvous, TorchRanks

    rendezvous = Rendezvous(num_ranks)
    return start_ranks(
        LOAD, options, num_ranks, rendezvous, lambda: TorchRanks(0, num_ranks, device, rendezvous)
    )


def load_rank(setup: RankSetup, started: Callable[[], None]) -> LoadedModel:
    """Meets the first rank and loads this rank's part: the entry point of another rank's process.

    `started` is called once all that may be missing has been found.
    """
    model = open_model(EngineConfig.from_options(**setup.options))
    join = _joining(model, setup)
    started()
    grammars = lazy_grammars(model, lambda: build_tokenizer(model))
    return load_model(model, quiet, grammars, join())


def _joining(model: Model, setup: RankSetup) -> Callable[[], Place]:
    """Returns what makes this process one of the ranks, once all that it needs has been found."""
    if model.config.backend.pipeline_parallel_size > 1:
        return lambda: joined(setup.rank, setup.num_ranks, setup.address)
    (address,) = setup.address
    if model.config.backend.backend == "native":
        from octavo.backends.native.ranks import SharedMemoryRanks

        return lambda: SharedMemoryRanks(setup.rank, setup.num_ranks, address)
    device = choose_device(model.config.backend.device, num_devices=setup.num_ranks)
    from octavo.backends.torch.ranks import TorchRanks

    return lambda: TorchRanks(setup.rank, setup.num_ranks, device, address)
