"""The sockets of two workers: what peers may send that no Octavo would."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq

from octavo.api.errors import ConfigError
from octavo.distributed.transfer import block_fetcher
from octavo.distributed.transfer.address import TransferAddresses
from octavo.distributed.transfer.messages import (
    BlockPart,
    DropBlocks,
    KeepAlive,
    LayerPart,
    NoBlocks,
    NotYours,
    WantBlocks,
    WantedBlock,
)
from octavo.distributed.transfer.transfer_worker import TransferWorker
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    BlockKey,
    ConnectorPlan,
    ConnectorReport,
    SlotBlock,
)
from octavo.worker.cache_engine import HostShape
from octavo.worker.kv_connectors.checksum import get_checksum
from tests.support.free_ports import free_port
from tests.support.slow_relay import SlowRelay

NUM_BYTES = 3 << 20
"""Size of a block, which goes in three messages."""
FINGERPRINT = bytes(32)


def ends(listen: str | None, **changes: object) -> TransferAddresses:
    usual = {
        "fingerprint": FINGERPRINT,
        "secret": None,
        "timeout_s": 5.0,
        "max_bytes": 64 << 20,
    }
    return TransferAddresses(listen=listen, **{**usual, **changes})


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
    assert reported(worker).kept == [BlockHashWithGroupId(0, key_of(7).digest)]
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
    with pytest.raises(ConfigError, match="cannot listen"):
        TransferWorker([HostShape(4, NUM_BYTES)], ends(sender[1]))
    assert [context.closed for context in made] == [True]


def test_a_block_comes_whole(sender, fetcher):
    fetch(fetcher, sender[1], 7)
    assert reported(fetcher).fetched == [BlockHashWithGroupId(0, key_of(7).digest)]
    assert (fetcher.slot(0, 1) == sender[0].slot(0, 0)).all()


def test_a_block_that_is_computed_later_comes_then(sender, fetcher):
    worker, endpoint = sender
    fetch(fetcher, endpoint, 8)
    time.sleep(0.1)
    assert fetcher.report(wait_s=0.0) is None
    worker.slot(0, 1)[:] = 5
    worker.begin(ConnectorPlan(keep=[SlotBlock(0, 1, key_of(8))]))
    assert reported(fetcher).fetched == [BlockHashWithGroupId(0, key_of(8).digest)]
    assert (fetcher.slot(0, 1) == 5).all()


def test_a_block_that_will_not_come_is_told(sender, fetcher):
    worker, endpoint = sender
    fetch(fetcher, endpoint, 9)
    time.sleep(0.1)
    worker.begin(ConnectorPlan(complete=[BlockHashWithGroupId(0, key_of(9).digest)]))
    assert reported(fetcher).not_fetched == [BlockHashWithGroupId(0, key_of(9).digest)]


def test_blocks_come_whole_over_a_long_way(sender, fetcher):
    """Every message is 40 ms late; what the link's rate is, the parts behind one another tell."""
    worker, endpoint = sender
    with contextlib.closing(SlowRelay(int(endpoint.rpartition(":")[2]), 0.04)) as relay:
        fetch(fetcher, f"tcp://127.0.0.1:{relay.port}", 7)
        report = reported(fetcher)
        assert report.fetched == [BlockHashWithGroupId(0, key_of(7).digest)]
        assert (fetcher.slot(0, 1) == worker.slot(0, 0)).all()
        assert report.stored is not None
        assert NUM_BYTES // 2 < report.stored.link_bytes < NUM_BYTES and report.stored.link_s > 0


def test_a_way_that_falls_silent_is_given_up(sender, fetcher, monkeypatch):
    """The connection stays open, and nothing comes: neither a block nor a sign of life."""
    monkeypatch.setattr(block_fetcher, "SILENCE_S", 0.5)
    _, endpoint = sender
    with contextlib.closing(SlowRelay(int(endpoint.rpartition(":")[2]), 0.0)) as relay:
        source = f"tcp://127.0.0.1:{relay.port}"
        fetch(fetcher, source, 7)
        assert reported(fetcher).fetched == [BlockHashWithGroupId(0, key_of(7).digest)]
        relay.fall_silent()
        fetch(fetcher, source, 8, slot=2)
        assert reported(fetcher).not_fetched == [BlockHashWithGroupId(0, key_of(8).digest)]


def test_a_fetch_that_is_cancelled_ends_at_once(sender, fetcher):
    name = BlockHashWithGroupId(0, key_of(9).digest)
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
    assert reported(fetcher).not_fetched == [BlockHashWithGroupId(0, key_of(6).digest)]
    fetch(fetcher, sender[1], 7)
    assert reported(fetcher).fetched == [BlockHashWithGroupId(0, key_of(7).digest)]


def test_another_fingerprint_is_refused_by_name(sender):
    other = TransferWorker([HostShape(1, NUM_BYTES)], ends(None, fingerprint=b"x" * 32))
    fetch(other, sender[1], 7, slot=0)
    assert reported(other).not_fetched
    other.close()


def test_malformed_requests_are_answered_and_disturb_no_other(sender, fetcher):
    no_text = b"\x81\xa4type\xa2\xff\xfe"
    requests = [b"", b"\xc1", no_text, b"x" * 1000, msgspec.msgpack.encode({"type": "WantBlocks"})]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(sender[1])
        for data in requests:
            socket.send(data)
            assert socket.poll(2000)
            assert msgspec.msgpack.decode(socket.recv(), type=NotYours).reason
        socket.send_multipart([b"a", b"b", b"c"])
        socket.send(msgspec.msgpack.encode(DropBlocks([BlockHashWithGroupId(5, b"unknown")])))
        odd = WantBlocks(FINGERPRINT, [WantedBlock(-3, key_of(1))], float("nan"), -1, [(0, 1)])
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
        checksum = get_checksum(bytes(100))
        usual = {"num_bytes": NUM_BYTES, "offset": 0, "checksum": checksum, "epoch": 1}
        head = BlockPart(name=BlockHashWithGroupId(0, key_of(7).digest), **{**usual, **part})
        router.send_multipart([peer, msgspec.msgpack.encode(head), data])
        assert reported(fetcher).not_fetched == [BlockHashWithGroupId(0, key_of(7).digest)]


@pytest.mark.parametrize(
    "part",
    [
        {"offset": -1},
        {"offset": NUM_BYTES},
        {"checksum": 1},
        {"data": b""},
        {"data": bytes(101)},
        {"names": []},
    ],
    ids=["before", "behind", "checksum", "empty", "uneven", "no names"],
)
def test_a_damaged_layer_makes_its_blocks_a_miss(fetcher, part):
    """One without names harms nothing: the blocks end by the clock."""
    names = [BlockHashWithGroupId(0, key_of(number).digest) for number in (7, 8)]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        blocks = [SlotBlock(0, at, key_of(7 + at), f"tcp://127.0.0.1:{port}") for at in range(2)]
        fetcher.begin(ConnectorPlan(fetch=blocks))
        peer, _ = router.recv_multipart()
        data = part.pop("data", bytes(100))
        usual = {"names": names, "offset": 0, "checksum": get_checksum(data), "epoch": 1}
        head = LayerPart(**{**usual, **part})
        router.send_multipart([peer, msgspec.msgpack.encode(head), data])
        missed = reported(fetcher).not_fetched
        while len(missed) < 2:
            missed += reported(fetcher).not_fetched
        assert sorted(missed) == names


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa2\xff\xfe"])
def test_a_reply_that_is_no_message_makes_it_a_miss(fetcher, data):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        fetch(fetcher, f"tcp://127.0.0.1:{port}", 7)
        peer, _ = router.recv_multipart()
        began = time.monotonic()
        router.send_multipart([peer, data])
        assert reported(fetcher).not_fetched == [BlockHashWithGroupId(0, key_of(7).digest)]
        assert time.monotonic() - began < 2, "not by the clock"


def test_a_slot_is_never_written_after_its_end_was_reported(fetcher):
    """A late part of a block, and one of a block that was never asked for."""
    name = BlockHashWithGroupId(0, key_of(7).digest)
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
            part = part_of(number, bytes(100), epoch=1)
            router.send_multipart([peer, msgspec.msgpack.encode(part), bytes(100)])
        time.sleep(0.2)
        assert (fetcher.slot(0, 1) == 9).all()


def part_of(number: int, data: bytes, *, epoch: int, offset: int = 0) -> BlockPart:
    name = BlockHashWithGroupId(0, key_of(number).digest)
    return BlockPart(name, NUM_BYTES, offset, get_checksum(data), epoch)


def test_what_answers_an_older_ask_lands_nowhere_and_ends_nothing(fetcher):
    """A block is asked for, given up and asked for again: late parts of the first answer are not
    written, and its refusal is not taken for the second one's.
    """
    name = BlockHashWithGroupId(0, key_of(7).digest)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        source = f"tcp://127.0.0.1:{port}"
        fetch(fetcher, source, 7)
        peer, _ = router.recv_multipart()
        fetcher.begin(ConnectorPlan(cancel=[name]))
        assert reported(fetcher).not_fetched == [name]
        assert msgspec.msgpack.decode(router.recv_multipart()[1], type=DropBlocks).names == [name]
        fetcher.slot(0, 2)[:] = 9
        fetch(fetcher, source, 7, slot=2)
        again = msgspec.msgpack.decode(router.recv_multipart()[1], type=WantBlocks)
        late = part_of(7, bytes(100), epoch=again.epoch - 1)
        router.send_multipart([peer, msgspec.msgpack.encode(late), bytes(100)])
        router.send_multipart([peer, msgspec.msgpack.encode(NoBlocks([name], again.epoch - 1))])
        time.sleep(0.2)
        assert fetcher.report(wait_s=0.0) is None
        assert (fetcher.slot(0, 2) == 9).all()
        for offset in range(0, NUM_BYTES, 1 << 20):
            part = part_of(7, bytes(1 << 20), epoch=again.epoch, offset=offset)
            router.send_multipart([peer, msgspec.msgpack.encode(part), bytes(1 << 20)])
        assert reported(fetcher).fetched == [name]
        assert not fetcher.slot(0, 2).any()


def test_a_peer_that_signs_and_never_sends_holds_no_slot_for_good():
    """It is alive, and its block does not come: the fetch ends by its own clock."""
    fetcher = TransferWorker([HostShape(4, NUM_BYTES)], ends(None, timeout_s=1.0))
    sign = msgspec.msgpack.encode(KeepAlive())
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        fetch(fetcher, f"tcp://127.0.0.1:{port}", 7)
        peer, _ = router.recv_multipart()
        began, report = time.monotonic(), None
        while report is None and time.monotonic() - began < 10:
            router.send_multipart([peer, sign])
            report = fetcher.report(wait_s=0.2)
        assert report is not None and report.not_fetched == [
            BlockHashWithGroupId(0, key_of(7).digest)
        ]
        assert time.monotonic() - began > 0.5
    fetcher.close()


def test_a_peer_that_comes_back_at_its_address_owes_nothing_of_before(sender, fetcher):
    """It was asked for a block before it ended: the new one knows nothing of that."""
    worker, endpoint = sender
    name = BlockHashWithGroupId(0, key_of(9).digest)
    fetch(fetcher, endpoint, 9)
    time.sleep(0.2)
    worker.close()
    again = TransferWorker([HostShape(4, NUM_BYTES)], ends(endpoint))
    try:
        assert reported(fetcher).not_fetched == [name]
        again.slot(0, 2)[:] = 3
        again.begin(ConnectorPlan(keep=[SlotBlock(0, 2, key_of(9))]))
        assert reported(again).kept == [name]
        fetch(fetcher, endpoint, 9, slot=3)
        assert reported(fetcher).fetched == [name]
        assert (fetcher.slot(0, 3) == 3).all()
    finally:
        again.close()
