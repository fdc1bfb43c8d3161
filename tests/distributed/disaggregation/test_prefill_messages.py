"""The ports of prompts between engines: what peers may send that no Octavo would."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from octavo.api.errors import InvalidRequest
from octavo.api.outputs import RequestOutput
from octavo.distributed.disaggregation.prefill_service import PrefillService
from octavo.distributed.disaggregation.remote_prefill import PrefillPeers
from octavo.distributed.options import TransferOptions
from octavo.distributed.transfer.messages import (
    Declined,
    FrontReplyMessage,
    Hello,
    Prefill,
    Welcome,
)
from octavo.engine.protocol.kv_messages import TransferFacts
from tests.support.free_ports import free_port

FACTS = TransferFacts({"model": "a"}, "tcp://127.0.0.1:1", 1, 16)
REPLIES = msgspec.msgpack.Decoder(FrontReplyMessage)
FORGED = [
    b"",
    b"\xc1",
    b"x" * 1000,
    b"\x81\xa4type\xa2\xff\xfe",
    b"\x91" * 100_000,
    msgspec.msgpack.encode({"type": "Prefill"}),
    msgspec.msgpack.encode(Prefill("name", [1])).replace(b"name", b"\xff\xfe\xfd\xfc"),
    msgspec.msgpack.encode(Prefill("name", [1]))[:-3],
]


def encoded(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def refuse(*_: object) -> asyncio.Future[RequestOutput]:
    raise InvalidRequest("not this one")


def fail(*_: object) -> asyncio.Future[RequestOutput]:
    raise KeyError("a fault of this engine")


def test_forged_requests_disturb_no_other() -> None:
    async def main() -> None:
        address = f"127.0.0.1:{free_port(2)}"
        options = TransferOptions(kv_transfer="zmq", role="prefill", kv_transfer_address=address)
        service = PrefillService(options, FACTS, refuse)
        service.start()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(f"tcp://{address}")
            for data in FORGED:
                await peer.send(data)
            await peer.send_multipart([b"a", b"b"])
            await peer.send(encoded(Hello({})))
            async with asyncio.timeout(5):
                assert isinstance(REPLIES.decode(await peer.recv()), Welcome)
            await peer.send(encoded(Prefill("r", [1])))
            async with asyncio.timeout(5):
                assert REPLIES.decode(await peer.recv()) == Declined("r", "not this one")
        service.close()

    asyncio.run(main())


def test_a_fault_of_the_engine_that_computes_is_told() -> None:
    """The one that asked would wait for the blocks until its clock ends that."""

    async def main() -> None:
        address = f"127.0.0.1:{free_port(2)}"
        options = TransferOptions(kv_transfer="zmq", role="prefill", kv_transfer_address=address)
        service = PrefillService(options, FACTS, fail)
        service.start()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(f"tcp://{address}")
            await peer.send(encoded(Prefill("r", [1])))
            async with asyncio.timeout(5):
                declined = REPLIES.decode(await peer.recv())
            assert isinstance(declined, Declined) and "KeyError" in declined.reason
        service.close()

    asyncio.run(main())


@pytest.mark.parametrize("data", FORGED[:5], ids=range(5))
def test_a_forged_reply_is_passed_over(data: bytes) -> None:
    async def main() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as service:
            service.linger = 0
            port = service.bind_to_random_port("tcp://127.0.0.1")
            options = TransferOptions(
                kv_transfer="zmq", role="decode", prefill_peer=(f"127.0.0.1:{port}",)
            )
            peers = PrefillPeers(options, FACTS, lambda _: None, 512)
            peers.start()
            async with asyncio.timeout(5):
                peer, hello = await service.recv_multipart()
                assert msgspec.msgpack.decode(hello, type=Hello).facts == FACTS.facts
                await service.send_multipart([peer, data])
                await service.send_multipart([peer, data, data])
                await service.send_multipart([peer, encoded(Welcome(FACTS.facts, "tcp://b:1"))])
                while not peers.there:
                    await asyncio.sleep(0.01)
            peers.close()

    asyncio.run(main())
