"""Reconciles the running instances with the plan: starts missing ones, adds them to the router, and
drains those that are no longer in the plan.

Runs periodically. A failure of one instance does not affect others. Independent of Ray and of how
processes are started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx2
import msgspec

from octavo.distributed.cluster.instance import InstanceSpec, InstanceState
from octavo.distributed.cluster.placing import check_machines, check_total
from octavo.distributed.cluster.plan import ClusterPlan, InstanceGroup, RouterPart, flag_names
from octavo.distributed.cluster.ray_placer import RayPlacer
from octavo.distributed.cluster.router_admin import RouterAdmin
from octavo.utils.progress import Report

STOP_S = 40.0
"""Time that a stopping instance has to finish its requests, in seconds."""
LEAVE_S = 60.0
"""Maximum time that an instance drains before it is stopped, in seconds."""
ROUTER = "router"

MakeAdmin: TypeAlias = Callable[[str], RouterAdmin]
"""Creates a client of the router at a URL."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """Secrets of a cluster; None if everything runs on one machine that other machines cannot
    reach.
    """

    api_key: str | None = None
    """Key that clients send to the router."""
    secret: str | None = None
    """Shared secret of the instances and the router."""


@dataclass(slots=True)
class ClusterMember:
    """A started instance."""

    group: str
    spec: InstanceSpec
    handle: Any
    reservation: SharedReservation
    """Reservation shared with the instances that were started together with it."""
    serves_clients: bool
    """Whether clients' requests are routed to it."""
    state: InstanceState | None = None
    number: int | None = None
    """The router's number for it; None before it was added."""
    joined_url: str = ""
    leaving_until: float | None = None
    """Time at which it is stopped at the latest; None while it is part of the plan."""

    @property
    def is_ready(self) -> bool:
        return self.state is not None and self.state.is_ready


@dataclass(slots=True)
class Cluster:
    """Instances and router of one plan."""

    plan: ClusterPlan
    placer: RayPlacer
    make_admin: MakeAdmin
    keys: ClusterKeys
    report: Report
    members: dict[str, ClusterMember] = field(default_factory=dict)
    """Members by instance name."""
    router: ClusterMember | None = None
    _router_part: RouterPart | None = None
    """The router section of the plan with which the router was started."""
    _leaving: list[ClusterMember] = field(default_factory=list)
    _failed: dict[str, str] = field(default_factory=dict)
    """Errors of groups that could not be started, so that each is reported once."""

    def check(self) -> None:
        """Raises ConfigError if the plan requires more than the machines have."""
        machines = self.placer.machines()
        for group in self.plan.instances:
            count = group.num_placed
            check_machines(group.name, group.needs, count, machines, spread=group.spread)
        check_machines(ROUTER, self.plan.router.needs, 1, machines, spread=False)
        needs = [group.needs for group in self.plan.instances for _ in range(group.num_placed)]
        check_total([*needs, self.plan.router.needs], machines)

    def change(self, plan: ClusterPlan) -> None:
        """Changes the plan; later steps apply it."""
        before, self.plan = self.plan, plan
        try:
            self.check()
        except BaseException:
            self.plan = before
            raise
        self._failed.clear()

    def step(self, now: float) -> None:
        """Compares all instances with the plan once; starts, adds, drains or stops instances that
        differ from it.
        """
        self._update_states()
        specs = self._get_wanted()
        for name, member in list(self.members.items()):
            if name not in specs or specs[name] != member.spec:
                self._drain(member, now)
        for group in self.plan.instances:
            self._start_missing(group, specs)
        self._stop_old_router()
        self._start_router()
        self._add_to_router()
        self._stop_drained(now)

    @property
    def is_serving(self) -> bool:
        """Whether the router accepts requests and has at least one instance."""
        has_one = any(member.number is not None for member in self.members.values())
        return has_one and self.router is not None and self.router.is_ready

    def describe(self) -> str:
        """Returns a line with the number of ready instances of each group."""
        parts = []
        for group in self.plan.instances:
            members = [one for one in self.members.values() if one.group == group.name]
            parts.append(f"{group.name} {sum(one.is_ready for one in members)}/{group.count}")
        url = "" if self.router is None or self.router.state is None else self.router.state.url
        return f"{', '.join(parts)}; router {url or 'is not running yet'}"

    def close(self) -> None:
        """Stops the router first, so that it sends no request to an instance that is stopping."""
        for member in filter(None, [self.router, *self.members.values(), *self._leaving]):
            self._stop(member)
        self.router = None
        self.members.clear()
        self._leaving.clear()
        self.placer.close()

    # -- what is wanted ----------------------------------------------------------------------------

    def _get_wanted(self) -> dict[str, InstanceSpec]:
        """Returns the specs of all instances of the plan whose peers are known, by name; an
        instance whose peers are temporarily unavailable keeps its spec.
        """
        specs = {}
        for group in self.plan.instances:
            peers = self._get_peers(group)
            for index in range(group.count):
                name = f"{group.name}-{index}"
                if peers is not None:
                    specs[name] = self._spec(name, group, peers)
                elif name in self.members:
                    specs[name] = self.members[name].spec
        return specs

    def _get_peers(self, group: InstanceGroup) -> list[str] | None:
        """Returns the addresses of the instances that compute a group's prompts; None until all are
        known.
        """
        if group.peers is None:
            return []
        peers = self.plan.group(group.peers)
        addresses = []
        for index in range(peers.count):
            member = self.members.get(f"{peers.name}-{index}")
            if member is None or member.state is None:
                return None
            addresses.append(member.state.kv_address)
        return addresses

    @property
    def _host(self) -> str:
        """Address that instances listen on: loopback if there is only one machine, else the
        machine's own address.
        """
        return "127.0.0.1" if len({one.host for one in self.placer.machines()}) == 1 else ""

    def _spec(self, name: str, group: InstanceGroup, peers: list[str]) -> InstanceSpec:
        options = flag_names(group.options)
        transfers = group.role != "both" or "kv_transfer" in options
        if transfers:
            options = {"kv_transfer": "zmq", **options, "role": group.role}
            if self.keys.secret is not None:
                options["kv_transfer_secret"] = self.keys.secret
        if not any(name.endswith("parallel_size") for name in options):
            options.setdefault("threads", max(1, int(group.cpus)))
        return InstanceSpec(
            name,
            self._host,
            ["serve", group.model],
            config={key.replace("_", "-"): value for key, value in options.items()},
            environment=self._environment(OCTAVO_API_KEY=self.keys.secret),
            transfers=transfers,
            peers=peers,
            num_ranks=group.num_ranks,
            rank_secret=self.keys.secret if group.num_ranks > 1 else None,
            num_block_ports=group.tensor_parallel_size,
        )

    def _router_spec(self, url: str) -> InstanceSpec:
        router = self.plan.router
        words = ["route", url]
        for key, value in router.options.items():
            name = key.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                values = value if isinstance(value, list) else [value]
                words += [word for one in values for word in (f"--{name}", str(one))]
        environment = self._environment(
            OCTAVO_API_KEY=self.keys.api_key, OCTAVO_SERVER_API_KEY=self.keys.secret
        )
        return InstanceSpec(
            ROUTER,
            self._host,
            words,
            port=router.port,
            health="/health/live",
            environment=environment,
        )

    @staticmethod
    def _environment(**given: str | None) -> dict[str, str]:
        return {name: value for name, value in given.items() if value is not None}

    # --------------------------------------------------------------------------------

    def _update_states(self) -> None:
        everyone = [*self.members.values(), *self._leaving]
        for member in filter(None, [self.router, *everyone]):
            state = self.placer.get_state(member.handle)
            if state is not None:
                member.state = state
            elif member.state is not None:
                member.state = msgspec.structs.replace(member.state, is_ready=False)

    def _start_missing(
        self, group: InstanceGroup, specs_by_name: Mapping[str, InstanceSpec]
    ) -> None:
        names = [f"{group.name}-{index}" for index in range(group.count)]
        missing = [name for name in names if name in specs_by_name and name not in self.members]
        if not missing:
            return
        needs = [group.needs] * (len(missing) * group.num_ranks)
        specs = [specs_by_name[name] for name in missing]
        started_group = self._start_together(group.name, needs, specs, spread=group.spread)
        if started_group is None:
            return
        reservation, started = started_group
        shared = SharedReservation(reservation, len(missing))
        for name, handle in zip(missing, started, strict=True):
            serves_clients = group.role != "prefill"
            self.members[name] = ClusterMember(
                group.name, specs_by_name[name], handle, shared, serves_clients
            )
            self.report(f"{name} is being started")

    def _start_together(
        self,
        name: str,
        needs: Sequence[Mapping[str, float]],
        specs: Sequence[InstanceSpec],
        *,
        spread: bool,
    ) -> tuple[Any, list[Any]] | None:
        """Starts instances together; returns their reservation and handles. If one fails, reports
        the error, stops the others and returns None.
        """
        handles: list[Any] = []
        try:
            reservation = self.placer.reserve(name, needs, spread=spread)
        except Exception as error:
            self._report_failure(name, error)
            return None
        at_each = len(needs) // len(specs)
        try:
            for index, spec in enumerate(specs):
                handles.append(self.placer.start(reservation, index * at_each, spec))
        except Exception as error:
            self._report_failure(name, error)
            for handle in handles:
                self.placer.stop(handle, STOP_S)
            self.placer.release(reservation)
            return None
        self._failed.pop(name, None)
        return reservation, handles

    def _report_failure(self, name: str, error: Exception) -> None:
        if self._failed.get(name) != str(error):
            self._failed[name] = str(error)
            self.report(f"{name} cannot be started: {error}")

    def _stop_old_router(self) -> None:
        """Stops a router whose part of the plan has changed; its running requests may finish."""
        if self.router is None or self._router_part == self.plan.router:
            return
        self.report("the router is being replaced")
        self._stop(self.router)
        self.router = None
        for member in self.members.values():
            member.joined_url, member.number = "", None

    def _start_router(self) -> None:
        """Starts the router when the first instance is ready."""
        first = next(
            (one for one in self.members.values() if one.serves_clients and one.is_ready), None
        )
        if self.router is not None or first is None or first.state is None:
            return
        spec = self._router_spec(first.state.url)
        started = self._start_together(ROUTER, [self.plan.router.needs], [spec], spread=False)
        if started is None:
            return
        reservation, (handle,) = started
        self.router = ClusterMember(
            ROUTER, spec, handle, SharedReservation(reservation, 1), serves_clients=False
        )
        self._router_part = self.plan.router

    def _add_to_router(self) -> None:
        """Adds ready instances to the router, unless it already has their address.

        A restarted router has no servers, so all are added again.
        """
        router = self.router
        if router is None or router.state is None:
            return
        if not router.is_ready:
            for member in self.members.values():
                member.joined_url = ""
            return
        admin = self.make_admin(router.state.url)
        for name, member in self.members.items():
            if not member.serves_clients or not member.is_ready or member.state is None:
                continue
            if member.joined_url == member.state.url:
                continue
            try:
                if member.joined_url and member.number is not None:
                    admin.leave(member.number)  # it was restarted on another machine
                member.number = admin.join(member.state.url)
            except httpx2.HTTPError as error:
                logger.warning("%s could not join the router: %s", name, error)
                continue
            member.joined_url = member.state.url
            self.report(f"{name} has joined the router, at {member.state.url}")

    # -- what leaves -------------------------------------------------------------------------------

    def _drain(self, member: ClusterMember, now: float) -> None:
        """Drains an instance; it is stopped when it has no requests."""
        del self.members[member.spec.name]
        member.leaving_until = now + LEAVE_S
        self._leaving.append(member)
        self.report(f"{member.spec.name} leaves")
        if self.router is None or self.router.state is None or member.number is None:
            return
        try:
            self.make_admin(self.router.state.url).leave(member.number)
        except httpx2.HTTPError as error:
            logger.warning("%s could not leave the router: %s", member.spec.name, error)

    def _stop_drained(self, now: float) -> None:
        for member in list(self._leaving):
            assert member.leaving_until is not None
            if now >= member.leaving_until or self._is_gone(member):
                self._leaving.remove(member)
                self._stop(member)
                self.report(f"{member.spec.name} has left")

    def _is_gone(self, member: ClusterMember) -> bool:
        """Returns whether an instance has no more requests."""
        if member.number is None or self.router is None or self.router.state is None:
            return True
        try:
            return self.make_admin(self.router.state.url).is_gone(member.number)
        except httpx2.HTTPError:
            return False

    def _stop(self, member: ClusterMember) -> None:
        self.placer.stop(member.handle, STOP_S)
        if member.reservation.leave():
            self.placer.release(member.reservation.reservation)


@dataclass(slots=True)
class SharedReservation:
    """A reservation that is released after the last of its instances has ended."""

    reservation: Any
    num_members: int

    def leave(self) -> bool:
        """Records that an instance has ended; returns whether it was the last one."""
        self.num_members -= 1
        return self.num_members == 0
