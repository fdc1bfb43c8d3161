"""Faults of the engine: a request that cannot be computed fails alone, and its error shows nothing
of the inside.
"""

import asyncio
import json
import shutil
from dataclasses import replace

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from octavo import AsyncLLM
from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.process import ProcessClient
from octavo.engine.clients.supervised import SupervisedClient
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.slot import EngineSlot
from octavo.wiring.engine import build_in_process
from tests.support.engine_fakes import expected_tokens
from tests.support.live_server import LETTERS, LiveServer, events_of, ids_of
from tests.support.llm_tools import small_options
from tests.support.tiny_tokenizer import tiny_model_with_text

GOOD = {
    "prompt": "Hello",
    "max_tokens": 40,
    "seed": 1,
    "allowed_token_ids": LETTERS,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def sick(tmp_path_factory):
    """A server whose model yields NaN for every prompt with a Z."""
    model = shutil.copytree(tiny_model_with_text(), tmp_path_factory.mktemp("sick") / "model")
    weights = load_file(model / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"].copy()
    embeddings[ids_of("Z")] = float("nan")
    save_file(
        weights | {"model.embed_tokens.weight": embeddings},
        model / "model.safetensors",
        {"format": "pt"},
    )
    server = LiveServer(str(model), "--served-model-name=tiny")
    yield server
    server.stop()


def test_nan_logits_fail_their_own_request_only(sick):
    async def ask_all():
        async with sick.async_http() as client:
            return await asyncio.gather(
                *(
                    client.post("/v1/completions", json=GOOD | {"prompt": prompt})
                    for prompt in ("Hello", "Zero") * 8
                )
            )

    async def ask():
        async with sick.async_http() as client:
            return await client.post("/v1/completions", json=GOOD)

    *answers, _ = asyncio.run(ask_all())
    expected = asyncio.run(ask()).json()["choices"][0]["text"]
    for response in answers[0::2]:
        assert response.json()["choices"][0]["text"] == expected
    for response in answers[1::2]:
        assert (
            response.status_code == 500
            and response.json()["error"]["type"] == "InternalServerError"
        )
        assert "NaN" in response.json()["error"]["message"]
    assert sick.metric("kv_cache_usage_perc") == 0


def test_a_stream_that_fails_ends_with_the_error(sick):
    with sick.http() as http:
        response = http.post("/v1/completions", json=GOOD | {"prompt": "Zero", "stream": True})
    assert response.status_code == 200
    assert events_of(response.iter_lines())[-1]["error"]["code"] == 500


DIALECTS = {
    "/v1/messages": {"messages": [{"role": "user", "content": "Zero"}], "max_tokens": 9},
    "/api/chat": {"messages": [{"role": "user", "content": "Zero"}]},
    "/api/generate": {"prompt": "Zero"},
    "/v2/chat": {"messages": [{"role": "user", "content": "Zero"}]},
}


@pytest.mark.parametrize("path", DIALECTS)
def test_each_api_tells_of_a_failure_in_its_own_form(sick, path):
    body = DIALECTS[path] | {"model": "tiny"}
    with sick.http() as http:
        whole = http.post(path, json=body | {"stream": False})
        stream = http.post(path, json=body | {"stream": True})
    assert (whole.status_code, stream.status_code) == (500, 200)
    said = whole.json()
    last_line = stream.text.rstrip().splitlines()[-1]
    last = json.loads(last_line.removeprefix("data: "))
    if path == "/v1/messages":
        assert said["error"] == last["error"] and last["type"] == "error"
        assert said["error"]["type"] == "api_error" and "NaN" in said["error"]["message"]
    elif path == "/v2/chat":
        assert (last["type"], last["delta"]["finish_reason"]) == ("message-end", "ERROR")
        assert last["delta"]["error"] == said["message"] and "NaN" in said["message"]
    else:
        assert said == last and "NaN" in said["error"]


def test_a_job_that_fails_keeps_the_error(sick):
    with sick.http() as http:
        request_id = http.post("/generate", json=GOOD | {"prompt": "Zero"}).json()["request_id"]
        while (report := http.get(f"/result/{request_id}").json())["state"] != "failed":
            assert report["state"] in ("waiting", "running")
    assert report["error"]["code"] == 500


def ask_app(app, method, path, **options):
    async def ask():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


HANGS = 77
"""The token id that hangs a step."""


@pytest.fixture
def hanging():
    """An engine over a core that computes nothing but pseudo-tokens, and hangs."""

    def start(*_):
        return ProcessClient("tests.support.core_builders:build", {"kind": "hang", "bad": HANGS})

    frontend = build_in_process(EngineConfig.from_options(**small_options()), lambda text: None)
    frontend.client.close()
    client = SupervisedClient(start, stall_timeout_s=1.0, report=lambda text: None)
    client.wait_until_ready(lambda text: None)
    llm = AsyncLLM(replace(frontend, client=client))
    yield llm
    llm.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_hangs_the_engine_fails_and_the_others_go_on(hanging, stream):
    """A request that hangs the engine fails alone; until the engine is replaced /health names the
    reason.
    """
    prompts = {"good": [5, 6, 7], "bad": [5, HANGS], "other": [9] * 30}
    health = []

    async def watch(client):
        while not health or health[-1].status_code != 200 or len(health) == 1:
            answer = await client.get("/health")
            if not health or answer.status_code != health[-1].status_code:
                health.append(answer)
            await asyncio.sleep(0.02)

    async def ask_all():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(hanging)), base_url="http://app", timeout=60
        ) as client:
            body = {
                "max_tokens": 20,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": stream,
                "timings": True,
            }
            asked = [
                client.post("/v1/completions", json=body | {"prompt": prompt})
                for prompt in prompts.values()
            ]
            return dict(
                zip(prompts, (await asyncio.gather(watch(client), *asked))[1:], strict=True)
            )

    answers = asyncio.run(ask_all())
    for name in ("good", "other"):
        events = events_of(answers[name].text.splitlines()) if stream else [answers[name].json()]
        choices = [choice for event in events for choice in event.get("choices", ())]
        assert [token for choice in choices for token in choice["token_ids"]] == expected_tokens(
            prompts[name], 20
        )
        assert "the engine was restarted" in events[-1]["timings"]["waits"]
    error = (events_of(answers["bad"].text.splitlines())[-1] if stream else answers["bad"].json())[
        "error"
    ]
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    assert "made no progress for 1 s (stall_timeout); this request is aborted" in error["message"]
    codes = [answer.status_code for answer in health]
    assert codes[:3] == [200, 503, 200] and set(codes) == {200, 503}
    assert (
        "made no progress for 1 s (stall_timeout): restarting the engine"
        in health[1].json()["error"]["message"]
    )


def test_a_bug_shows_nothing_of_the_inside():
    app = create_app(EngineSlot())

    @app.get("/bug")
    async def bug():
        raise RuntimeError("a path: /home/someone")

    response = ask_app(app, "GET", "/bug")
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }


def test_a_bug_is_told_in_the_form_of_each_api():
    app = create_app(EngineSlot())

    @app.get("/v1/messages/bug")
    @app.get("/api/bug")
    async def bug():
        raise RuntimeError("inside")

    anthropic, ollama = (
        ask_app(app, "GET", path).json() for path in ("/v1/messages/bug", "/api/bug")
    )
    said = {"type": "api_error", "message": "Internal server error"}
    assert anthropic["type"] == "error" and anthropic["error"] == said
    assert ollama == {"error": "Internal server error"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/completions", {"prompt": "Hello"}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("POST", "/generate", {"prompt": "Hello"}),
    ],
)
def test_before_and_after_there_is_an_engine_the_answer_is_503(method, path, body):
    slot = EngineSlot()
    models = ModelDirectory.of(slot)
    slot.report("loading tiny")
    loading = ask_app(create_app(models), method, path, json=body)
    assert (
        loading.status_code == 503
        and "not ready yet: loading tiny" in loading.json()["error"]["message"]
    )
    models.drain()
    stopping = ask_app(create_app(models), method, path, json=body)
    assert (
        stopping.status_code == 503
        and stopping.json()["error"]["message"]
        == "the server is stopping (hint: try again in a few seconds)"
    )


def test_metrics_are_there_before_the_engine():
    assert ask_app(create_app(EngineSlot()), "GET", "/metrics").status_code == 200


def test_keys_may_be_several():
    app = create_app(EngineSlot(), ServerSettings(api_key=("one", "two")))
    statuses = [
        ask_app(app, "GET", "/version", headers={"Authorization": f"Bearer {key}"}).status_code
        for key in ("one", "two", "three")
    ]
    assert statuses == [200, 200, 401]
