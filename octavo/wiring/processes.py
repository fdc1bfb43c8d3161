"""Starts engine cores in child processes; data-parallel engines divide memory and threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.config.config_hooks import store_option
from octavo.config.derive import LOGGED_ONLY
from octavo.engine.routing.policies import ROUTING_POLICIES
from octavo.engine.routing.router import Router
from octavo.engine.routing.target import Target
from octavo.executor.kv import BLOCK_SIZE
from octavo.utils.progress import Report
from octavo.wiring.budget import share_memory
from octavo.wiring.model import Model
from octavo.wiring.plan import plan_model
from octavo.worker.machine import Machine
from octavo.worker.numa import chosen_nodes, process_nodes

if TYPE_CHECKING:
    from octavo.engine.clients.fleet import FleetClient
    from octavo.engine.clients.process import ProcessClient
    from octavo.engine.clients.supervised import SupervisedClient
    from octavo.wiring.engine_rendezvous import EngineGenerations

BUILD = "octavo.wiring.engine:build_core_of_options"


def start_processes(model: Model, report: Report) -> SupervisedClient | FleetClient:
    """Starts one core or all data-parallel ones; `wait_until_ready` waits until they have
    loaded.
    """
    num_engines = model.config.fleet.data_parallel_size
    if num_engines == 1:
        return _start_core(model, model.options(), report)
    from octavo.engine.clients.fleet import FleetClient

    options = _shared_options(model, num_engines)
    pool = store_option(model.config)
    targets = [Target(f"engine {index}", pool=pool) for index in range(num_engines)]
    router = Router(ROUTING_POLICIES[model.config.fleet.routing_policy](), targets)
    clients: list[SupervisedClient] = []
    generations = _make_generations(model)
    try:
        for index in range(num_engines):
            own = options | _own_options(model, index)
            clients.append(_start_core(model, own, report, generations, index))
    except BaseException:
        for client in clients:
            client.close()
        raise
    return FleetClient(clients, router, BLOCK_SIZE)


def _make_generations(model: Model) -> EngineGenerations | None:
    """Returns the rendezvous of engines that share experts; None without expert sharing."""
    if model.config.fleet.num_expert_engines == 1:
        return None
    from octavo.wiring.engine_rendezvous import EngineGenerations

    options = model.config.backend
    return EngineGenerations(model.config.fleet.num_expert_engines, options.pipeline_parallel_size)


def _start_core(
    model: Model,
    options: dict[str, Any],
    report: Report,
    generations: EngineGenerations | None = None,
    index: int = 0,
) -> SupervisedClient:
    """Starts core `index`."""
    from octavo.engine.clients.process import ProcessClient
    from octavo.engine.clients.supervised import SupervisedClient

    def start(num_before: int, changes: Mapping[str, Any]) -> ProcessClient:
        """A restarted core does not overwrite the recording of the previous one."""
        record = options["record"]
        if record is not None and num_before:
            record = f"{record}.{num_before}"
        own = options | {"record": record} | dict(changes)
        if generations is None:
            return ProcessClient(BUILD, own)
        with generations.open_endpoint(index, num_before) as endpoint:
            files = endpoint.descriptors
            return ProcessClient(
                BUILD, own, endpoint_numbers=endpoint.to_numbers(), inherited=files
            )

    return SupervisedClient(
        start,
        stall_timeout_s=model.config.observe.stall_timeout,
        report=report,
        shares_steps=generations is not None,
    )


def _own_options(model: Model, index: int) -> dict[str, Any]:
    """Returns the options that differ between data-parallel engines."""
    record, options = model.config.observe.record, model.config.backend
    own = {"record": None if record is None else f"{record}.engine{index}"}
    if options.backend != "native" or options.numa_bind_nodes == "off":
        return own
    machine, num_engines = Machine(), model.config.fleet.data_parallel_size
    nodes = chosen_nodes(machine, options.numa_bind_nodes)
    if len(nodes) == len(machine.nodes()) == 1:
        return own
    engine_nodes = process_nodes(nodes, index, num_engines)
    return own | {"numa_bind_nodes": ",".join(str(node.index) for node in engine_nodes)}


def _shared_options(model: Model, num_engines: int) -> dict[str, Any]:
    """Returns the options of each engine; raises ConfigError if memory is too small for all."""
    options = model.options() | {"routing_policy": "kv"}
    if model.config.fleet.num_expert_engines == 1:
        options["data_parallel_size"] = 1
    if model.config.fleet.routing_policy == "kv" and model.config.cache.kv_events_config is None:
        options["kv_events_config"] = LOGGED_ONLY
    available_bytes = Machine().available_bytes()
    if model.config.backend.backend == "torch" or available_bytes is None:
        return options
    available_bytes //= model.config.backend.num_ranks  # each rank gets an equal part
    capacity = plan_model(model.config, memory_bytes=available_bytes).capacity
    shares = share_memory(
        {f"engine {index}": capacity for index in range(num_engines)}, available_bytes
    )
    return options | {"kv_cache_memory_bytes": min(shares.values())}
