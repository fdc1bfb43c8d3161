"""Which models are in memory: room for a load, idle models, pins, failed loads; without engines."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from octavo.api.errors import (
    ConfigError,
    DownloadFailed,
    InsufficientMemory,
    OctavoError,
    ServerError,
    Unavailable,
    WeightMismatch,
)
from octavo.engine.clients.client import ModelFacts
from octavo.server import residency
from octavo.server.known_models import KnownModels
from octavo.server.residency import Residency
from octavo.server.settings import ServerSettings
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.model_spec import ModelSpec
from octavo.server.state.slot import EngineSlot


class FakeEngine:
    num_unfinished = 0
    info = SimpleNamespace(model=ModelFacts())

    def close(self):
        """Ends nothing."""


class FakeLoader:
    """A loader of engines for which memory has `capacity` places; `faults` are raised in turn."""

    def __init__(self, capacity=99):
        self.defaults = {}
        self.capacity = capacity
        self.loaded = []
        self.closed = []
        self.reasons = []
        self.faults = []
        self.failures = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, slot):
        self.loaded.append(slot.name)
        await asyncio.sleep(0)
        await self.gate.wait()
        if self.faults:
            slot.fail(self.faults.pop(0))
        elif len(self.loaded) - len(self.closed) > self.capacity:
            self.loaded.remove(slot.name)
            slot.fail(InsufficientMemory("expected 2 GiB, free is 1 GiB"))
        else:
            slot.fill(FakeEngine())

    def note_failure(self, slot):
        self.failures.append((slot.name, slot.reason))

    async def close(self, slot, reason=""):
        await asyncio.sleep(0)
        self.closed.append(slot.name)
        self.reasons.append(reason)
        slot.drop_engine()


class World:
    """Unloaded models `a`, `b`, `c`, `d`; those in `pinned` stay once they are loaded."""

    def __init__(self, capacity=99, pinned=(), **settings):
        specs = [ModelSpec.of({"model": name}, is_pinned=name in pinned) for name in "abcd"]
        self.slots = {spec.name: EngineSlot(spec, is_unloaded=True) for spec in specs}
        self.models = ModelDirectory(self.slots.values())
        self.loader = FakeLoader(capacity)
        settings = ServerSettings(**settings)
        known = KnownModels(self.models, self.loader, settings)
        self.residency = Residency(self.models, self.loader, settings, known)

    async def ask(self, name):
        """Holds and loads a model as a request does, and lets go of it."""
        slot = await self.residency.find(name)
        slot.uses.hold()
        try:
            return await self.residency.load(slot)
        finally:
            slot.uses.release()

    def age(self, name, seconds):
        self.slots[name].uses.used_at -= seconds

    @property
    def ready(self):
        return "".join(name for name, slot in self.slots.items() if slot.state == "ready")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(residency, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(residency, "ROOM_WAIT_S", 0.3)


def test_requests_share_a_load_and_a_ready_model_waits_for_nothing():
    async def run():
        world = World()
        world.loader.gate.clear()
        asked = [asyncio.create_task(world.ask("a")) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert world.slots["a"].state == "loading" and world.slots["a"].trouble == ""
        world.loader.gate.set()
        assert all(seconds > 0.04 for seconds in await asyncio.gather(*asked))
        assert world.loader.loaded == ["a"] and world.ready == "a"
        assert await world.ask("a") == 0.0

    asyncio.run(run())


def test_a_request_that_goes_leaves_the_load_to_the_others():
    async def run():
        world = World()
        world.loader.gate.clear()
        first, second = (asyncio.create_task(world.ask("a")) for _ in range(2))
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.sleep(0.02)
        world.loader.gate.set()
        assert await second > 0 and world.ready == "a"
        assert world.slots["a"].uses.num_held == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (WeightMismatch("the file is cut", hint="fetch it again"), ServerError, "the file is cut"),
        (DownloadFailed("the hub fails"), DownloadFailed, "the hub fails"),
        (InsufficientMemory("expected 2 GiB"), Unavailable, "cannot be loaded now: expected"),
        (KeyError("secret"), ServerError, r"an internal error \(KeyError\)"),
    ],
)
def test_a_failed_load_tells_all_who_wait_and_the_next_request_tries_again(error, kind, said):
    async def run():
        world = World()
        world.loader.faults = [error]
        asked = [asyncio.create_task(world.ask("a")) for _ in range(3)]
        for one in await asyncio.gather(*asked, return_exceptions=True):
            assert type(one) is kind
        with pytest.raises(kind, match=said):
            raise one
        hint = error.hint if isinstance(error, WeightMismatch) else None
        assert hint is None or one.hint == hint
        assert [name for name, _ in world.loader.failures] == ["a"]
        assert world.slots["a"].state == "unloaded"
        assert await world.ask("a") > 0 and world.ready == "a"

    asyncio.run(run())


def test_the_operators_load_that_failed_stays_failed():
    async def run():
        world = World()
        world.loader.faults = [ConfigError("unknown option")]
        world.residency.start(world.slots["a"])
        await asyncio.sleep(0.05)
        assert world.slots["a"].state == "failed"
        await world.ask("a")
        assert world.loader.loaded == ["a"], "a request does not load it"

    asyncio.run(run())


@pytest.mark.parametrize("limits", [{"capacity": 2}, {"max_models": 2}])
def test_the_least_recently_used_model_makes_room(limits):
    async def run():
        world = World(**limits)
        for name in "abac":
            await world.ask(name)
        assert world.ready == "ac" and world.loader.closed == ["b"]
        await world.ask("b")
        assert world.ready == "bc" and world.loader.closed == ["b", "a"]

    asyncio.run(run())


@pytest.mark.parametrize("limits", [{"capacity": 1}, {"max_models": 1}])
def test_a_pinned_model_stays_and_the_other_is_refused_for_now(limits):
    async def run():
        world = World(pinned="a", **limits)
        await world.ask("a")
        with pytest.raises(Unavailable, match="`b` cannot be loaded now") as refused:
            await world.ask("b")
        assert "pinned" in (refused.value.hint or "")
        assert world.ready == "a" and world.slots["b"].state == "unloaded"

    asyncio.run(run())


@pytest.mark.parametrize("limits", [{"capacity": 1}, {"max_models": 1}])
def test_a_load_waits_until_a_model_in_use_is_idle(limits):
    async def run():
        world = World(**limits)
        await world.ask("a")
        world.slots["a"].uses.hold()
        waiting = [asyncio.create_task(world.ask(name)) for name in "bc"]
        await asyncio.sleep(0.1)
        assert world.ready == "a" and not any(one.done() for one in waiting)
        world.slots["a"].uses.release()
        await asyncio.gather(*waiting)
        assert world.loader.closed[0] == "a" and len(world.loader.closed) == 2

    asyncio.run(run())


def test_a_load_waits_for_a_busy_model_only_so_long():
    async def run():
        world = World(max_models=1)
        await world.ask("a")
        world.slots["a"].loaded.num_unfinished = 1
        began = time.monotonic()
        with pytest.raises(Unavailable, match="1 models are loaded, the maximum"):
            await world.ask("b")
        assert 0.25 < time.monotonic() - began < 5 and world.ready == "a"

    asyncio.run(run())


def test_only_idle_models_are_unloaded_once_their_time_is_up():
    async def run():
        world = World(pinned="c", idle_unload=60.0)
        for name in "abcd":
            await world.ask(name)
            world.age(name, 61)
        world.age("b", -61)
        world.slots["d"].uses.hold()
        async with world.residency.watching():
            await asyncio.sleep(0.1)
            assert world.ready == "bcd" and world.slots["a"].state == "unloaded"
            world.slots["d"].uses.release()  # its minute begins here
            world.slots["b"].uses.keep_s = 0.0
            await asyncio.sleep(0.1)
            assert world.ready == "cd"
            assert await world.ask("a") > 0, "the next request loads it again"
            assert world.slots["a"].uses.keep_s == 60.0
        assert world.models.find("a").state == "ready"

    asyncio.run(run())


def test_an_unload_tells_why():
    async def run():
        world = World(idle_unload=60.0, max_models=1)
        async with world.residency.watching():
            await world.ask("a")
            world.age("a", 61)
            await asyncio.sleep(0.1)
            for seconds in (0.0, 5.0):
                await world.ask("a")
                world.slots["a"].uses.keep(seconds, by_request=True)
                world.age("a", seconds)
                await asyncio.sleep(0.1)
            await world.ask("a")
            await world.ask("b")
        assert world.loader.reasons == [
            "no request for 60 s (--idle-unload)",
            "a request set keep_alive to 0",
            "no request for 5 s (keep_alive)",
            "to make room for b",
        ]

    asyncio.run(run())


def test_work_without_a_request_keeps_a_model():
    async def run():
        world = World(idle_unload=0.0)
        await world.ask("a")
        world.slots["a"].loaded.num_unfinished = 1
        async with world.residency.watching():
            await asyncio.sleep(0.1)
            assert world.ready == "a"
            world.slots["a"].loaded.num_unfinished = 0
            await asyncio.sleep(0.1)
            assert world.ready == ""

    asyncio.run(run())


def test_a_request_during_an_unload_waits_and_has_the_model_loaded_again():
    async def run():
        world = World(idle_unload=0.0)
        await world.ask("a")
        async with world.residency.watching():
            while world.slots["a"].state == "ready":
                await asyncio.sleep(0)
            assert await world.ask("a") > 0

    asyncio.run(run())


def test_without_loads_on_demand_nothing_is_loaded_or_unloaded():
    async def run():
        world = World(load_on_demand="none", idle_unload=0.0)
        await world.ask("a")
        assert world.loader.loaded == []
        with pytest.raises(Unavailable, match="`a` is not loaded"):
            _ = world.slots["a"].llm
        world.residency.start(world.slots["a"])
        await asyncio.sleep(0.05)
        async with world.residency.watching():
            await asyncio.sleep(0.05)
            assert world.ready == "a"

    asyncio.run(run())


def test_a_server_that_stops_loads_nothing_more():
    async def run():
        world = World()
        world.loader.gate.clear()
        asked = asyncio.create_task(world.ask("a"))
        await asyncio.sleep(0.02)
        world.models.drain()
        world.loader.gate.set()
        await asked
        assert world.slots["a"].state == "draining"
        await world.ask("b")
        assert world.loader.loaded == ["a"]
        for name in "ab":
            with pytest.raises(OctavoError, match="the server is stopping"):
                _ = world.slots[name].llm

    asyncio.run(run())
