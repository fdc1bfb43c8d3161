"""Two engines in this process, of which one computes the other's prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from octavo import AsyncLLM
from octavo.distributed.disaggregation.transfers import Transfers
from octavo.frontend.input_processor import ParentRequest
from tests.support.free_ports import free_port
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    final,
    fingerprint,
    make_async,
    make_llm,
    prompts_of,
    small_options,
)

PROMPTS = prompts_of(120, 130, 17, 200)
PARAMS = [GREEDY, SAMPLED, PENALISED, SAMPLED]
MODELS = [
    ("native", "llama", {"dtype": "bfloat16"}),
    ("native", "gemma3_text", {}),
    ("native", "qwen3", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    ("reference", "llama", {}),
]
"""Backend, family and precision."""


def free_address(num_ranks: int = 1) -> str:
    """Returns an address of which the port, and those above it for as many ranks, are free."""
    return f"127.0.0.1:{free_port(1 + num_ranks)}"


@contextmanager
def pair(
    model: Any = MODELS[0], *, num_ranks: tuple[int, int] = (1, 1), **options: Any
) -> Iterator[tuple[AsyncLLM, AsyncLLM]]:
    """Starts an engine that computes prompts and one that has them computed, on `num_ranks`."""
    backend, family, precision = model
    common = {**small_options(family), "backend": backend, "kv_transfer": "zmq"}
    common["in_process"] = True
    common |= {**precision, **options}
    address = free_address(num_ranks[0])
    with ExitStack() as stack:
        prefill = make_async(
            role="prefill",
            kv_transfer_address=address,
            tensor_parallel_size=num_ranks[0],
            **common,
        )
        stack.callback(prefill.close)
        decode = make_async(
            role="decode",
            prefill_peer=[address],
            kv_transfer_min_tokens=32,
            tensor_parallel_size=num_ranks[1],
            **common,
        )
        stack.callback(decode.close)
        yield prefill, decode


async def met(prefill: AsyncLLM, decode: AsyncLLM) -> None:
    """Waits until the two engines know each other."""
    prefill.start()
    decode.start()
    for _ in range(500):
        if decode.prefill_peers:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engines did not meet")


async def num_requests(engine: AsyncLLM) -> int:
    """Returns how many requests an engine has had, the one by which it is asked included.

    Stats come with outputs, and an engine may be done with a prompt that it computes for another
    before its own output is read; a request of its own brings them up to date.
    """
    await final(engine, [3, 5], GREEDY)
    return engine.stats().num_added


def note_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the id of each request whose prompt a peer is to compute.

    The peer's own count may lack one: it may have the blocks already, and then the prompt is
    withdrawn before it runs.
    """
    asked: list[str] = []

    def offer_to_peers(transfers: Transfers, request: ParentRequest) -> None:
        original(transfers, request)
        if request.samples[0].kv_source:
            asked.append(request.request_id)

    original = Transfers.offer_to_peers
    monkeypatch.setattr(Transfers, "offer_to_peers", offer_to_peers)
    return asked


def expected(model: Any, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[Any]:
    """Returns what one process answers."""
    backend, family, precision = model
    with make_llm(family, backend=backend, **precision) as llm:
        return [fingerprint(output) for output in llm.generate(prompts, params)]
