"""AsyncLLM closed from any thread, and over a client that refuses: every stream has its end, and
nothing is left behind.
"""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from octavo import AsyncLLM
from octavo.api.errors import EngineDead, InvalidRequest
from octavo.config.engine_config import EngineConfig
from octavo.utils.progress import quiet
from octavo.wiring.engine import build_in_process
from tests.support.llm_tools import GREEDY, LONG, make_async, small_options


def test_closing_from_another_thread_ends_the_streams_at_once():
    """Every stream learns of it promptly, whatever the loop does just then."""
    llms = [make_async() for _ in range(2)] + [make_async(in_process=False)]

    async def run(llm, turn):
        streams = [llm.submit([5 + i], LONG) for i in range(turn % 7 + 1)]
        readers = [asyncio.ensure_future(read(stream)) for stream in streams]
        await anext(llm.submit([3], LONG))
        await asyncio.sleep(turn % 5 * 0.002)
        start = time.monotonic()
        closing = threading.Thread(target=llm.close)
        closing.start()
        ends = await asyncio.gather(*readers)
        assert time.monotonic() - start < 5.0
        assert set(ends) <= {"the engine was closed"}
        with pytest.raises(EngineDead, match="the engine was closed"):
            llm.submit([5], GREEDY)
        await asyncio.to_thread(closing.join)

    async def read(stream):
        try:
            async for _ in stream:
                pass
        except EngineDead as error:
            return str(error)

    for turn in range(30):
        llm = llms.pop() if llms else make_async()
        asyncio.run(run(llm, turn))


def test_what_cannot_be_sent_leaves_nothing_behind():
    frontend = build_in_process(EngineConfig.from_options(**small_options()), quiet)
    client = RefusingClient(frontend.client)
    llm = AsyncLLM(replace(frontend, client=client))

    async def run():
        with pytest.raises(InvalidRequest, match="cannot be encoded"):
            llm.submit([5], GREEDY, "mine")
        assert llm.num_unfinished == 0
        client.refuses = False
        assert (await llm.submit([5], GREEDY, "mine").final()).finished, "its name is free"

    asyncio.run(run())
    llm.close()


class RefusingClient:
    """A client that takes no request until told to; otherwise the one it is over."""

    def __init__(self, client):
        self._client = client
        self.refuses = True

    def add(self, requests):
        if self.refuses:
            raise InvalidRequest("this cannot be encoded")
        self._client.add(requests)

    def __getattr__(self, name):
        return getattr(self._client, name)
