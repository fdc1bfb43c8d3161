"""Prompts that an engine of several ranks computes for another one, whose ranks may share out the
KV heads in another way, give the bits of one process; torch's with batch invariance.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from contextlib import ExitStack
from typing import Any

import pytest

from octavo import AsyncLLM, RequestOutput
from octavo.api.errors import ConfigError
from octavo.config.engine_config import EngineConfig
from octavo.distributed.transfer.address import check_ports
from octavo.distributed.transfer.block_sender import BlockSender
from octavo.utils.progress import quiet
from octavo.wiring.engine import build_with_process
from tests.support.llm_tools import (
    final,
    fingerprint,
    make_async,
    make_llm,
    small_options,
)
from tests.support.rank_processes import ranks_below
from tests.support.transfer_pairs import PARAMS, PROMPTS, expected, free_address, met, pair

FP32 = {"dtype": "float32"}
LLAMA = ("native", "llama", FP32)
GEMMA = ("native", "gemma3_text", FP32)
K8V4 = ("native", "qwen3", FP32 | {"kv_cache_dtype": "k8v4"})
INT4_KV = ("native", "gemma3_text", FP32 | {"kv_cache_dtype": "int4"})
INT8_KV = ("native", "qwen3", FP32 | {"kv_cache_dtype": "int8"})
TORCH = ("torch", "llama", FP32 | {"device": "cpu", "batch_invariant": True})
LIMIT_S = 120
"""Seconds within which everything must have been answered, on a slow machine too."""

pytestmark = pytest.mark.sampled(one_in=2)

slow = pytest.mark.slow
NUMBERS_OF_RANKS = [
    pytest.param(LLAMA, (2, 2), id="llama-2-2"),
    pytest.param(LLAMA, (1, 2), id="llama-1-2"),
    pytest.param(INT8_KV, (2, 1), id="int8-2-1"),
    pytest.param(K8V4, (1, 2), id="k8v4-1-2"),
    pytest.param(INT4_KV, (1, 1), id="int4-1-1"),
    *(
        pytest.param(model, sizes, id=f"{name}-{sizes[0]}-{sizes[1]}", marks=slow)
        for name, model, sizes in [
            ("gemma3", GEMMA, (2, 2)),
            ("int8", INT8_KV, (2, 2)),
            ("llama", LLAMA, (4, 4)),
            ("llama", LLAMA, (2, 1)),
            ("llama", LLAMA, (4, 2)),
            ("llama", LLAMA, (2, 4)),
            ("gemma3", GEMMA, (1, 2)),
            ("gemma3", GEMMA, (2, 1)),
            ("int8", INT8_KV, (1, 2)),
            ("torch", TORCH, (2, 2)),
            ("torch", TORCH, (1, 2)),
            ("torch", TORCH, (2, 1)),
        ]
    ),
]


async def answers_of(
    prefill: AsyncLLM, decode: AsyncLLM, prompts: Any, params: Any
) -> list[RequestOutput]:
    await met(prefill, decode)
    asked = asyncio.gather(*map(final, [decode] * len(prompts), prompts, params))
    return await asyncio.wait_for(asked, LIMIT_S)


@pytest.mark.parametrize(("model", "num_ranks"), NUMBERS_OF_RANKS)
def test_ranks_give_the_bits_of_one_process(model: Any, num_ranks: tuple[int, int]) -> None:
    answers = expected(model)
    with pair(model, num_ranks=num_ranks) as (prefill, decode):
        outputs = asyncio.run(answers_of(prefill, decode, PROMPTS, PARAMS))
        assert [fingerprint(output) for output in outputs] == answers
        assert [output.num_cached_tokens for output in outputs] == [112, 128, 0, 192]
        stats = decode.stats().connector
        assert stats.num_not_fetched == 0 and stats.num_fetched == stats.num_loaded > 0


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=slow)])
def test_blocks_of_which_one_rank_has_no_part_are_computed_here(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank's part of every second block does not leave, and those of the others do."""
    send, send_layer = BlockSender.send_block, BlockSender.send_layer

    def send_others(one: Any, ask: Any, name: Any, data: Any) -> None:
        if name.digest[0] % 2:
            send(one, ask, name, data)

    def send_layers(one: Any, ask: Any, names: Any, offset: int, data: Any) -> None:
        kept = [at for at, name in enumerate(names) if name.digest[0] % 2]
        if kept:
            send_layer(one, ask, [names[at] for at in kept], offset, data[kept])

    monkeypatch.setattr(BlockSender, "send_block", send_others)
    monkeypatch.setattr(BlockSender, "send_layer", send_layers)
    answers = expected(LLAMA)
    with pair(LLAMA, num_ranks=(num_ranks, num_ranks), kv_transfer_timeout=2.0) as engines:
        outputs = asyncio.run(answers_of(*engines, PROMPTS, PARAMS))
        assert [fingerprint(output) for output in outputs] == answers
        stats = engines[1].stats()
        assert stats.connector.num_not_fetched > 0 and stats.connector.num_fetched > 0
        assert stats.num_used_blocks == 0


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=slow)])
def test_a_rank_of_the_peer_that_dies_or_stands_still_changes_nothing(sign: int) -> None:
    """Its engine is lost, and is replaced where it has died; the answers do not wait for that."""

    async def run() -> None:
        await met(prefill, decode)
        os.kill(ranks_below(pid)[0], sign)
        outputs = await asyncio.gather(*map(final, [decode] * 4, PROMPTS, PARAMS))
        assert [fingerprint(output) for output in outputs] == answers
        again = await asyncio.gather(*map(final, [decode] * 4, PROMPTS, PARAMS))
        assert [fingerprint(output) for output in again] == answers

    answers = expected(LLAMA)
    backend, family, precision = LLAMA
    address = free_address(2)
    common = small_options(family) | {"backend": backend, "kv_transfer": "zmq"} | precision
    common |= {"kv_transfer_timeout": 3.0, "tensor_parallel_size": 2}
    options = common | {"role": "prefill", "kv_transfer_address": address}
    with ExitStack() as stack:
        frontend = build_with_process(EngineConfig.from_options(**options), quiet)
        prefill, pid = AsyncLLM(frontend), frontend.client.pid
        stack.callback(prefill.close)
        decode = make_async(
            role="decode", prefill_peer=[address], kv_transfer_min_tokens=32, **common
        )
        stack.callback(decode.close)
        try:
            asyncio.run(asyncio.wait_for(run(), LIMIT_S))
            assert decode.stats().num_used_blocks == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_parallel_size": 2}, "kv_transfer: requires expert_parallel_size 1"),
        (
            {"tensor_parallel_size": 2, "rank_address": "127.0.0.1:8990", "backend": "torch"},
            "kv_transfer: requires all ranks on one machine, got a rank_address",
        ),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "not supported with kv_transfer zmq",
        ),
        ({"tensor_parallel_size": 3}, "got 3, but the model has 2 KV heads"),
    ],
)
def test_layouts_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_llm(**{"backend": "native", "kv_transfer": "zmq"} | options)


def test_ports_that_are_too_few_are_refused() -> None:
    check_ports(65533, 2, name="kv_transfer_address")
    with pytest.raises(ConfigError, match="got the port 65534, expected at most 65533"):
        check_ports(65534, 2, name="kv_transfer_address")
