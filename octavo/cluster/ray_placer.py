"""Ray as the placer: an actor for each instance, in placement groups.

Ray chooses the machine, notices when an actor or a machine ends, and starts the actor again. What
clients send and get goes past it, over HTTP, and KV blocks over their own transport.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.cluster.instance import Instance, InstanceSpec, InstanceState
from octavo.cluster.placing import ClusterMachine
from octavo.errors import BackendUnavailable, ConfigError

INSTALL = "pip install 'octavo[ray]'"
PLACE_S = 5.0
"""Seconds in which Ray must find places for instances that some machine could hold."""
ANSWER_S = 5.0
"""Seconds in which an actor must say how it is; one that does not is away."""


OBJECT_BYTES = 100 << 20
"""Memory of Ray's object store where it is started here: nothing but states go through it."""


@dataclass(frozen=True, slots=True)
class ActorHandle:
    """An instance's actor, and a name for messages."""

    name: str
    actor: Any


class RayPlacer:
    """Implements `placing.ClusterPlacer`."""

    def __init__(self, address: str | None) -> None:
        """Joins the Ray cluster at `address`, or starts one on this machine without it."""
        self._ray = ray = require_ray()
        began = time.monotonic()
        try:
            ray.init(
                address=address,
                namespace="octavo",
                log_to_driver=True,
                include_dashboard=False,
                object_store_memory=None if address else OBJECT_BYTES,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"ray_address: no Ray cluster could be joined at {address} in"
                f" {time.monotonic() - began:.0f} s: {error}",
                hint="start one: ray start --head",
            ) from error

    def machines(self) -> Sequence[ClusterMachine]:
        return [
            ClusterMachine(node["NodeManagerAddress"], node["Resources"])
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def reserve(self, name: str, needs: Sequence[Mapping[str, float]], *, spread: bool) -> Any:
        from ray.util.placement_group import placement_group, remove_placement_group

        strategy = "STRICT_SPREAD" if spread else "PACK"
        group = placement_group([dict(need) for need in needs], strategy=strategy)
        if not group.wait(PLACE_S):
            remove_placement_group(group)
            raise ConfigError(
                f"plan: {name}: Ray finds no room for {len(needs)} instances within {PLACE_S:g} s:"
                " its machines are taken",
                hint="`ray status` says by what",
            )
        return group

    def start(self, place: Any, index: int, spec: InstanceSpec) -> ActorHandle:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = dict(place.bundle_specs[index])
        kind = self._ray.remote(ActorBody).options(
            num_cpus=needs.pop("CPU"),
            resources=needs,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                place, placement_group_bundle_index=index
            ),
        )
        return ActorHandle(spec.name, kind.remote(spec))

    def state_of(self, handle: ActorHandle) -> InstanceState | None:
        try:
            found: InstanceState = self._ray.get(handle.actor.state.remote(), timeout=ANSWER_S)
        except (self._ray.exceptions.RayError, TimeoutError):
            return None
        return found

    def stop(self, handle: ActorHandle, patience_s: float) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            asked = handle.actor.stop.remote(patience_s)
            self._ray.get(asked, timeout=patience_s + ANSWER_S)
        self._ray.kill(handle.actor, no_restart=True)

    def give_back(self, place: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(place)

    def close(self) -> None:
        self._ray.shutdown()


class ActorBody(Instance):
    """An instance that knows its machine from Ray."""

    def __init__(self, spec: InstanceSpec) -> None:
        super().__init__(spec, require_ray().util.get_node_ip_address())


def require_ray() -> Any:
    """Returns Ray; BackendUnavailable says how to install it."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise BackendUnavailable(
            f"cluster: Ray cannot be imported: {error}", hint=INSTALL
        ) from None
    return ray
