"""A placer and a router of nothing, which do what they are told at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx2

from octavo.api.errors import ConfigError
from octavo.distributed.cluster.instance import InstanceSpec, InstanceState
from octavo.distributed.cluster.placing import ClusterMachine


@dataclass
class FakeInstance:
    """An instance that is what a test says."""

    spec: InstanceSpec
    port: int
    is_ready: bool = True
    is_away: bool = False
    stopped: bool = False


@dataclass
class FakePlacer:
    """A stand-in for `ray_placer.RayPlacer`."""

    there: list[ClusterMachine]
    instances: list[FakeInstance] = field(default_factory=list)
    reserved: list[tuple[str, int, bool]] = field(default_factory=list)
    given_back: list[object] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    """Name and reservation of each instance that was started."""
    is_full: bool = False
    broken: str = ""
    """Name of an instance that cannot be started."""

    def machines(self) -> Sequence[ClusterMachine]:
        return self.there

    def reserve(
        self, name: str, needs: Sequence[Mapping[str, float]], *, spread: bool
    ) -> tuple[str, int, bool]:
        if self.is_full:
            raise ConfigError(f"plan: {name}: no room")
        self.reserved.append((name, len(needs), spread))
        return self.reserved[-1]

    def start(self, reservation: object, index: int, spec: InstanceSpec) -> FakeInstance:
        if spec.name == self.broken:
            raise ValueError("no such resource")
        self.places.append((spec.name, index))
        self.instances.append(FakeInstance(spec, spec.port or 20_000 + len(self.instances)))
        return self.instances[-1]

    def get_state(self, handle: FakeInstance) -> InstanceState | None:
        if handle.is_away:
            return None
        host = handle.spec.host or "10.0.0.1"
        url = f"http://{host}:{handle.port}"
        return InstanceState(url, f"{host}:{handle.port + 1}", handle.is_ready)

    def stop(self, handle: FakeInstance, patience_s: float) -> None:
        handle.stopped = True

    def release(self, reservation: object) -> None:
        self.given_back.append(reservation)

    def close(self) -> None:
        pass

    def running(self, name: str) -> FakeInstance:
        """Returns the newest instance of that name that runs."""
        return [one for one in self.instances if one.spec.name == name and not one.stopped][-1]

    @property
    def names(self) -> list[str]:
        return [one.spec.name for one in self.instances if not one.stopped]


@dataclass
class FakeRouter:
    """A stand-in for `router_admin.RouterAdmin`."""

    urls: list[str] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    """Servers that still have requests."""
    is_away: bool = False

    def join(self, url: str) -> int:
        self._check()
        if url in self.urls:
            self.left.discard(self.urls.index(url))
            return self.urls.index(url)
        self.urls.append(url)
        return len(self.urls) - 1

    def leave(self, number: int) -> None:
        self._check()
        self.left.add(number)

    def is_gone(self, number: int) -> bool:
        self._check()
        return number in self.left - self.busy

    @property
    def there(self) -> list[str]:
        return [url for number, url in enumerate(self.urls) if number not in self.left]

    def _check(self) -> None:
        if self.is_away:
            raise httpx2.ConnectError("the router is away")
