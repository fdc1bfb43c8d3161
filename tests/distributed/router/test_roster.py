"""Servers that join, drain and leave while the router runs: no request notices."""

import asyncio

import pytest

from tests.distributed.router.test_faults import CHAT, chat, routed, said_by
from tests.support.fake_upstream import FakeUpstream, saying

SERVERS = "/router/servers"


async def shown(client):
    """Returns the standing of each server, by its number."""
    data = (await client.get(SERVERS)).json()["data"]
    return [server["standing"] for server in data]


async def said_often(client):
    return {(await said_by(client))[0] for _ in range(6)}


def test_a_server_that_joins_gets_requests():
    async def main():
        one, two = FakeUpstream("one", saying("one")), FakeUpstream("two", saying("two"))
        async with two, routed(one) as (client, members):
            assert await said_often(client) == {"one"}
            joined = await client.post(SERVERS, json={"url": two.url + "/v1/"})
            assert (joined.status_code, joined.json()["number"]) == (201, 1)
            assert joined.json()["is_well"] and members[1].is_well
            assert await said_often(client) == {"one", "two"}
            again = await client.post(SERVERS, json={"url": two.url})
            assert again.json()["number"] == 1 and len(members) == 2
            assert 'octavo:router_server_up{server="1"} 1.0' in (await client.get("/metrics")).text

    asyncio.run(main())


def test_a_server_that_is_not_there_yet_joins_and_is_asked_when_it_comes():
    async def main():
        one, two = FakeUpstream("one", saying("one")), FakeUpstream("two", saying("two"))
        two.is_well = False
        async with two, routed(one) as (client, members):
            joined = (await client.post(SERVERS, json={"url": two.url})).json()
            assert not joined["is_well"] and joined["trouble"]
            assert await said_often(client) == {"one"}
            two.is_well = True
            while not members[1].is_well:
                await asyncio.sleep(0.02)
            assert await said_often(client) == {"one", "two"}

    asyncio.run(main())


def test_a_server_that_drains_finishes_what_it_has_and_one_that_left_comes_back():
    async def main():
        may_end = asyncio.Event()

        async def slow(exchange):
            await may_end.wait()
            await exchange.answer(200, {"by": "slow"})

        one, two = FakeUpstream("slow", slow), FakeUpstream("two", saying("two"))
        async with routed(one, two) as (client, members):
            first = asyncio.create_task(said_by(client))
            while not members[0].num_running:
                await asyncio.sleep(0.01)
            left = await client.delete(f"{SERVERS}/0")
            assert (left.status_code, left.json()["standing"]) == (202, "draining")
            assert await said_often(client) == {"two"}
            await asyncio.sleep(0.2)
            assert await shown(client) == ["draining", "in"] and not first.done()
            may_end.set()
            assert await first == ("slow", 200)
            while await shown(client) != ["gone", "in"]:
                await asyncio.sleep(0.02)
            num_asked = len(one.asked)
            assert await said_often(client) == {"two"} and len(one.asked) == num_asked
            assert (await client.post(SERVERS, json={"url": one.url})).json()["number"] == 0
            assert await said_often(client) == {"slow", "two"}

    asyncio.run(main())


def test_a_drain_ends_when_the_server_joins_again():
    async def main():
        one, two = FakeUpstream("one", saying("one")), FakeUpstream("two", saying("two"))
        async with routed(one, two) as (client, _):
            drained = await client.post(f"{SERVERS}/1/drain")
            assert drained.json()["standing"] == "draining"
            assert await said_often(client) == {"one"}
            await client.post(SERVERS, json={"url": two.url})
            assert await shown(client) == ["in", "in"]
            assert await said_often(client) == {"one", "two"}

    asyncio.run(main())


def test_without_a_server_that_is_in_requests_are_refused():
    async def main():
        one = FakeUpstream("one", saying("one"))
        async with routed(one) as (client, _):
            await client.post(f"{SERVERS}/0/drain")
            assert (await client.post(CHAT, json=chat())).status_code == 503
            assert (await client.get("/health")).status_code == 503

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "", b"no json", 400, "body: "),
        ("POST", "", b'{"url": "x", "weight": 3}', 400, "weight"),
        ("POST", "", b'{"url": "ftp://x"}', 400, "url: got 'ftp://x'"),
        ("DELETE", "/7", b"", 404, "no server 7, expected 0 to 0"),
        ("POST", "/7/drain", b"", 404, "no server 7, expected 0 to 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(method, path, body, status, message):
    async def main():
        one = FakeUpstream("one", saying("one"))
        async with routed(one) as (client, _):
            answer = await client.request(method, SERVERS + path, content=body)
            assert answer.status_code == status
            assert message in answer.json()["error"]["message"]

    asyncio.run(main())


def test_only_the_operator_changes_who_belongs():
    async def main():
        one = FakeUpstream("one", saying("one"))
        async with routed(one, api_key=("secret",)) as (client, _):
            body = {"url": "http://127.0.0.1:1"}
            assert (await client.post(SERVERS, json=body)).status_code == 401
            headers = {"Authorization": "Bearer secret"}
            assert (await client.post(SERVERS, json=body, headers=headers)).status_code == 201
        async with routed(one, host="0.0.0.0") as (client, _):
            refused = await client.post(SERVERS, json=body)
            assert refused.status_code == 403 and "--api-key" in refused.text

    asyncio.run(main())
