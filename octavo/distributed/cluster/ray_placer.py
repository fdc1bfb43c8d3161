"""Starts instances through Ray: one actor for each instance or rank, in placement groups.

Ray chooses the machine, detects that an actor or machine has ended, and restarts the actor.
Requests and KV blocks do not pass through Ray.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.distributed.cluster.instance import (
    Instance,
    InstanceSpec,
    InstanceState,
    make_rank_spec,
)
from octavo.distributed.cluster.placing import ClusterMachine

INSTALL = "pip install 'octavo[ray]'"
PLACE_S = 5.0
"""Timeout of a reservation, in seconds."""
ANSWER_S = 5.0
"""Timeout for getting an actor's state, in seconds, after which the actor counts as unavailable."""
RETRY_S = 0.5
"""Interval at which a rank retries to reach the first rank, in seconds."""


OBJECT_BYTES = 100 << 20
"""Size of Ray's object store if it is started here; only instance states pass through it."""


@dataclass(frozen=True, slots=True)
class ActorHandle:
    """The actors of an instance (for the first rank and for the other ranks), and its name for
    messages.
    """

    name: str
    actor: Any
    ranks: Sequence[Any] = ()

    @property
    def actors(self) -> list[Any]:
        return [self.actor, *self.ranks]


class RayPlacer:
    """Starts instances on machines, monitors them, and restarts those that end."""

    def __init__(self, address: str | None) -> None:
        """Joins the Ray cluster at `address`; without an address, starts one on this machine."""
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
                f"ray_address: cannot connect to a Ray cluster at {address} in"
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
                f"plan: {name}: Ray cannot place {len(needs)} instances within {PLACE_S:g} s:"
                " its machines are busy",
                hint="see `ray status`",
            )
        return group

    def start(self, reservation: Any, index: int, spec: InstanceSpec) -> ActorHandle:
        """Starts an instance on bundle `index` of a reservation and its other ranks on the
        following bundles; does not wait for them.
        """
        first = self._actor(InstanceActor, reservation, index).remote(spec)
        ranks = [
            self._actor(RankActor, reservation, index + rank).remote(spec, rank, first)
            for rank in range(1, spec.num_ranks)
        ]
        return ActorHandle(spec.name, first, ranks)

    def _actor(self, body: type, reservation: Any, index: int) -> Any:
        """Returns the actor class with the resources of one bundle of a reservation."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = dict(reservation.bundle_specs[index])
        return self._ray.remote(body).options(
            num_cpus=needs.pop("CPU"),
            num_gpus=needs.pop("GPU", None),
            memory=needs.pop("memory", None),
            resources=needs,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                reservation, placement_group_bundle_index=index
            ),
        )

    def get_state(self, handle: ActorHandle) -> InstanceState | None:
        """Returns an instance's state; None while it is unavailable or restarting.

        Also queries the other ranks, so that actors whose process has ended also end.
        """
        asked = [actor.state.remote() for actor in handle.actors]
        try:
            state: InstanceState = self._ray.get(asked[0], timeout=ANSWER_S)
        except (self._ray.exceptions.RayError, TimeoutError):
            return None
        return state

    def stop(self, handle: ActorHandle, patience_s: float) -> None:
        """Stops the first rank, which tells the others to exit, and then the others."""
        for actor in handle.actors:
            with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
                asked = actor.stop.remote(patience_s)
                self._ray.get(asked, timeout=patience_s + ANSWER_S)
            self._ray.kill(actor, no_restart=True)

    def release(self, reservation: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(reservation)

    def close(self) -> None:
        self._ray.shutdown()


class InstanceActor(Instance):
    """An instance that gets its machine's address from Ray."""

    def __init__(self, spec: InstanceSpec) -> None:
        super().__init__(spec, require_ray().util.get_node_ip_address())


class RankActor(Instance):
    """A further rank of an instance. At each start it asks the first rank's actor for the address
    to join.
    """

    def __init__(self, spec: InstanceSpec, rank: int, first: Any) -> None:
        ray = require_ray()
        address = _rank_address(ray, first)
        super().__init__(make_rank_spec(spec, rank, address), ray.util.get_node_ip_address())


def _rank_address(ray: Any, first: Any) -> str:
    """Waits until the actor of an instance's first rank reports the address that other ranks
    join.
    """
    while True:
        try:
            state: InstanceState = ray.get(first.state.remote(), timeout=ANSWER_S)
            return state.rank_address
        except (ray.exceptions.RayError, TimeoutError):
            time.sleep(RETRY_S)


def require_ray() -> Any:
    """Returns the ray module; raises BackendUnavailable with install instructions."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise BackendUnavailable(
            f"cluster: Ray cannot be imported: {error}", hint=INSTALL
        ) from None
    return ray
