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
    build_tokenizer,
    lazy_grammars,
    load_model,
    open_model,
    part_of,
)
from octavo.worker.loaded_model import LoadedModel
from octavo.worker.ranks.messages import RankSetup
from octavo.worker.ranks.start import start_ranks

if TYPE_CHECKING:
    from octavo.backends.torch.ranks import TorchRanks
    from octavo.worker.ranks.other_ranks import OtherRanks


def start_other_ranks(model: Model) -> tuple[TorchRanks, OtherRanks]:
    """Starts the processes of the other ranks and meets them."""
    config, num_ranks = model.config, model.config.backend.tensor_parallel_size
    # A model that cannot be split is refused before any process is started.
    part_of(config, model.checkpoint, model.program(), 0)
    device = choose_device(config.backend.device, num_devices=num_ranks)
    options = model.options() | {"record": None}
    return start_ranks("octavo.wiring.ranks:load_rank", options, num_ranks, device)


def load_rank(setup: RankSetup, started: Callable[[], None]) -> LoadedModel:
    """Meets the first rank and loads this rank's part: the entry point of another rank's process.

    `started` is called once all that may be missing has been found.
    """
    model = open_model(EngineConfig.from_options(**setup.options))
    device = choose_device(model.config.backend.device, num_devices=setup.num_ranks)
    from octavo.backends.torch.ranks import TorchRanks

    started()
    grammars = lazy_grammars(model, lambda: build_tokenizer(model))
    ranks = TorchRanks(setup.rank, setup.num_ranks, device, setup.port)
    return load_model(model, quiet, grammars, ranks)
