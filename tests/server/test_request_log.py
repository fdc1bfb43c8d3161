"""Ids of requests, the access log, the log of slow requests, JSON lines, and traces."""

import asyncio
import json
import logging

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.api.async_llm import AsyncLLM
from octavo.server.app import create_app
from octavo.server.http.log_format import JsonFormatter
from octavo.server.http.request_log import SlowLog, log_access
from octavo.server.http.tracing import Tracer
from octavo.server.settings import ServerSettings
from octavo.server.state.slot import EngineSlot
from tests.support.tiny_tokenizer import tiny_model_with_text

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def ask(app, method, path, **options):
    async def send():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


@pytest.fixture(scope="module")
def finished():
    """Ends of two requests to a tiny model, with the first's answer."""
    seen = []

    async def run():
        llm = AsyncLLM.from_options(
            model=str(tiny_model_with_text()), threads=1, kv_cache_memory_bytes="16MiB"
        )
        try:
            app = create_app(llm)
            app.state.request_readers.append(seen.append)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                body = {"prompt": [[5, 6], [7]], "max_tokens": 3, "ignore_eos": True}
                headers = {"traceparent": PARENT, "X-Request-Id": "mine-1"}
                first = await client.post("/v1/completions", json=body, headers=headers)
                await client.post("/v1/completions", json=body | {"stream": True})
                return first
        finally:
            llm.close()

    return asyncio.run(run()), seen


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("abc-1.2:3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)],
)
def test_an_id_fit_for_a_log_is_kept_and_any_other_replaced(http, sent, kept):
    answers = [
        http.get("/health", headers={"X-Request-Id": sent.encode()}),
        http.get("/none", headers={"X-Request-Id": sent.encode()}),
        http.post("/v1/completions", json={}, headers={"X-Request-Id": sent.encode()}),
    ]
    assert [answer.status_code for answer in answers] == [200, 404, 400]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids == [sent] * 3 if kept else all(len(name) == 32 for name in ids)
    assert kept or len(set(ids)) == 3


def test_a_refused_key_and_a_fault_of_ours_have_an_id_too():
    app = create_app(EngineSlot(), ServerSettings(api_key=("k",)))
    assert len(ask(app, "GET", "/version").headers["x-request-id"]) == 32

    @app.get("/broken")
    async def broken():
        raise RuntimeError("secret")

    answer = ask(app, "GET", "/broken", headers={"Authorization": "Bearer k"})
    assert answer.status_code == 500 and len(answer.headers["x-request-id"]) == 32
    assert "secret" not in answer.text


def test_lines_are_json_objects_that_hold_no_line_break(finished, caplog):
    with caplog.at_level(logging.INFO, "octavo.access"):
        log_access(finished[1][0])
        logging.getLogger("octavo.access").info("a\nb")
    first, second = (json.loads(JsonFormatter().format(record)) for record in caplog.records)
    assert first["request_id"] == "mine-1" and first["status"] == 200
    assert (first["method"], first["path"]) == ("POST", "/v1/completions")
    assert first["level"] == "info" and first["duration_s"] > 0 and second["message"] == "a\nb"


def test_a_slow_request_is_logged_with_where_its_time_went(finished, caplog):
    for request in finished[1]:
        SlowLog(1e9)(request)
        SlowLog(0)(request)
    assert len(caplog.records) == 2, "each once: streams as well as whole answers"
    assert "slow request mine-1: POST /v1/completions took" in caplog.records[0].getMessage()
    line = json.loads(JsonFormatter().format(caplog.records[1]))
    assert line["timings"]["num_steps"] >= 3 and line["timings"]["decode_s"] > 0


def test_spans_follow_a_request_through_queue_prefill_and_decode(finished):
    exporter = InMemorySpanExporter()
    tracer = Tracer(SimpleSpanProcessor(exporter))
    answer, (whole, stream) = finished
    assert answer.headers["x-request-id"] == "mine-1"
    tracer(whole)
    spans = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == sorted(
        ["POST /v1/completions", *["queue", "prefill", "decode"] * 2]
    )
    (outer,) = (span for span in spans if span.name == "POST /v1/completions")
    assert format(outer.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(outer.parent.span_id, "016x") == PARENT.split("-")[2]
    assert outer.attributes["http.response.status_code"] == 200
    for span in spans:
        assert outer.start_time <= span.start_time <= span.end_time <= outer.end_time
        if span is not outer:
            assert span.parent.span_id == outer.context.span_id
            assert span.attributes["gen_ai.usage.output_tokens"] == 3
    exporter.clear()
    tracer(stream)
    assert len(exporter.get_finished_spans()) == 7
    tracer.close()
