"""The sockets of two workers: what peers may send that no Octavo would."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq

from octavo.errors import ConfigError
from octavo.step import BlockKey, BlockName, ConnectorPlan, ConnectorReport, SlotBlock
from octavo.transfer.address import TransferEnds
from octavo.transfer.messages import BlockPart, DropBlocks, NotYours, WantBlocks, WantedBlock
from octavo.worker.cache_engine import HostShape
from octavo.worker.connectors.transfer import TransferWorker
from tests.support.free_ports import free_port

NUM_BYTES = 3 << 20
"""Size of a block, which goes in three messages."""
FINGERPRINT = bytes(32)


def ends(listen: str | None, **changes: object) -> TransferEnds:
    usual = {
        "fingerprint": FINGERPRINT,
        "secret": None,
        "timeout_s": 5.0,
        "max_bytes": 64 << 20,
    }
    return TransferEnds(listen=listen, **{**usual, **changes})


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"), bytes(16), (number,))


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def sender() -> Iterator[tuple[TransferWorker, str]]:
    """A worker that keeps block 7 in its slot 0, and its endpoint."""
    endpoint = free_endpoint()
    worker = TransferWorker([HostShape(4, NUM_BYTES)], ends(endpoint))
    worker.slot(0, 0)[:] = np.random.default_rng(3).integers(0, 256, NUM_BYTES, np.uint8)
    worker.begin(ConnectorPlan(keep=[SlotBlock(0, 0, key_of(7))]))
    assert reported(worker).kept == [BlockName(0, key_of(7).digest)]
    yield worker, endpoint
    worker.close()


@pytest.fixture
def fetcher() -> Iterator[TransferWorker]:
    worker = TransferWorker([HostShape(4, NUM_BYTES)], ends(None))
    yield worker
    worker.close()


def reported(worker: TransferWorker) -> ConnectorReport:
    """Waits for the next report."""
    for _ in range(200):
        report = worker.report(wait_s=0.05)
        if report is not None:
            return report
        time.sleep(0.01)
    raise AssertionError("there was no report")


def fetch(worker: TransferWorker, source: str, number: int, slot: int = 1) -> None:
    worker.begin(ConnectorPlan(fetch=[SlotBlock(0, slot, key_of(number), source)]))


def test_a_port_that_is_taken_leaves_no_context(sender, monkeypatch):
    """A context that is collected with open sockets would wait for them without end."""
    made, make = [], zmq.Context
    monkeypatch.setattr(zmq, "Context", lambda: made.append(make()) or made[-1])
    with pytest.raises(ConfigError, match="cannot be listened on"):
        TransferWorker([HostShape(4, NUM_BYTES)], ends(sender[1]))
    assert [context.closed for context in made] == [True]


def test_a_block_comes_whole(sender, fetcher):
    fetch(fetcher, sender[1], 7)
    assert reported(fetcher).fetched == [BlockName(0, key_of(7).digest)]
    assert (fetcher.slot(0, 1) == sender[0].slot(0, 0)).all()


def test_a_block_that_is_computed_later_comes_then(sender, fetcher):
    worker, endpoint = sender
    fetch(fetcher, endpoint, 8)
    time.sleep(0.1)
    assert fetcher.report(wait_s=0.0) is None
    worker.slot(0, 1)[:] = 5
    worker.begin(ConnectorPlan(keep=[SlotBlock(0, 1, key_of(8))]))
    assert reported(fetcher).fetched == [BlockName(0, key_of(8).digest)]
    assert (fetcher.slot(0, 1) == 5).all()


def test_a_block_that_will_not_come_is_told(sender, fetcher):
    worker, endpoint = sender
    fetch(fetcher, endpoint, 9)
    time.sleep(0.1)
    worker.begin(ConnectorPlan(complete=[BlockName(0, key_of(9).digest)]))
    assert reported(fetcher).not_fetched == [BlockName(0, key_of(9).digest)]


def test_a_fetch_that_is_cancelled_ends_at_once(sender, fetcher):
    name = BlockName(0, key_of(9).digest)
    fetch(fetcher, sender[1], 9)
    fetcher.begin(ConnectorPlan(cancel=[name]))
    assert reported(fetcher).not_fetched == [name]


def test_an_engine_that_is_not_there_is_given_up(fetcher):
    began = time.monotonic()
    fetch(fetcher, free_endpoint(), 7)
    assert reported(fetcher).not_fetched
    assert time.monotonic() - began < 5


def test_an_address_that_is_none_ends_its_blocks_and_no_others(sender, fetcher):
    fetch(fetcher, "tcp://nowhere", 6)
    assert reported(fetcher).not_fetched == [BlockName(0, key_of(6).digest)]
    fetch(fetcher, sender[1], 7)
    assert reported(fetcher).fetched == [BlockName(0, key_of(7).digest)]


def test_another_fingerprint_is_refused_by_name(sender):
    other = TransferWorker([HostShape(1, NUM_BYTES)], ends(None, fingerprint=b"x" * 32))
    fetch(other, sender[1], 7, slot=0)
    assert reported(other).not_fetched
    other.close()


def test_malformed_requests_are_answered_and_disturb_no_other(sender, fetcher):
    requests = [b"", b"\xc1", b"x" * 1000, msgspec.msgpack.encode({"type": "WantBlocks"})]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(sender[1])
        for data in requests:
            socket.send(data)
            assert socket.poll(2000)
            assert msgspec.msgpack.decode(socket.recv(), type=NotYours).reason
        socket.send_multipart([b"a", b"b", b"c"])
        socket.send(msgspec.msgpack.encode(DropBlocks([BlockName(5, b"unknown")])))
        odd = WantBlocks(FINGERPRINT, [WantedBlock(-3, key_of(1))], wait_s=float("nan"))
        socket.send(msgspec.msgpack.encode(odd))
    fetch(fetcher, sender[1], 7)
    assert reported(fetcher).fetched


@pytest.mark.parametrize(
    "part",
    [
        {"num_bytes": NUM_BYTES + 1},
        {"offset": -1},
        {"offset": NUM_BYTES},
        {"checksum": 1},
        {"data": b""},
        {"data": bytes(NUM_BYTES + 1)},
    ],
    ids=["size", "before", "behind", "checksum", "empty", "too long"],
)
def test_a_damaged_part_makes_it_a_miss(fetcher, part):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        fetch(fetcher, f"tcp://127.0.0.1:{port}", 7)
        peer, _ = router.recv_multipart()
        data = part.pop("data", bytes(100))
        usual = {"num_bytes": NUM_BYTES, "offset": 0, "checksum": zlib.crc32(bytes(100))}
        head = BlockPart(name=BlockName(0, key_of(7).digest), **{**usual, **part})
        router.send_multipart([peer, msgspec.msgpack.encode(head), data])
        assert reported(fetcher).not_fetched == [BlockName(0, key_of(7).digest)]


def test_a_slot_is_never_written_after_its_end_was_reported(fetcher):
    """A late part of a block, and one of a block that was never asked for."""
    name = BlockName(0, key_of(7).digest)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        source = f"tcp://127.0.0.1:{port}"
        fetch(fetcher, source, 7)
        peer, _ = router.recv_multipart()
        fetcher.begin(ConnectorPlan(cancel=[name]))
        assert reported(fetcher).not_fetched == [name]
        fetcher.slot(0, 1)[:] = 9
        for number in (7, 8):
            late = BlockPart(
                BlockName(0, key_of(number).digest), NUM_BYTES, 0, zlib.crc32(bytes(100))
            )
            router.send_multipart([peer, msgspec.msgpack.encode(late), bytes(100)])
        time.sleep(0.2)
        assert (fetcher.slot(0, 1) == 9).all()
