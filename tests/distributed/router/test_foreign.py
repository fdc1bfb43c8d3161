"""The router beside servers and clients that send what none should."""

import asyncio

import pytest

from octavo.api.errors import ConfigError
from octavo.distributed.router.members import Members
from octavo.distributed.router.run import route
from octavo.distributed.router.settings import RouterSettings
from octavo.distributed.router.upstream import MAX_HEAD_BYTES
from tests.distributed.router.test_faults import CHAT, chat, routed, said_by
from tests.support.fake_upstream import FakeUpstream, saying, with_status

SERVERS = "/router/servers"


def writing(data):
    """Returns a script that answers with bytes as they are, and keeps the connection."""

    async def script(exchange):
        exchange.writer.write(data)
        await exchange.writer.drain()

    return script


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "wanted",
    [
        "x HTTP/1.1\r\nHost: h\r\n\r\nPOST /v1/models/load HTTP/1.1\r\nX: y",
        "x?echo=1#",
        "../models",
        "café 你好",
        "x" * 10_000,
    ],
    ids=["a second request", "a query", "a path", "no ASCII", "long"],
)
def test_the_id_of_a_response_asks_a_server_for_nothing_else(wanted):
    """It is a client's text, and would be sent with the servers' own key."""

    async def main():
        one, two = (FakeUpstream(name, with_status(404)) for name in ("one", "two"))
        async with routed(one, two, server_api_key="inner") as (client, _):
            body = {"input": "more", "previous_response_id": wanted}
            answer = await client.post("/v1/responses", json=body)
            assert answer.status_code == 404, "a server says that there is no such thing"
            asked = [exchange for server in (one, two) for exchange in server.asked]
            assert [exchange.method for exchange in asked].count("POST") == 1
            for exchange in asked:
                assert exchange.path.startswith("/v1/responses")
                assert set(exchange.path[len("/v1/responses") :]).isdisjoint(" ?#\r\n")
                assert exchange.path.count("/") <= 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/responses%2Fresp_1", 200),
        ("/v1/files/%2e%2e/models/load", 404),
        ("/v1/batches/x%2f..%2f..", 404),
    ],
)
def test_a_path_is_passed_on_only_where_it_names_what_it_says(path, status):
    async def main():
        async with routed(FakeUpstream("one", saying("one"))) as (client, _):
            assert (await client.get(path)).status_code == status

    asyncio.run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"220 smtp.example.com ESMTP\r\n",
        b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nraw",
        b"HTTP/1.1 799 X\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\n",
    ],
    ids=["no HTTP", "an upgrade", "a status", "a long head", "two lengths"],
)
def test_an_answer_that_is_none_is_had_from_another_server(data):
    async def main():
        bad, good = FakeUpstream("bad", writing(data)), FakeUpstream("good", saying("good"))
        async with routed(bad, good) as (client, members):
            assert [await said_by(client) for _ in range(4)] == [("good", 200)] * 4
            assert bad.asked
            await until(lambda: all(member.is_well for member in members))

    asyncio.run(main())


def test_an_interim_answer_is_not_the_answer():
    async def script(exchange):
        exchange.writer.write(b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\n")
        await exchange.writer.drain()
        await asyncio.sleep(0.02)
        await exchange.answer(200, {"by": "late"})

    async def main():
        async with routed(FakeUpstream("late", script)) as (client, _):
            answer = await client.post(CHAT, json=chat())
            assert (answer.status_code, answer.json()) == (200, {"by": "late"})
            assert "x-early" not in answer.headers

    asyncio.run(main())


@pytest.mark.parametrize("body", [b'{"error": {"message": "\xff\xfe"}}', b"[" * 100_000, b"[]"])
def test_a_server_that_refuses_in_no_words_is_asked_again(body):
    """A check that cannot read a refusal must not be the last one."""
    refusal = b"HTTP/1.1 503 X\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def main():
        one = FakeUpstream("one", saying("one"))
        one.health = writing(refusal)
        async with routed(one) as (client, members):
            assert "HTTP 503" in members[0].trouble
            assert (await said_by(client))[1] == 503
            one.health = None
            await until(lambda: members[0].is_well)
            assert await said_by(client) == ("one", 200)

    asyncio.run(main())


def test_what_a_hung_server_had_is_not_given_to_it_again():
    """The connection that was used before is closed, as that of a server which has ended is."""

    async def main():
        async def hang(exchange):
            hung.is_well = False
            await asyncio.sleep(30)

        hung, good = FakeUpstream("hung", saying("hung")), FakeUpstream("good", saying("good"))
        async with routed(hung, good) as (client, _):
            while (await said_by(client))[0] != "good":
                pass
            num_before, hung.script = len(hung.asked), hang
            assert await said_by(client) == ("good", 200)
            assert len(hung.asked) == num_before + 1

    asyncio.run(main())


@pytest.mark.parametrize(
    "url",
    ["http://user:word@h:1", "http://h:1/a b", "http://h:1/é", "http://h:1/#x", "http://h:99999"],
)
def test_a_url_that_says_more_is_refused(url):
    with pytest.raises(
        ConfigError, match=r"url: got .*, expected HOST:PORT, http://HOST:PORT"
    ) as refused:
        Members([url], RouterSettings())
    assert "--server-api-key" in refused.value.hint


def test_a_server_that_is_named_twice_in_other_words_is_refused():
    with pytest.raises(ConfigError, match="url: got a server twice"):
        route(["http://h:1", "http://h:1/v1/"], RouterSettings())
    with pytest.raises(ConfigError, match="url: got a server twice"):
        route(["http://h:8000", "h"], RouterSettings())


def test_what_is_asked_of_a_model_goes_to_a_server_that_has_it():
    async def main():
        one = FakeUpstream("one", saying("one"), models=("a", "both"))
        two = FakeUpstream("two", saying("two"), models=("b/c", "both"))
        async with routed(one, two) as (client, members):
            listed = (await client.get("/v1/models")).json()
            assert [card["id"] for card in listed["data"]] == ["a", "both", "b/c"]
            for model, expected in (("a", "one"), ("b/c", "two")):
                for _ in range(2):
                    body = {"model": model, "prompt": "x"}
                    assert (await client.post("/tokenize", json=body)).json()["by"] == expected
                    assert (await client.get(f"/v1/models/{model}")).json()["by"] == expected
                    shown = await client.post("/api/show", json={"name": model})
                    assert shown.json()["by"] == expected
            two.is_well = False
            await until(lambda: not members[1].is_well)
            listed = (await client.get("/v1/models")).json()
            assert [card["id"] for card in listed["data"]] == ["a", "both"]

    asyncio.run(main())


def test_a_list_of_models_that_is_none_is_left_out():
    """A server whose list cannot be read gets requests all the same."""

    async def main():
        one = FakeUpstream("one", saying("one"), models=(7, None))
        async with routed(one) as (client, members):
            assert members[0].is_well and not members[0].models
            assert await said_by(client) == ("one", 200)

    asyncio.run(main())


def test_a_server_to_join_must_be_named_in_words():
    async def main():
        async with routed(FakeUpstream("one", saying("one"))) as (client, _):
            answer = await client.post(SERVERS, content=b'{"url": "\xff\xfe"}')
            assert answer.status_code == 400 and "body: " in answer.json()["error"]["message"]

    asyncio.run(main())


def test_a_server_that_comes_back_while_it_leaves_is_watched():
    """Its health is checked again, at whatever moment of its leaving it joins."""

    async def main():
        one, two = FakeUpstream("one", saying("one")), FakeUpstream("two", saying("two"))
        async with routed(one, two) as (client, members):
            for at in range(12):
                await client.delete(f"{SERVERS}/1")
                for _ in range(at):
                    await asyncio.sleep(0)
                joined = await client.post(SERVERS, json={"url": two.url})
                assert joined.json()["standing"] == "in"
                two.is_well = False
                await until(lambda: not members[1].is_well)
                two.is_well = True
                await until(lambda: members[1].is_well)

    asyncio.run(main())
