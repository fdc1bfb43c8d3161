"""Reads by NIXL, over an agent that does as a test says: pieces, agents that are met and forgotten,
and reads that do not end.
"""

from __future__ import annotations

import base64
import ctypes
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from octavo.api.errors import BackendUnavailable
from octavo.distributed.transfer import nixl_mover
from octavo.distributed.transfer.block_transport import PIECE_BYTES, RemoteBytes
from octavo.distributed.transfer.nixl_mover import NixlMover

THERE = base64.b64encode(b"agent there").decode()


class FakeAgent:
    """An agent in whose reads a test has a say."""

    made: FakeAgent

    def __init__(self, name: str, config: Any) -> None:
        FakeAgent.made = self
        self.name = name
        self.registered: list[int] = []
        self.remotes: list[str] = []
        self.forgotten: list[str] = []
        self.num_pieces = 0
        self.states = ["DONE"]
        """States of a read, one look after another; the last one stays."""
        self.num_released = 0

    def get_agent_metadata(self) -> bytes:
        return b"agent here"

    def register_memory(self, whole: list[tuple[int, int, int, str]], kind: str) -> int:
        assert kind == "DRAM"
        if whole[0][1] == 13:
            raise RuntimeError("no memory can be pinned")
        self.registered.append(whole[0][1])
        return whole[0][1]

    def deregister_memory(self, memory: int) -> None:
        self.registered.remove(memory)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.remotes.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.forgotten.append(name)
        self.states = ["ERR"]  # the connection has ended, and all reads with it

    def get_xfer_descs(self, pieces: list[tuple[int, int, int]], kind: str) -> Any:
        return pieces

    def initialize_xfer(self, kind: str, own: Any, theirs: Any, name: str) -> Any:
        assert kind == "READ" and name == "agent there"
        self.num_pieces = len(own)
        return zip(own, theirs, strict=True)

    def transfer(self, handle: Any) -> str:
        for (to, size, _), (origin, same, _) in handle:
            assert size == same
            ctypes.memmove(to, origin, size)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: Any) -> str:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def release_xfer_handle(self, handle: Any) -> None:
        self.num_released += 1


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> NixlMover:
    module = ModuleType("nixl._api")
    module.nixl_agent = FakeAgent  # type: ignore[attr-defined]
    module.nixl_agent_config = lambda **options: options  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", module)
    return NixlMover()


def read(mover: NixlMover, num_bytes: int = 100) -> bool:
    there = np.random.default_rng(3).integers(0, 256, num_bytes, np.uint8)
    here = np.zeros(num_bytes, np.uint8)
    has_come = bool(list(mover.read(THERE, [RemoteBytes(there.ctypes.data, here)])))
    assert not has_come or (here == there).all()
    return has_come


def test_bytes_come_in_pieces_from_an_agent_that_is_met_once(mover: NixlMover) -> None:
    FakeAgent.made.states = ["PROC", "PROC", "DONE"]
    assert read(mover, 2 * PIECE_BYTES + 5) and read(mover)
    assert FakeAgent.made.remotes == ["agent there"]
    assert FakeAgent.made.num_pieces == 1 and FakeAgent.made.num_released == 2


def test_a_read_that_fails_forgets_the_agent_which_may_be_met_again(mover: NixlMover) -> None:
    FakeAgent.made.states = ["ERR"]
    assert not read(mover)
    assert FakeAgent.made.forgotten == ["agent there"]
    FakeAgent.made.states = ["DONE"]
    assert read(mover)
    assert FakeAgent.made.remotes == ["agent there"] * 2


def test_a_read_that_stands_still_is_ended_before_its_slot_is_given_back(
    mover: NixlMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over only once the agent says so: until then the bytes might still come."""
    monkeypatch.setattr(nixl_mover, "TIMEOUT_S", 0.02)
    FakeAgent.made.states = ["PROC"]
    assert not read(mover)
    assert FakeAgent.made.forgotten == ["agent there"] and FakeAgent.made.num_released == 1


def test_all_memory_is_given_back(mover: NixlMover) -> None:
    memory = np.zeros(64, np.uint8)
    mover.register(memory)
    assert base64.b64decode(mover.session) == b"agent here"
    read(mover)
    mover.close()
    assert FakeAgent.made.registered == [] and FakeAgent.made.forgotten == ["agent there"]


def test_memory_that_is_refused_is_said_with_its_size(mover: NixlMover) -> None:
    with pytest.raises(BackendUnavailable, match="nixl cannot register 13 bytes") as refused:
        mover.register(np.zeros(13, np.uint8))
    assert refused.value.hint == "lower kv_transfer_size"
