"""Writes of one turn of the event loop leave together, in their order."""

import asyncio

import pytest
import uvloop

from octavo.server.batched_writes import BatchedTransport, WriteBatch


class Noted:
    """A transport that notes its calls in a list shared with others."""

    def __init__(self, name, calls):
        self.name = name
        self.calls = calls

    def write(self, data):
        self.calls.append((self.name, data))

    def close(self):
        self.calls.append((self.name, None))

    def is_closing(self):
        return (self.name, None) in self.calls


def test_one_write_for_each_connection_after_whatever_is_ready():
    calls = []

    async def main():
        batch = WriteBatch()
        first, second = (BatchedTransport(Noted(name, calls), batch) for name in "ab")

        async def stream(transport, *texts):
            for text in texts:
                transport.write(text)
            calls.append("ran")

        await asyncio.gather(stream(first, b"1", b"2"), stream(second, b"3"))
        await asyncio.sleep(0)
        assert calls == ["ran", "ran", ("a", b"12"), ("b", b"3")]
        second.write(b"4")
        second.close()
        assert (
            calls[4:] == [("b", b"4"), ("b", None)]
            and second.is_closing()
            and not first.is_closing()
        )
        first.write(b"5")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert calls[6:] == [("a", b"5")]

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_closed_connection_delays_no_other(run):
    """Writes to a closed connection are dropped and delay no other connection of the batch; uvloop
    refuses them.
    """

    async def main():
        loop, batch, transports, faults = asyncio.get_running_loop(), WriteBatch(), {}, []
        loop.set_exception_handler(lambda loop, context: faults.append(context))

        class Server(asyncio.Protocol):
            def connection_made(self, transport):
                transports[transport.get_extra_info("peername")] = BatchedTransport(
                    transport, batch
                )

        server = await loop.create_server(Server, "127.0.0.1", 0)
        clients = [
            await asyncio.open_connection(*server.sockets[0].getsockname()) for _ in range(2)
        ]
        while len(transports) < 2:
            await asyncio.sleep(0.01)
        gone, there = (transports[writer.get_extra_info("sockname")] for _, writer in clients)
        gone.abort()
        await asyncio.sleep(0.05)
        gone.write(b"lost")
        there.write(b"told")
        assert await asyncio.wait_for(clients[1][0].readexactly(4), 5) == b"told"
        assert not faults
        for _, writer in clients:
            writer.close()
        server.close()

    run(main())
