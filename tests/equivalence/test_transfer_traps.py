"""Traps of prefill and decode apart: blocks that fail where others share them, in one of several
cache groups, in an engine that is idle otherwise, and a peer that is another one at its address.

Bitwise: answers are those of one engine, and nothing waits for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from octavo import AsyncLLM
from octavo.distributed.transfer.block_sender import BlockSender
from octavo.distributed.transfer.send_buffer import Ask, BlockData
from octavo.engine.protocol.kv_messages import BlockHashWithGroupId
from tests.support.llm_tools import (
    GREEDY,
    SAMPLED,
    final,
    fingerprint,
    make_async,
    prompts_of,
    small_options,
)
from tests.support.transfer_pairs import MODELS, expected, free_address, met, num_requests, pair

LLAMA, GEMMA = MODELS[0], MODELS[1]
LIMIT_S = 60
"""Seconds within which everything must have been answered, on a slow machine too."""

(LONG_PROMPT,) = prompts_of(150)


@pytest.fixture
def lose(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[BlockHashWithGroupId], bool]], None]:
    """Returns what makes some blocks never leave the engine that computes them."""
    send, send_layer = BlockSender.send_block, BlockSender.send_layer

    def lose(is_lost: Callable[[BlockHashWithGroupId], bool]) -> None:
        def send_others(
            one: BlockSender, ask: Ask, name: BlockHashWithGroupId, data: BlockData
        ) -> None:
            if not is_lost(name):
                send(one, ask, name, data)

        def send_layers_of_others(
            one: BlockSender,
            ask: Ask,
            names: Sequence[BlockHashWithGroupId],
            offset: int,
            data: Any,
        ) -> None:
            kept = [at for at, name in enumerate(names) if not is_lost(name)]
            send_layer(one, ask, [names[at] for at in kept], offset, data[kept])

        monkeypatch.setattr(BlockSender, "send_block", send_others)
        monkeypatch.setattr(BlockSender, "send_layer", send_layers_of_others)

    return lose


def answers_of(model: Any, requests: list[tuple[list[int], Any]]) -> None:
    """Has a pair answer requests together, and compares with one engine."""
    wanted = expected(model, *map(list, zip(*requests, strict=True)))

    async def run(prefill: AsyncLLM, decode: AsyncLLM) -> None:
        await met(prefill, decode)
        outputs = await asyncio.gather(*(final(decode, *request) for request in requests))
        assert [fingerprint(output) for output in outputs] == wanted

    with pair(model, kv_transfer_timeout=1.0) as (prefill, decode):
        asyncio.run(asyncio.wait_for(run(prefill, decode), LIMIT_S))
        stats = decode.stats()
        assert stats.connector.num_not_fetched > 0
        assert stats.num_used_blocks == 0


def test_a_request_whose_blocks_fail_is_woken_in_an_idle_engine(lose) -> None:
    """No block comes at all, and no other request makes a step."""
    lose(lambda name: True)
    answers_of(LLAMA, [(LONG_PROMPT, GREEDY)])


def test_requests_that_share_blocks_recompute_those_that_fail(lose) -> None:
    """Every second block is lost: two requests with one prompt, a longer one and one with three
    samples find what came, compute the rest and share it.
    """
    lose(lambda name: name.digest[0] % 2 == 0)
    three = msgspec.structs.replace(SAMPLED, n=3)
    longer = LONG_PROMPT + prompts_of(40)[0]
    requests = [(LONG_PROMPT, GREEDY), (LONG_PROMPT, SAMPLED), (longer, GREEDY)]
    answers_of(LLAMA, [*requests, (LONG_PROMPT, three)])


@pytest.mark.parametrize("group", [0, 1])
def test_blocks_of_one_cache_group_fail(lose, group: int) -> None:
    """Full and window layers have groups of their own; what came of the other one is no hit."""
    lose(lambda name: name.group == group)
    answers_of(GEMMA, [(LONG_PROMPT, GREEDY), (LONG_PROMPT, SAMPLED)])


def test_a_peer_that_comes_back_as_another_is_not_asked(caplog) -> None:
    """It ends, comes back at its address with another precision, and then as it was."""
    backend, family, precision = LLAMA
    address = free_address()
    common = small_options(family) | {"backend": backend, "kv_transfer": "zmq"} | precision
    (wanted,) = expected(LLAMA, [LONG_PROMPT], [GREEDY])

    def prefiller(**changes: Any) -> AsyncLLM:
        options = common | {"role": "prefill", "kv_transfer_address": address} | changes
        return make_async(**options)

    async def ask(decode: AsyncLLM) -> None:
        assert await decode.reset_prefix_cache(reset_connector=True)
        assert fingerprint(await final(decode, LONG_PROMPT, GREEDY)) == wanted

    async def alone(decode: AsyncLLM) -> None:
        while decode.prefill_peers:
            await asyncio.sleep(0.01)

    async def run(decode: AsyncLLM) -> None:
        first = prefiller()
        await met(first, decode)
        await ask(decode)
        assert await num_requests(first) == 1 + 1
        await asyncio.to_thread(first.close)
        await alone(decode)
        other = prefiller(dtype="float32")
        other.start()
        while "its KV blocks differ" not in caplog.text:
            await asyncio.sleep(0.01)
        await ask(decode)
        assert other.stats().num_added == 0 and decode.prefill_peers == []
        await asyncio.to_thread(other.close)
        again = prefiller()
        try:
            await met(again, decode)
            await ask(decode)
            assert await num_requests(again) == 1 + 1
        finally:
            await asyncio.to_thread(again.close)

    with ExitStack() as stack:
        decode = make_async(
            role="decode", prefill_peer=[address], kv_transfer_min_tokens=32, **common
        )
        stack.callback(decode.close)
        asyncio.run(asyncio.wait_for(run(decode), LIMIT_S))
