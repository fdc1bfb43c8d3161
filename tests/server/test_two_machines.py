"""Prefill and decode on two machines: what goes over a shaped link gives the answers of one engine,
and so does what is cut, killed or stopped in the middle.

Machines are network namespaces (tests/support/two_machines.py).
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.live_router import LiveRouter
from tests.support.live_server import LETTERS, LiveServer, until
from tests.support.tiers import tier
from tests.support.tiny_tokenizer import tiny_model_with_text
from tests.support.two_machines import ADDRESSES, TwoMachines, two_machines

PREFILL, DECODE, SPARE, ROUTER = 8000, 8001, 8002, 8080
"""Ports of the servers, which no other process has on these machines."""
TRANSFER = f"{ADDRESSES[1]}:8998"
COMMON = ("--served-model-name=tiny", "--kv-transfer=zmq", "--kv-transfer-secret=of both")
DECODES = (
    "--role=decode",
    f"--prefill-peer={TRANSFER}",
    "--kv-transfer-min-tokens=32",
    "--kv-transfer-timeout=5",
)
DEADLINE_S = 120
"""Seconds within which every request must be answered, on a slow machine too."""
NUM_RUNS = {"sample": 1, "all": 5, "soak": 200}
"""Seeded faults of a tier: `make faults` runs those of the soak."""
RUNS_EACH = 10
"""Faults of one test, whose servers live through them; a run that is stopped goes on behind the
last test that passed."""

Answer = tuple[str, list[float]]


def body_of(number: int) -> dict[str, Any]:
    """Returns a request of 200 tokens, most of which no other has, and 24 drawn ones."""
    draw = random.Random(number)
    return {
        "model": "tiny",
        "prompt": "".join(draw.choices("abcdefgh ", k=200)),
        "max_tokens": 24,
        "temperature": 1,
        "seed": number,
        "logprobs": 1,
        "ignore_eos": True,
        "allowed_token_ids": LETTERS,
    }


def asked(url: str, number: int) -> Answer:
    """Asks until there is an answer: a client whose server is lost asks again."""
    end = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            found = httpx.post(f"{url}/v1/completions", json=body_of(number), timeout=DEADLINE_S)
            if found.status_code == 200:
                (choice,) = found.json()["choices"]
                return choice["text"], choice["logprobs"]["token_logprobs"]
            assert found.status_code >= 429, found.text
        assert time.monotonic() < end, f"request {number} was not answered"
        time.sleep(0.1)


class Oracle:
    """One engine, which has nothing to do with the others."""

    def __init__(self) -> None:
        self.server = LiveServer(str(tiny_model_with_text()), COMMON[0])
        self._known: dict[int, Answer] = {}

    def answer(self, number: int) -> Answer:
        if number not in self._known:
            self._known[number] = asked(self.server.url, number)
        return self._known[number]


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    oracle.server.stop()


class Parts:
    """The servers on two machines, by port; each may be ended and started again."""

    def __init__(self, machines: TwoMachines) -> None:
        self.machines = machines
        self.running: dict[int, LiveServer | LiveRouter] = {}

    def start(self, port: int) -> None:
        """Starts a server or the router, and waits until it is ready."""
        machine = 0 if port in (DECODE, ROUTER) else 1
        address = (f"--host={ADDRESSES[machine]}", f"--port={port}")
        within = self.machines.within(machine)
        if port == ROUTER:
            urls = [f"http://{ADDRESSES[0]}:{DECODE}", f"http://{ADDRESSES[1]}:{SPARE}"]
            self.running[port] = LiveRouter(urls, *address, within=within)
            return
        role = DECODES
        if port == PREFILL:
            role = ("--role=prefill", f"--kv-transfer-address={TRANSFER}")
        model = str(tiny_model_with_text())
        self.running[port] = LiveServer(model, *COMMON, *role, *address, within=within)

    def url(self, port: int) -> str:
        return self.running[port].url

    def metric(self, port: int, name: str) -> float:
        server = self.running[port]
        assert isinstance(server, LiveServer)
        return self.machines.call(0, lambda: server.metric(name))

    def kill(self, port: int) -> None:
        process = self.running[port].process
        process.kill()
        process.wait()

    def close(self) -> None:
        for part in self.running.values():
            part.process.send_signal(signal.SIGCONT)
            part.process.kill()
            part.process.wait()


@contextlib.contextmanager
def parts_of(*ports: int, rate: str = "1gbit") -> Iterator[Parts]:
    with two_machines(rate) as machines:
        parts = Parts(machines)
        try:
            for port in ports:
                parts.start(port)
            yield parts
        finally:
            parts.close()


class Client(threading.Thread):
    """A client on the first machine that asks for some answers, one after another."""

    def __init__(self, parts: Parts, url: str, numbers: range) -> None:
        super().__init__()
        self._parts, self._url, self._numbers = parts, url, numbers
        self.found: dict[int, Answer] = {}
        self.start()

    def run(self) -> None:
        self._parts.machines.enter(0)
        for number in self._numbers:
            self.found[number] = asked(self._url, number)


def check(clients: list[Client], oracle: Oracle, numbers: range) -> None:
    """Waits for all answers, and compares them with one engine's."""
    found: dict[int, Answer] = {}
    for client in clients:
        client.join(DEADLINE_S)
        found |= client.found
    assert sorted(found) == list(numbers), "a request was lost"
    assert found == {number: oracle.answer(number) for number in numbers}


@pytest.mark.parametrize("rate", ["200mbit", pytest.param("1gbit", marks=pytest.mark.slow)])
def test_blocks_come_over_a_link_that_may_be_cut(oracle: Oracle, rate: str) -> None:
    """Answers are those of one engine with the link, without it and when it is back."""
    with parts_of(PREFILL, DECODE, rate=rate) as parts:
        url = parts.url(DECODE)
        first, second, third = range(4), range(4, 8), range(8, 40)

        def fetched() -> float:
            return parts.metric(DECODE, "kv_blocks_fetched_total")

        def ask_until_fetched(numbers: range) -> int:
            """Asks until blocks come from the other machine; returns how often."""
            before = fetched()
            for number in numbers:
                assert parts.machines.call(0, lambda n=number: asked(url, n)) == oracle.answer(
                    number
                )
                if fetched() > before:
                    return number
                time.sleep(0.5)
            raise AssertionError("no block came over the link")

        ask_until_fetched(range(100, 140))  # until they have met
        check([Client(parts, url, range(n, n + 1)) for n in first], oracle, first)
        clients = [Client(parts, url, range(n, n + 1)) for n in second]
        time.sleep(0.02)
        parts.machines.cut()
        check(clients, oracle, second)
        parts.machines.mend()
        ask_until_fetched(third)
        assert parts.metric(DECODE, "kv_cache_usage_perc") == 0


FAULTS = ("cut", "kill prefill", "kill decode", "kill router", "stop prefill", "stop decode")
PORTS = {"prefill": PREFILL, "decode": DECODE, "router": ROUTER}


def break_and_heal(parts: Parts, draw: random.Random) -> str:
    """Breaks one part for some time; returns what it was."""
    fault = draw.choice(FAULTS)
    for_s = draw.uniform(0.1, 4.0)
    if fault == "cut":
        parts.machines.cut()
        time.sleep(for_s)
        parts.machines.mend()
        return fault
    how, _, part = fault.partition(" ")
    port = PORTS[part]
    if how == "kill":
        parts.kill(port)
        time.sleep(for_s / 4)
        parts.start(port)
    else:
        parts.running[port].process.send_signal(signal.SIGSTOP)
        time.sleep(for_s)
        parts.running[port].process.send_signal(signal.SIGCONT)
    return fault


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, NUM_RUNS[tier()], RUNS_EACH))
def test_no_request_is_lost_or_wrong_whatever_breaks(oracle: Oracle, first: int) -> None:
    """Six clients behind a router, two decoding servers and one that computes prompts; each seed
    breaks one part in the middle.
    """
    with parts_of(PREFILL, DECODE, SPARE, ROUTER) as parts:
        for seed in range(first, min(first + RUNS_EACH, NUM_RUNS[tier()])):
            draw = random.Random(seed)
            numbers = range(1000 + 12 * seed, 1000 + 12 * seed + 12)
            url = parts.url(ROUTER)
            clients = [Client(parts, url, numbers[at::6]) for at in range(6)]
            time.sleep(draw.uniform(0, 0.5))
            fault = break_and_heal(parts, draw)
            check(clients, oracle, numbers)
            for port in (PREFILL, DECODE, SPARE):
                assert until(lambda port=port: parts.metric(port, "kv_cache_usage_perc") == 0), (
                    f"blocks are held after seed {seed}: {fault}"
                )
