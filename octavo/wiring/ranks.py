"""Starts the other ranks of an engine, or waits for those on other machines, and loads each rank's
part.

This process is rank 0. `octavo/worker/ranks` implements the communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.config.engine_config import EngineConfig
from octavo.config.rank_address import parse_rank_address
from octavo.program.passes.draft_groups import whole_groups
from octavo.utils.progress import quiet
from octavo.wiring.grammars import lazy_grammars
from octavo.wiring.model import (
    Model,
    build_tokenizer,
    get_rank_program,
    load_model,
    open_model,
)
from octavo.wiring.model_hooks import tier_builder
from octavo.wiring.rank_connections import RankConnections
from octavo.wiring.rendezvous import ModelRendezvous, make_join
from octavo.worker.loaded_model import LoadedModel
from octavo.worker.ranks.messages import RankSetup
from octavo.worker.ranks.start import start_ranks

if TYPE_CHECKING:
    from octavo.wiring.engine_rendezvous import EngineEndpoint
    from octavo.worker.ranks.joining import JoiningRanks
    from octavo.worker.ranks.other_ranks import OtherRanks

LOAD = "octavo.wiring.ranks:load_rank"


def start_other_ranks(
    model: Model, engine: EngineEndpoint | None = None
) -> tuple[RankConnections, OtherRanks]:
    """Starts and connects the other ranks; `engine` is the engine's place among those that share
    experts.
    """
    config = model.config
    # A model that cannot be split is rejected before any process is started.
    get_rank_program(config, model.checkpoint, model.program(), 0)
    options = model.options() | {"record": None}
    joining_ranks = _listen_for_ranks(config)
    try:
        rendezvous = ModelRendezvous(config, engine)
        start = None if joining_ranks is None else joining_ranks.start
        num_ranks = config.backend.num_ranks
        try:
            return start_ranks(LOAD, options, num_ranks, rendezvous, rendezvous.join, start=start)
        except BaseException:
            rendezvous.give_up()
            raise
        finally:
            rendezvous.close()
    finally:
        if joining_ranks is not None:
            joining_ranks.close()


def _listen_for_ranks(config: EngineConfig) -> JoiningRanks | None:
    """Starts listening for ranks on other machines; None if all ranks run on this one."""
    address = config.backend.rank_address
    if address is None:
        return None
    from octavo.worker.ranks.joining import JoiningRanks

    host, port = parse_rank_address(address)
    return JoiningRanks(host, port, config.backend.rank_secret)


def load_rank(setup: RankSetup, started: Callable[[], None]) -> LoadedModel:
    """Connects to rank 0 and loads this rank's part; entry point of the other ranks' processes.

    `started` is called after all requirements have been checked.
    """
    model = open_model(EngineConfig.from_options(**setup.options))
    join = make_join(model.config, setup.rank, setup.address)
    started()
    grammars = lazy_grammars(model, lambda: build_tokenizer(model))
    loaded = load_model(model, quiet, grammars, join())
    if (builder := tier_builder(model.config)) is None:
        return loaded
    connect = builder.build_on_rank(whole_groups(model.program(), loaded.program), setup.rank)
    return replace(loaded, make_connector=connect)
