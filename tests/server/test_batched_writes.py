"""Writes of one turn of the event loop leave together, in their order."""

import asyncio

from octavo.server.batched_writes import BatchedTransport, WriteBatch


class Noted:
    """A transport that notes what is done with it, in the list that several share."""

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
        assert calls[4:] == [("b", b"4"), ("b", None)] and second.is_closing() and not first.is_closing()
        first.write(b"5")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert calls[6:] == [("a", b"5")]

    asyncio.run(main())
