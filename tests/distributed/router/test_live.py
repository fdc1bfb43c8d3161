"""A router process before two live servers: clients notice nothing, also where one server dies."""

import asyncio
import json
import signal

import pytest

from tests.support.free_ports import free_port
from tests.support.live_router import LiveRouter
from tests.support.live_server import READABLE, LiveServer, events_of, until
from tests.support.tiny_tokenizer import tiny_model_with_text

BODY = {key: value for key, value in READABLE.items() if key != "extra_body"}
BODY |= READABLE["extra_body"] | {"model": "tiny"}


def address():
    return f"tcp://127.0.0.1:{free_port()}"


def kv_events():
    ends = {"endpoint": address(), "replay_endpoint": address()}
    return "--kv-events-config=" + json.dumps({"enable_kv_cache_events": True, **ends})


@pytest.fixture(scope="module")
def servers():
    made = [
        LiveServer(str(tiny_model_with_text()), "--served-model-name=tiny", kv_events(), wait=False)
        for _ in range(2)
    ]
    for server in made:
        server.wait()
    yield made
    for server in made:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def router(servers):
    made = LiveRouter([server.url for server in servers])
    yield made
    if made.process.poll() is None:
        made.stop()


def test_an_openai_client_gets_what_a_server_gives(router, servers):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], **READABLE}
    with servers[0].openai() as direct, router.openai() as client:
        expected = direct.chat.completions.create(**ask).choices[0].message.content
        assert client.chat.completions.create(**ask).choices[0].message.content == expected
        parts = [
            part.choices[0].delta.content
            for part in client.chat.completions.create(**ask, stream=True)
        ]
        assert "".join(filter(None, parts)) == expected and len(parts) > 1
        assert [card.id for card in client.models.list()] == ["tiny"]
        with pytest.raises(Exception, match="temperature: got 9") as caught:
            client.chat.completions.create(**(ask | {"temperature": 9}))
        assert caught.value.status_code == 400


def test_a_prompt_goes_where_its_blocks_are_as_the_servers_tell(router, servers):
    def known():
        shown = router.http().get("/router/servers").json()["data"]
        return [server["known_blocks"] for server in shown]

    def ask(number):
        body = BODY | {"prompt": "a shared beginning " * 12 + str(number), "max_tokens": 2}
        answer = router.http().post("/v1/completions", json=body)
        return answer.headers["x-octavo-server"]

    before = (
        router.metric("predicted_cached_tokens_total"),
        router.metric("found_cached_tokens_total"),
    )
    assert len({ask(number) for number in range(4)}) == 1
    after = (
        router.metric("predicted_cached_tokens_total"),
        router.metric("found_cached_tokens_total"),
    )
    assert after[0] - before[0] == after[1] - before[1] > 3 * 200
    assert sum(known()) > 10
    for server in servers:
        server.http().post("/v1/cache/reset", json={}).raise_for_status()
    assert until(lambda: known() == [0, 0])


def test_a_client_that_leaves_ends_the_work(router, servers):
    with router.http().stream(
        "POST", "/v1/completions", json=BODY | {"prompt": "x", "max_tokens": 480, "stream": True}
    ) as answer:
        next(answer.iter_raw())
    assert until(lambda: sum(s.http().get("/load").json()["server_load"] for s in servers) == 0)
    assert until(lambda: router.metric("running") == 0)


def test_a_killed_server_loses_nothing_that_it_had_not_begun_to_answer(router, servers):
    """Whole answers all come, the same as from one server; streams come whole, or end with an
    error after what they had.
    """
    numbers = range(24)

    def body(number, **more):
        return BODY | {"prompt": f"prompt {number}", "seed": number, "max_tokens": 200, **more}

    async def is_busy(server):
        """Tells whether a server has work, so that its end is one in the middle of answers."""
        async with server.async_http() as client:
            return (await client.get("/load")).json()["server_load"] >= 8

    async def main():
        async with router.async_http() as client:

            async def whole(number):
                answer = await client.post("/v1/completions", json=body(number))
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"][0]["text"]

            async def stream(number):
                answer = await client.post("/v1/completions", json=body(number, stream=True))
                events = events_of(answer.text.split("\n"))
                text = "".join(e["choices"][0]["text"] for e in events if "choices" in e)
                return text, "error" in events[-1]

            tasks = []
            while not await is_busy(servers[0]):
                if all(task.done() for task in tasks):  # too late: a slow look missed them all
                    tasks = [asyncio.ensure_future(a(n)) for n in numbers for a in (whole, stream)]
                await asyncio.sleep(0.01)
            servers[0].process.send_signal(signal.SIGKILL)
            killed = await asyncio.gather(*tasks)
            again = [await whole(number) for number in numbers]
        return killed[::2], killed[1::2], again

    wholes, streams, expected = asyncio.run(main())
    assert wholes == expected
    assert any(is_broken for _, is_broken in streams) or router.metric("retries_total") > 0
    for (text, is_broken), right in zip(streams, expected, strict=True):
        assert right.startswith(text) if is_broken else text == right
    shown = router.http().get("/router/servers").json()["data"]
    assert [server["is_well"] for server in shown] == [False, True]


def test_a_router_that_stops_ends_what_it_has(router):
    with router.http().stream(
        "POST", "/v1/completions", json=BODY | {"prompt": "x", "max_tokens": 200, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        router.process.send_signal(signal.SIGTERM)
        assert events_of([first, *lines])[-1]["choices"][0]["finish_reason"] == "length"
    assert router.process.wait(20) == 0
    assert router.lines[3:] == [], "a router that does its work says nothing but how it started"
