"""The store of adapters on a rank whose part is read later than the first rank's."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from octavo.api.errors import WeightMismatch, WorkerFailed
from octavo.engine.protocol.step import AdapterLoad, AdapterRef
from octavo.executor.base import PackedAdapter
from octavo.worker.lora.adapter_reader import Adapter
from octavo.worker.lora.adapter_store import AdapterStore


class ListedSlots:
    """Lists what is put into slots."""

    num_bytes = 0

    def __init__(self) -> None:
        self.held: dict[int, PackedAdapter] = {}

    def pack(self, updates) -> PackedAdapter:
        return PackedAdapter(1, updates)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self.held[slot] = adapter

    def drop(self, slot: int) -> None:
        self.held.pop(slot, None)


@pytest.fixture
def reading():
    """An event that lets reading go on."""
    event = threading.Event()
    yield event
    event.set()


def store_of(reading, slots):
    def read(path: Path) -> Adapter:
        assert reading.wait(10)
        if path.name == "damaged":
            raise WeightMismatch("the file is damaged")
        return Adapter(path.name.encode(), {})

    return AdapterStore(read, [slots], max_kept=2)


def load(slot: int, name: str) -> AdapterLoad:
    return AdapterLoad(slot, AdapterRef(name.encode(), name))


def test_rows_wait_for_an_adapter_that_is_on_its_way(reading):
    slots = ListedSlots()
    store = store_of(reading, slots)
    store.begin([load(0, "a"), load(1, "b")])
    store.await_slots([-1, 5])
    assert not slots.held and not store.pop_loaded(wait_s=0)
    threading.Timer(0.05, reading.set).start()
    store.await_slots([1])
    assert 1 in slots.held
    assert [each.digest for each in store.pop_loaded(wait_s=5)] == [b"a"]
    store.await_slots([0, 1])
    store.close()


def test_an_adapter_that_this_rank_cannot_read_ends_it(reading):
    store = store_of(reading, ListedSlots())
    reading.set()
    store.begin([load(0, "damaged")])
    with pytest.raises(WorkerFailed, match=r"the adapter .* could not be loaded: .*damaged"):
        store.await_slots([0])
    store.close()
