"""The router before servers that refuse, break off, hang or differ: fakes that a test scripts."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from octavo.api.errors import ConfigError
from octavo.distributed.router.app import create_router_app
from octavo.distributed.router.members import Members
from octavo.distributed.router.monitor import ServerMonitor, monitor_servers
from octavo.distributed.router.settings import RouterSettings
from tests.support.fake_upstream import FakeUpstream, refusing, saying, with_status

QUICK = {"health_interval_s": 0.05, "health_timeout_s": 0.2, "max_health_backoff_s": 0.1}
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def routed(*servers, **options):
    """Yields a client of a router before some servers, and the router's members."""
    settings = RouterSettings(**{**QUICK, "routing_policy": "round_robin", **options})
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        members = Members([server.url for server in servers], settings)
        monitor = ServerMonitor(settings)
        await stack.enter_async_context(monitor_servers(members, settings, monitor))
        transport = httpx.ASGITransport(create_router_app(members, settings, monitor))
        client = httpx.AsyncClient(transport=transport, base_url="http://router", timeout=10)
        yield await stack.enter_async_context(client), members


def chat(text="hi", **more):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


async def said_by(client, **more):
    answer = await client.post(CHAT, json=chat(**more))
    return answer.json().get("by"), answer.status_code


def test_a_server_that_breaks_off_before_an_answer_costs_nothing():
    async def main():
        bad, good = FakeUpstream("bad", refusing), FakeUpstream("good", saying("good"))
        async with routed(bad, good) as (client, _):
            found = [await said_by(client) for _ in range(6)]
            assert found == [("good", 200)] * 6
            assert bad.asked, "it was tried"
            metrics = (await client.get("/metrics")).text
            assert 'octavo:router_retries_total{reason="lost",server="0"}' in metrics

    asyncio.run(main())


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_goes_to_another_and_the_last_one_to_the_client(status):
    async def main():
        refusal = with_status(status, "retry-after: 7\r\n")
        full, free = FakeUpstream("full", refusal), FakeUpstream("free", saying("free"))
        async with routed(full, free) as (client, _):
            assert [await said_by(client) for _ in range(4)] == [("free", 200)] * 4
            free.script = refusal
            answer = await client.post(CHAT, json=chat())
            assert (answer.status_code, answer.headers["retry-after"]) == (status, "7")
            assert len(full.asked) >= 3

    asyncio.run(main())


def test_an_answer_that_has_begun_is_never_repeated():
    async def half(exchange):
        await exchange.begin_stream()
        await exchange.event('{"half": 1}')
        await asyncio.sleep(0.02)
        exchange.break_off()

    async def main():
        first, second = FakeUpstream("first", half), FakeUpstream("second", half)
        async with routed(first, second) as (client, _):
            answer = await client.post(CHAT, json=chat(stream=True))
            events = [part.strip().removeprefix("data: ") for part in answer.text.split("\n\n")]
            events = [event for event in events if event]
            assert json.loads(events[0]) == {"half": 1}
            assert json.loads(events[1])["error"]["code"] == 503
            assert events[2:] == ["[DONE]"]
            assert len(first.asked) + len(second.asked) == 1

    asyncio.run(main())


def test_a_stream_without_a_byte_is_begun_elsewhere():
    async def silent(exchange):
        await exchange.begin_stream()
        await asyncio.sleep(0.02)
        exchange.break_off()

    async def main():
        dead, good = FakeUpstream("dead", silent), FakeUpstream("good", saying("good"))
        async with routed(dead, good) as (client, _):
            assert [await said_by(client, stream=True) for _ in range(2)] == [("good", 200)] * 2
            assert dead.asked

    asyncio.run(main())


def test_what_a_hung_server_has_goes_to_another():
    async def main():
        async def hang(exchange):
            hung.is_well = False
            await asyncio.sleep(30)

        hung, good = FakeUpstream("hung", hang), FakeUpstream("good", saying("good"))
        async with routed(hung, good) as (client, members):
            found = await asyncio.gather(*(said_by(client) for _ in range(4)))
            assert found == [("good", 200)] * 4 and hung.asked
            assert "not now" in members[0].trouble
            assert (await client.get("/health")).status_code == 200
            hung.is_well, hung.script = True, saying("hung")
            await _until(lambda: members[0].is_well)
            assert {(await said_by(client))[0] for _ in range(4)} == {"hung", "good"}

    asyncio.run(main())


def test_without_a_server_the_answer_says_why_of_each():
    async def main():
        away = FakeUpstream("away", refusing, is_well=False)
        async with routed(away) as (client, _):
            answer = await client.post(CHAT, json=chat())
            assert answer.status_code == 503
            assert "server 0: HTTP 503: not now" in answer.json()["error"]["message"]
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/health/live")).status_code == 200

    asyncio.run(main())


def test_a_request_goes_to_a_server_that_has_its_model():
    async def main():
        one = FakeUpstream("one", saying("one"), models=("a", "both"))
        two = FakeUpstream("two", saying("two"), models=("b", "both"))
        async with routed(one, two) as (client, members):
            for model, expected in (("a", {"one"}), ("b", {"two"}), ("both", {"one", "two"})):
                found = {(await said_by(client, model=model))[0] for _ in range(4)}
                assert found == expected
            one.is_well = False
            await _until(lambda: not members[0].is_well)
            assert (await said_by(client, model="a"))[1] == 503
            assert await said_by(client, model="both") == ("two", 200)

    asyncio.run(main())


@pytest.mark.parametrize("field", ["prompt_cache_key", "user"])
def test_a_session_stays_where_it_is(field):
    async def main():
        servers = [FakeUpstream(name, saying(name)) for name in "abc"]
        async with routed(*servers, routing_policy="sticky") as (client, _):
            homes = {}
            for number in range(24):
                key = f"session {number % 8}"
                by, _ = await said_by(client, text=f"text {number}", **{field: key})
                assert homes.setdefault(key, by) == by
            assert len(set(homes.values())) > 1

    asyncio.run(main())


def test_equal_beginnings_go_to_one_server_and_others_spread():
    async def main():
        servers = [FakeUpstream(name, saying(name)) for name in "ab"]
        async with routed(*servers, routing_policy="kv") as (client, _):
            first = {}
            for number in range(12):
                topic = number % 3
                by, _ = await said_by(client, text=f"topic {topic} " * 200 + f"turn {number}")
                assert first.setdefault(topic, by) == by
            assert set(first.values()) == {"a", "b"}
            by = {
                (await client.post("/v1/completions", json={"prompt": [7] * 512})).json()["by"]
                for _ in range(4)
            }
            assert len(by) == 1

    asyncio.run(main())


def test_a_stored_response_is_found_where_it_is():
    def keeping(name, kept):
        async def script(exchange):
            found = exchange.method == "POST" or exchange.path.split("/")[3] in kept
            await exchange.answer(200 if found else 404, {"by": name})

        return script

    async def main():
        one = FakeUpstream("one", keeping("one", {"resp_1"}))
        two = FakeUpstream("two", keeping("two", {"resp_2"}))
        async with routed(one, two) as (client, _):
            for kept, expected in (("resp_1", "one"), ("resp_2", "two"), ("resp_2", "two")):
                answer = await client.get(f"/v1/responses/{kept}")
                assert (answer.status_code, answer.json()["by"]) == (200, expected)
                body = {"input": "more", "previous_response_id": kept}
                assert (await client.post("/v1/responses", json=body)).json()["by"] == expected
            assert (await client.get("/v1/responses/resp_3")).status_code == 404

    asyncio.run(main())


def test_keys_files_and_paths():
    async def main():
        servers = [FakeUpstream(name, saying(name)) for name in "abc"]
        async with routed(*servers, server_api_key="inner", api_key=("outer",)) as (client, _):
            assert (await client.post(CHAT, json=chat())).status_code == 401
            client.headers["authorization"] = "Bearer outer"
            assert (await client.post(CHAT + "?x=1", json=chat())).status_code == 200
            (exchange,) = [exchange for server in servers for exchange in server.asked]
            assert exchange.headers["authorization"] == "Bearer inner"
            assert exchange.path == CHAT + "?x=1" and "x-request-id" in exchange.headers
            homes = {(await client.get("/v1/files")).json()["by"] for _ in range(4)}
            assert len(homes) == 1
            refused = await client.post("/v1/models/load", json={})
            assert refused.status_code == 404 and "not passed on" in refused.text
            huge = await client.post(CHAT, content=b"no json", headers={"content-type": "x/y"})
            assert huge.status_code == 200, "what is wrong with a body is the servers' to say"

    asyncio.run(main())


def test_a_body_beyond_the_limit_is_refused():
    async def main():
        async with routed(FakeUpstream("a", saying("a")), max_body_bytes=100) as (client, _):
            assert (await client.post(CHAT, json=chat("long" * 100))).status_code == 413

    asyncio.run(main())


@pytest.mark.parametrize("url", ["local host:8000", "ftp://x", "http://x:port", "http://"])
def test_a_wrong_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"url: got .*, expected HOST:PORT, http://HOST:PORT"):
        Members([url], RouterSettings())


async def _until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
