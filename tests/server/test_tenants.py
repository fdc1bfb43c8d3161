"""Priorities, tenants, and 429 where too many requests wait."""

import asyncio

import pytest

from octavo.server.http.auth import ApiKeys, get_tenant
from octavo.server.settings import ServerSettings
from octavo.server.state.key_ring import KeyRing

ASK = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}


def test_priority_is_refused_where_nobody_looks_at_it(http):
    error = http.post("/v1/completions", json=ASK | {"priority": 3}).json()["error"]
    assert (error["code"], error["param"]) == (400, "priority")
    assert "priority: got 3, expected 0 under the policy 'fcfs'" in error["message"]
    assert (
        http.post("/v1/completions", json=ASK | {"priority": 0, "user": "ada"}).status_code == 200
    )


def test_priorities_and_users_are_taken_where_the_policy_asks_for_them(start):
    with start("--scheduling-policy=priority").http() as http:
        assert http.post("/v1/completions", json=ASK | {"priority": -5}).status_code == 200
        assert http.post("/v1/completions", json=ASK | {"priority": 1 << 40}).status_code == 400
    with start(
        "--scheduling-policy=fair", "--tenant-weight=ada=2", "--max-num-seqs-per-tenant=1"
    ).http() as http:
        assert (
            http.post(
                "/v1/completions", json=ASK | {"user": "ada", "n": 3, "temperature": 1}
            ).status_code
            == 200
        )


def test_too_many_are_told_when_to_come_again(start):
    server = start(
        "--max-num-seqs=1", "--max-num-queued-reqs=1", "--batching=dynamic", "--batch-window-ms=1"
    )

    async def ask_all():
        async with server.async_http() as http:
            long = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}
            return await asyncio.gather(
                *(http.post("/v1/completions", json=long) for _ in range(12))
            )

    answers = asyncio.run(ask_all())
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429} and codes.count(429) >= 5
    turned_away = next(answer for answer in answers if answer.status_code == 429)
    assert int(turned_away.headers["retry-after"]) >= 1
    assert "the queue is full" in turned_away.json()["error"]["message"]


@pytest.mark.parametrize(
    ("keys", "sent", "user", "tenant"),
    [
        (["a", "b"], "b", "ada", "key-2"),
        (["a", "b"], "a", None, "key-1"),
        (["a"], "a", "ada", "ada"),
        (["a"], "a", None, ""),
    ],
)
def test_a_tenant_is_a_key_where_there_are_several_else_a_user(keys, sent, user, tenant):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    scope = {
        "type": "http",
        "path": "/v1/completions",
        "headers": [(b"authorization", f"Bearer {sent}".encode())],
    }
    ring = KeyRing(ServerSettings(api_key=tuple(keys)))
    asyncio.run(ApiKeys(app, ring)(scope | {"method": "GET"}, None, None))

    class Request:
        scope = seen[0]

    assert get_tenant(Request, user) == tenant
