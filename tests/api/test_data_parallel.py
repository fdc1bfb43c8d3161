"""Several engines of one model: bitwise one engine's answers, and options that do not fit refused
before anything loads.
"""

import asyncio

import pytest

from octavo.api.errors import ConfigError
from octavo.config.derive import derive
from octavo.config.engine_config import EngineConfig
from octavo.wiring.model import open_model
from octavo.wiring.processes import start_processes
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    fingerprint,
    make_async,
    make_llm,
    prompts_of,
    small_options,
)

PROMPTS = prompts_of(5, 40, 40, 17, 60, 33)
PARAMS = [GREEDY, SAMPLED, PENALISED, SAMPLED, GREEDY, PENALISED]
BACKEND = "native"


def derived(**options):
    config = EngineConfig.from_options(**options)
    return derive(config, model_context_tokens=256, num_threads=8)


@pytest.mark.parametrize("policy", ["kv", "round_robin"])
def test_two_engines_yield_one_engines_tokens_and_logprobs(policy):
    with make_llm(backend=BACKEND) as one:
        expected = [fingerprint(output) for output in one.generate(PROMPTS, PARAMS)]
    with make_llm(backend=BACKEND, data_parallel_size=2, routing_policy=policy) as two:
        got = [fingerprint(output) for output in two.generate(PROMPTS, PARAMS)]
        engines = two.frontend.stats.engines
    assert got == expected
    assert len(engines) == 2 and all(engine.num_steps for engine in engines)


def test_streams_run_on_both_engines():
    """The stats name the engines one by one."""

    async def run():
        llm = make_async(in_process=False, backend=BACKEND, data_parallel_size=2)
        try:
            streams = [llm.submit(prompt, GREEDY) for prompt in PROMPTS]
            finals = []
            for stream in streams:
                async for output in stream:
                    last = output
                finals.append(fingerprint(last))
            assert await llm.requests() == []
            assert await llm.reset_prefix_cache()
            return finals, llm.stats()
        finally:
            llm.close()

    with make_llm(backend=BACKEND) as one:
        expected = [fingerprint(output) for output in one.generate(PROMPTS, GREEDY)]
    finals, stats = asyncio.run(run())
    assert finals == expected
    assert sum(engine.num_added for engine in stats.engines) == len(PROMPTS)


def test_threads_and_memory_are_shared_out():
    assert derived(data_parallel_size=4).backend.threads == 2
    assert derived(data_parallel_size=4, threads=3).backend.threads == 3
    options = small_options() | {"backend": BACKEND, "data_parallel_size": 2}
    options["kv_cache_memory_bytes"] = "100TiB"
    with pytest.raises(ConfigError, match="engine 0, engine 1 do not fit in memory together"):
        start_processes(open_model(EngineConfig.from_options(**options)), lambda text: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 65}, "data_parallel_size: got 65, expected at most 64"),
        ({"data_parallel_size": 0}, "data_parallel_size: got 0"),
        ({"routing_policy": "sticky"}, "routing_policy: got 'sticky', requires several"),
        ({"data_parallel_size": 2, "routing_policy": "best"}, "routing_policy: got 'best'"),
        ({"data_parallel_size": 2, "kv_transfer": "zmq"}, "expected 1 with kv_transfer"),
        ({"data_parallel_size": 2, "backend": "torch"}, "without kv_cache_memory_bytes"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        derived(**options)


def test_ranks_and_several_engines_exclude_each_other():
    with pytest.raises(ConfigError, match="expected 1 with tensor_parallel_size 2"):
        derived(data_parallel_size=2, tensor_parallel_size=2, backend="torch")
