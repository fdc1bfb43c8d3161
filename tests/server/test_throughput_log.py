"""The line about load and throughput that a server logs under traffic."""

import re
import time
from types import SimpleNamespace

from octavo.engine.protocol.stats import EngineStats
from octavo.server.run import ThroughputLog, format_load
from tests.support.live_server import LiveServer, until
from tests.support.tiny_tokenizer import tiny_model_with_text


def test_rates_are_those_since_the_last_line():
    before = EngineStats(prompt_tokens=100, generation_tokens=10, num_preemptions=1)
    now = EngineStats(
        num_running=2,
        num_waiting=1,
        num_used_blocks=25,
        num_blocks=100,
        num_preemptions=3,
        prefix_query_tokens=200,
        prefix_hit_tokens=50,
        prompt_tokens=300,
        generation_tokens=110,
    )
    assert format_load(before, now, 10.0) == (
        "running 2, waiting 1, KV cache usage 25.0%, prefix cache hit rate 25.0%, prompt 20.0"
        " tok/s,"
        " generation 10.0 tok/s, preemptions 2"
    )
    assert "hit rate" not in format_load(now, now, 10.0)


def test_idle_and_unloaded_models_are_not_logged():
    lines = []
    slot = SimpleNamespace(name="a", loaded=SimpleNamespace(stats=lambda: EngineStats(num_steps=5)))
    now = time.monotonic()
    log = ThroughputLog([slot], lines.append)
    log.log(now + 10)
    assert len(lines) == 1 and lines[0].startswith("a: running 0")
    log.log(now + 20)
    slot.loaded = None
    log.log(now + 30)
    assert len(lines) == 1
    slot.loaded = SimpleNamespace(stats=lambda: EngineStats(num_steps=2, generation_tokens=20))
    log.log(now + 40)
    assert len(lines) == 2 and "generation 2.0 tok/s" in lines[1]


def test_a_server_logs_while_it_has_traffic():
    server = LiveServer(str(tiny_model_with_text()), "--log-stats-interval-s=0.1")
    try:
        body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}
        with server.http() as client:
            assert client.post("/v1/completions", json=body).status_code == 200
        pattern = re.compile(r": running \d+, waiting 0, KV cache .*generation [\d.]+ tok/s")
        assert until(lambda: any(pattern.search(line) for line in server.lines))
    finally:
        server.stop()
