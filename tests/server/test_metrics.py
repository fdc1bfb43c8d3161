"""GET /metrics: names, labels and numbers."""

import re
import time

import pytest

from octavo.server.state.metrics import COUNTERS, GAUGES
from octavo.server.state.model_metrics import HISTOGRAMS

BODY = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def text(http):
    http.post("/v1/completions", json=BODY)
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return response.text


@pytest.mark.parametrize("prefix", ["octavo", "vllm"])
def test_every_name_is_there(text, prefix):
    labels = r'\{engine="0",model_name="tiny"\}'
    for name in [*GAUGES, *(f"{name}_total" for name in COUNTERS)]:
        assert re.search(rf"^{prefix}:{name}{labels} \d", text, re.MULTILINE), name
    for name in HISTOGRAMS:
        assert re.search(rf"^{prefix}:{name}_count{labels} [1-9]", text, re.MULTILINE), name
        assert re.search(
            rf'^{prefix}:{name}_bucket{{engine="0",le="\+Inf",model_name="tiny"}} [1-9]',
            text,
            re.MULTILINE,
        ), name
    assert re.search(
        rf'^{prefix}:request_success_total{{engine="0",finished_reason="length",model_name="tiny"}}'
        r" [1-9]",
        text,
        re.MULTILINE,
    )


def test_routers_are_told_of_the_kv_cache(text):
    (labels,) = re.findall(r"^vllm:cache_config_info\{(.*)\} 1\.0$", text, re.MULTILINE)
    assert 'block_size="16"' in labels and 'enable_prefix_caching="True"' in labels
    (blocks,) = re.findall(r'num_gpu_blocks="(\d+)"', labels)
    assert int(blocks) > 0


def test_each_family_is_described_once(text):
    described = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(described) == len(set(described)) and "_created" not in text


def test_numbers_add_up(server, http):
    def numbers():
        names = (
            "prompt_tokens_total",
            "generation_tokens_total",
            "request_generation_tokens_sum",
            "inter_token_latency_seconds_count",
        )
        return [server.metric(name) for name in names]

    before = numbers()
    http.post("/v1/completions", json=BODY)
    assert [after - earlier for after, earlier in zip(numbers(), before, strict=True)] == [
        5,
        5,
        5,
        4,
    ]


def value(text, name, **more):
    labels = {"engine": "0", "model_name": "tiny"} | more
    written = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
    return float(re.search(rf"^vllm:{name}{{{re.escape(written)}}} (\S+)$", text, re.MULTILINE)[1])


def test_the_tokens_of_each_step_are_counted(start):
    with start().http() as http:
        before = http.get("/metrics").text
        assert value(before, "iteration_tokens_total_sum") == 0
        http.post("/v1/completions", json=BODY | {"prompt": [5] * 20})
        text = http.get("/metrics").text
    # The prompt is one step, which samples the first token; four more follow.
    assert value(text, "iteration_tokens_total_sum") == 24
    assert value(text, "iteration_tokens_total_count") == 5
    assert value(text, "iteration_tokens_total_bucket", le="1.0") == 4
    assert value(text, "iteration_tokens_total_bucket", le="16.0") == 4
    assert value(text, "iteration_tokens_total_bucket", le="32.0") == 5


def test_latencies_of_an_aborted_request_are_observed(start):
    names = ("e2e_request_latency_seconds_count", "time_to_first_token_seconds_count")
    with start().http() as http:
        lasting = BODY | {"max_tokens": 400, "stream": True, "temperature": 0}
        with http.stream("POST", "/v1/completions", json=lasting) as answer:
            next(answer.iter_lines())
        for _ in range(100):
            text = http.get("/metrics").text
            if 'finished_reason="abort"' in text:
                break
            time.sleep(0.05)
    assert value(text, "request_success_total", finished_reason="abort") == 1
    assert [value(text, name) for name in names] == [1, 1]
    assert value(text, "request_prompt_tokens_sum") > 0
