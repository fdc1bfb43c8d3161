"""The live feed: a snapshot, then what changes, and nothing when no one looks."""

import json
import threading
import time

import httpx

from tests.server.test_live_requests import SLOW
from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text


def work(http, **body):
    """Runs a request of many tokens in a thread of its own."""

    def run():
        with httpx.Client(base_url=http.base_url, headers=http.headers, timeout=60) as own:
            own.post("/v1/completions", json=SLOW | {"stream": False} | body).raise_for_status()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def watched(http, enough, seconds=20):
    """Reads events until `enough` is content with them all."""
    events, end = [], time.monotonic() + seconds
    with http.stream("GET", "/v1/engine/events") as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line:
                events.append(json.loads(line.removeprefix("data: ")))
                events[-1]["bytes"] = len(line)
            if enough(events):
                return events
            assert time.monotonic() < end, events[-3:]
    raise AssertionError("the stream ended")


def merged(events):
    """Returns the map of blocks and the requests that a reader has after these events."""
    blocks, requests = [None] * events[0]["groups"][0]["num_shown"], {}
    for event in events:
        for first, count, state, name in event["groups"][0]["runs"]:
            blocks[first : first + count] = [(state, name)] * count
        requests |= {one["n"]: one for one in event["requests"]}
        for name in event["gone"]:
            requests.pop(name)
    return blocks, requests


def test_a_snapshot_comes_at_once_even_where_nothing_runs(http):
    (event,) = watched(http, lambda events: events)
    assert event["type"] == "snapshot" and event["model"] == "tiny" and event["block_size"] == 16
    assert event["queue"] == {
        "running": 0,
        "waiting": 0,
        "swapped": 0,
        "waits_for": "",
        "num_requests": 0,
    }
    assert sum(run[1] for run in event["groups"][0]["runs"]) == event["groups"][0]["num_shown"]


def test_updates_add_up_to_the_engine_at_rest(http):
    """Steps are numbered without a gap, requests come and go, and the counts of blocks agree with
    the map.
    """
    threads = []

    def enough(events):
        if not threads:
            threads.append(work(http, prompt="A prompt that two requests have in common"))
        seen = any(event["requests"] for event in events)
        return seen and not merged(events)[1] and events[-1]["queue"]["num_requests"] == 0

    events = watched(http, enough)
    threads[0].join()
    blocks, _ = merged(events)
    counts = events[-1]["groups"][0]["counts"]
    shown = [sum(cell[0] == state for cell in blocks) for state in range(4)]
    if events[-1]["groups"][0]["num_shown"] == events[-1]["groups"][0]["num_blocks"]:
        assert shown == [counts[name] for name in ("free", "cached", "held", "shared")]
    steps = [step for event in events for step in event["steps"]]
    numbers = [step[0] for step in steps]
    assert numbers == sorted(set(numbers))
    assert sum(step[3] for step in steps) > 64 and any(step[2] for step in steps)
    states = {one["state"] for event in events for one in event["requests"]}
    assert "running" in states
    assert all(one["id"].startswith("cmpl-") for event in events for one in event["requests"][:1])
    assert max(event["bytes"] for event in events) < 200_000


def test_no_more_than_ten_updates_come_in_a_second(http):
    began, threads = [], []

    def enough(events):
        if not began:
            began.append(time.monotonic())
            threads.append(work(http))
        return time.monotonic() > began[0] + 1 or len(events) > 15

    events = watched(http, enough)
    spans = [event["time"] for event in events]
    assert len([one for one in spans if one <= spans[0] + 1]) <= 13
    threads[0].join()


def test_events_are_the_operators_where_there_are_keys():
    server = LiveServer(str(tiny_model_with_text()), "--api-key=one", "--api-key=two", key="one")
    try:
        with server.http() as http:
            assert http.get("/v1/engine/events").status_code == 403
            made = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).json()
            path = f"/v1/requests/{made['id']}"
            assert http.get(path).json()["owner"] == "key-1"
            other = {"Authorization": "Bearer two"}
            for method, more in (("GET", ""), ("DELETE", ""), ("POST", "/fork")):
                body = {"json": {}} if method == "POST" else {}
                answer = http.request(method, path + more, headers=other, **body)
                assert answer.status_code == 404, "another key does not learn that the id exists"
    finally:
        assert server.stop() == 0
