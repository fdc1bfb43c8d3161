"""Streams of server-sent events: what is sent while there is no event."""

import asyncio

import pytest

from octavo.server.http import sse
from octavo.server.http.sse import EventStream, NamedEventStream
from octavo.server.ollama.formatter import LineStream

EVENT = {"type": "one"}


async def sent_by(kind, waits_s, *, takes_s=0.0):
    """Returns the bodies that a stream of one event after each wait sends."""

    async def events():
        for wait_s in waits_s:
            await asyncio.sleep(wait_s)
            yield [EVENT]

    bodies = []

    async def send(message):
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            await asyncio.sleep(takes_s)

    async def receive():
        await asyncio.sleep(60)

    await kind(events())({"type": "http"}, receive, send)
    return bodies


@pytest.mark.parametrize("kind", [EventStream, NamedEventStream])
def test_a_silent_stream_sends_comments(kind, monkeypatch):
    monkeypatch.setattr(sse, "PING_INTERVAL_S", 0.05)
    first, *pings, last, end = asyncio.run(sent_by(kind, [0, 0.5]))
    assert first == last and first.endswith(b'data: {"type":"one"}\n\n') and end == kind.end
    assert 1 <= len(pings) <= 10 and set(pings) == {b": ping\n\n"}


def test_a_stream_with_events_sends_no_comments(monkeypatch):
    monkeypatch.setattr(sse, "PING_INTERVAL_S", 5.0)
    assert len(asyncio.run(sent_by(EventStream, [0.01] * 20))) == 21


def test_a_slow_reader_gets_no_comments_between_parts(monkeypatch):
    """A ping counts as sent when it is handed on, so that they do not pile up."""
    monkeypatch.setattr(sse, "PING_INTERVAL_S", 0.02)
    bodies = asyncio.run(sent_by(EventStream, [0.2], takes_s=0.1))
    assert len(bodies) <= 5 and bodies[-1] == EventStream.end


def test_lines_of_json_have_no_comments(monkeypatch):
    monkeypatch.setattr(sse, "PING_INTERVAL_S", 0.01)
    assert asyncio.run(sent_by(LineStream, [0.1])) == [b'{"type":"one"}\n', b""]


def test_a_failure_ends_the_comments(monkeypatch):
    monkeypatch.setattr(sse, "PING_INTERVAL_S", 0.01)

    async def events():
        await asyncio.sleep(0.05)
        raise ValueError("broken")
        yield []

    bodies = []

    async def run():
        async def send(message):
            bodies.append(message.get("body", b""))

        await EventStream(events())({"type": "http"}, lambda: asyncio.sleep(60), send)
        num_sent = len(bodies)
        await asyncio.sleep(0.05)
        assert len(bodies) == num_sent

    asyncio.run(run())
    assert b": ping\n\n" in bodies and bodies[-1] == EventStream.end and b"error" in bodies[-2]
