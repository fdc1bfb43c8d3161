"""A server under seeded traffic while its disk, descriptors or clock fail: each request that is
accepted ends once, what is counted is what clients got, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live_server import LiveServer, until
from tests.support.tiers import tier
from tests.support.tiny_tokenizer import tiny_model_with_text

SEEDS = {"sample": 1, "all": 3, "soak": 20}[tier()]
NUM_REQUESTS = {"sample": 24, "all": 60, "soak": 400}[tier()]
NUM_CLIENTS = 4
PATH = "/v1/completions"
COUNTED = ("prompt_tokens_total", "generation_tokens_total")


class Traffic:
    """Clients in threads. Counts the tokens of whole answers, and how each request ended."""

    def __init__(self, server: LiveServer, seed: int, num_requests: int = NUM_REQUESTS) -> None:
        self.server = server
        self.ends: list[str] = []
        self.tokens = [0, 0]
        self._lock = threading.Lock()
        numbers = range(num_requests)
        self._threads = [
            threading.Thread(target=self._run, args=(seed, numbers[at::NUM_CLIENTS]))
            for at in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request was not answered"

    def _run(self, seed: int, numbers: range) -> None:
        with self.server.http() as http:
            for number in numbers:
                draw = random.Random(seed * 10_000 + number)
                try:
                    end, tokens = ask(http, draw)
                except httpx.TransportError:
                    end, tokens = "refused", [0, 0]
                with self._lock:
                    self.ends.append(end)
                    self.tokens = [was + new for was, new in zip(self.tokens, tokens, strict=True)]


def ask(http: httpx.Client, draw: random.Random) -> tuple[str, list[int]]:
    """Sends a request; returns how it ended, and its tokens if the answer is whole."""
    body: dict[str, Any] = {
        "prompt": [draw.randrange(5, 200) for _ in range(draw.randrange(4, 40))],
        "max_tokens": draw.randrange(1, 24),
        "ignore_eos": True,
        "seed": draw.randrange(1000),
        "stream": draw.random() < 0.5,
    }
    if not body["stream"]:
        response = http.post(PATH, json=body)
        if response.status_code != 200:
            assert response.status_code in (429, 500, 503, 507), response.text
            return "refused", [0, 0]
        usage = response.json()["usage"]
        return "whole", [usage["prompt_tokens"], usage["completion_tokens"]]
    body["stream_options"] = {"include_usage": True}
    cut_after = draw.choice([None, None, 0, 1, 3])
    with http.stream("POST", PATH, json=body) as response:
        if response.status_code != 200:
            return "refused", [0, 0]
        lines = [line for line in _take(response.iter_lines(), cut_after) if line]
    if lines[-1:] != ["data: [DONE]"]:
        return "cut", [0, 0]
    return "whole", [len(body["prompt"]), body["max_tokens"]]


def _take(lines: Iterator[str], count: int | None) -> Iterator[str]:
    for number, line in enumerate(lines):
        if count is not None and number >= count:
            return
        yield line


def counts(server: LiveServer) -> list[float]:
    return [server.metric(name) for name in COUNTED]


def num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@contextlib.contextmanager
def watched(server: LiveServer) -> Iterator[None]:
    """Checks that the server answers at the end, and holds no blocks, files or threads more."""
    with server.http() as http:
        assert http.post(PATH, json={"prompt": [5], "max_tokens": 1}).status_code == 200
    pid = server.process.pid
    was = num_files(pid), num_threads(pid)
    yield
    assert until(lambda: server.metric("kv_cache_usage_perc") == 0)
    assert until(lambda: num_files(pid) <= was[0] + 3), (was, num_files(pid))
    assert until(lambda: num_threads(pid) <= was[1] + 8), (was, num_threads(pid))
    with server.http() as http:
        assert http.post(PATH, json={"prompt": [5], "max_tokens": 1}).status_code == 200


@contextlib.contextmanager
def started(*arguments: str, **options: Any) -> Iterator[LiveServer]:
    server = LiveServer(
        str(tiny_model_with_text()), "--served-model-name=tiny", *arguments, **options
    )
    try:
        yield server
    finally:
        assert server.stop() == 0, server.lines[-5:]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_counted_is_what_clients_got_whatever_breaks(seed):
    """Whole answers only, so that each token is known to both sides."""
    with started() as server, watched(server):
        before = counts(server)
        traffic = Traffic(server, seed)
        traffic.join()
        assert len(traffic.ends) == NUM_REQUESTS and "refused" not in traffic.ends
        after = counts(server)
        known = [new - was for was, new in zip(before, after, strict=True)]
        if "cut" not in traffic.ends:
            assert known == traffic.tokens
        assert all(one >= least for one, least in zip(known, traffic.tokens, strict=True))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_few_descriptors_refuse_connections_and_no_more_whatever_breaks(seed):
    limited = ["bash", "-c", 'ulimit -n 160; exec "$@"', "-"]
    with started(within=limited) as server, watched(server):
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        traffic = Traffic(server, seed)
        idle = []
        for _ in range(200):
            with contextlib.suppress(OSError):
                idle.append(socket.create_connection(address, timeout=1))
        traffic.join()
        for each in idle:
            each.close()
        assert len(traffic.ends) == NUM_REQUESTS


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_clock_that_jumps_changes_no_answer_whatever_breaks(seed, tmp_path, monkeypatch):
    offset = tmp_path / "offset"
    monkeypatch.setenv("OCTAVO_CLOCK_OFFSET", str(offset))
    path = f"PYTHONPATH={Path('tests/support/jumping_clock').resolve()}:{Path.cwd()}"
    with started(within=["env", path]) as server, watched(server):
        traffic = Traffic(server, seed)
        for jump in (3600, -7200, 10**8, 0):
            offset.write_text(str(jump))
            with server.http() as http:
                assert http.get("/health").status_code == 200
        traffic.join()
        assert "refused" not in traffic.ends


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_full_disk_refuses_what_is_to_be_stored_alone_whatever_breaks(seed, small_disk):
    state = f"--state-dir={small_disk}"
    with started(state) as server, watched(server), server.http() as http:
        body = {"input": "a" * 200, "max_output_tokens": 1, "metadata": {"k": "v" * 500}}
        answers = [http.post("/v1/responses", json=body) for _ in range(3)]
        kept = [one.json()["id"] for one in answers if one.status_code == 200]
        (small_disk / "filler").write_bytes(b"")
        with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        traffic = Traffic(server, seed)
        refused = [http.post("/v1/responses", json=body).status_code for _ in range(3)]
        traffic.join()
        assert {*refused} <= {200, 500, 507} and "refused" not in traffic.ends
        for name in kept:
            assert http.get(f"/v1/responses/{name}").status_code == 200
        (small_disk / "filler").unlink()
        assert until(lambda: http.post("/v1/responses", json=body).status_code == 200)
