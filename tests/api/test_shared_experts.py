"""Engines that share their experts and lose one another: all are started again, no request is lost,
and each goes on bit by bit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from octavo import AsyncLLM, SamplingParams
from octavo.api.errors import ConfigError
from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.fleet import FleetClient
from octavo.utils.progress import quiet
from octavo.wiring.engine import build_with_process
from tests.support.llm_tools import fingerprint, make_llm, prompts_of, small_options
from tests.support.rank_processes import ranks_below
from tests.support.tiny_models import tiny_model

PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=120, ignore_eos=True, logprobs=1)
PROMPTS = prompts_of(5, 20, 33, 48)
MODEL = {"backend": "native", "dtype": "float32"}
SHARED = MODEL | {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "routing_policy": "round_robin",
    "kv_cache_memory_bytes": 8 << 20,
}


def options() -> dict[str, object]:
    return small_options(model_path=tiny_model("qwen3_moe", num_hidden_layers=2).path)


@pytest.mark.parametrize(
    "layout",
    [{}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow)],
    ids=["engines", "stages"],
)
def test_engines_that_lose_another_go_on_together_with_their_requests(
    layout: dict[str, object],
) -> None:
    """Where engines have stages, what dies is the first stage of one: the other engine's waits for
    it in a memory of their own.
    """
    path = tiny_model("qwen3_moe", num_hidden_layers=2).path
    with make_llm(model_path=path, **MODEL) as one:
        wanted = [fingerprint(output) for output in one.generate(PROMPTS, PARAMS)]
    said: list[str] = []
    config = EngineConfig.from_options(**options() | SHARED | layout)
    frontend = build_with_process(config, said.append)
    llm = AsyncLLM(frontend)
    client = frontend.client
    assert isinstance(client, FleetClient)

    async def run() -> list[list]:
        streams = [llm.submit(prompt, PARAMS) for prompt in PROMPTS]
        for stream in streams:
            await anext(stream)
        os.kill((ranks_below(client.pids[1]) or client.pids)[-1], signal.SIGKILL)
        return [fingerprint(await stream.final()) for stream in streams]

    try:
        began = time.monotonic()
        found = asyncio.run(asyncio.wait_for(run(), 240))
        assert time.monotonic() - began < config.observe.stall_timeout
        restarts = [engine.num_restarts for engine in llm.stats().engines]
    finally:
        llm.close()
    assert found == wanted
    assert restarts == [1, 1]
    assert any("engine 1 of 2 has ended; its experts are missing" in line for line in said)


def test_the_reason_of_the_engine_that_cannot_start_is_raised() -> None:
    """Its KV cache is too small for one request; the others only hear that it has ended."""
    config = EngineConfig.from_options(**options() | SHARED | {"kv_cache_memory_bytes": 1000})
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        build_with_process(config, quiet)
