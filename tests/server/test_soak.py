"""Mixed traffic for a while: every answer is right or a refusal, and memory stays flat."""

import asyncio
import random
import statistics
import time

import pytest

from tests.support.live_server import LETTERS, LiveServer, until
from tests.support.processes import anonymous_bytes
from tests.support.tiers import examples
from tests.support.tiny_tokenizer import tiny_model_with_text

SECONDS = examples(12)
"""Length of the traffic: 12 s in the sample, 20 minutes in the soak."""
NUM_CLIENTS = 10
WARM_UP = 0.4
"""Share of the time after which memory is first looked at."""
MAX_GROWTH_BYTES = 12 << 20
KV_CACHE = "--kv-cache-memory-bytes=16MiB"
"""Small enough to be written to its end, and so in memory, before memory is looked at."""
TEXTS = ("Hello", "Once upon a time there was", "numbers: " + "1, 2, 3, " * 12, "日本語 " * 6)
REFUSED = (
    ({"prompt": 7}, 400),
    ({"prompt": "Hello " * 400}, 400),
    ({"prompt": "Hello", "temperature": -1}, 400),
    ({"prompt": "Hello", "model": "none"}, 404),
)


@pytest.fixture(scope="module")
def server():
    models = f"one={tiny_model_with_text()}", f"two={tiny_model_with_text('gemma3_text')}"
    server = LiveServer(*models, KV_CACHE)
    yield server
    assert server.stop() == 0, server.lines[-40:]
    first = next((at for at, line in enumerate(server.lines) if "Traceback" in line), None)
    assert first is None, server.lines[first : first + 60]


class Traffic:
    """One client of the soak; each method is one kind of request, and checks its answer."""

    def __init__(self, client, number):
        self.client = client
        self.draw = random.Random(number)
        self.num_done = 0

    def body(self, **fields):
        """Draws a model, a text, a length and how to sample."""
        common = {
            "model": self.draw.choice(("one", "two")),
            "max_tokens": self.draw.randint(1, 60),
            "allowed_token_ids": LETTERS,
            "ignore_eos": True,
        }
        sampled = {"temperature": 1, "seed": self.draw.randrange(1000)}
        return common | self.draw.choice(({"temperature": 0}, sampled)) | fields

    def messages(self):
        return [{"role": "user", "content": self.draw.choice(TEXTS)}]

    async def post(self, path, body, status=200):
        answer = await self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def whole(self):
        body = self.body(prompt=self.draw.choice(TEXTS), n=2, logprobs=2)
        answer = await self.post("/v1/completions", body | {"temperature": 1})
        assert [len(choice["text"]) for choice in answer["choices"]] == [body["max_tokens"]] * 2

    async def again(self):
        """Asks the same twice, the second time beside other work: the answers are the same."""
        body = self.body(prompt=self.draw.choice(TEXTS), return_token_ids=True)
        first = await self.post("/v1/completions", body)
        second = await self.post("/v1/completions", body)
        assert first["choices"] == second["choices"]

    async def chat(self):
        body = self.body(messages=self.messages())
        answer = await self.post("/v1/chat/completions", body)
        assert len(answer["choices"][0]["message"]["content"]) == body["max_tokens"]

    async def stream(self, cut=False):
        body = self.body(messages=self.messages(), stream=True)
        num_lines = self.draw.randrange(20) if cut else None
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            last = ""
            async for line in response.aiter_lines():
                last = line or last
                if num_lines is not None and (num_lines := num_lines - 1) <= 0:
                    return
        assert last == "data: [DONE]"

    async def left(self):
        await self.stream(cut=True)

    async def refused(self):
        body, status = self.draw.choice(REFUSED)
        await self.post("/v1/completions", {"model": "one"} | body, status)

    async def job(self):
        started = await self.post("/generate", self.body(prompt=self.draw.choice(TEXTS)), 202)
        path = f"/result/{started['request_id']}"
        if self.draw.random() < 0.3:
            assert (await self.client.delete(path)).status_code == 200
            return
        while (await self.client.get(path)).json()["state"] != "finished":
            await asyncio.sleep(0.05)
        assert (await self.client.delete(path)).status_code == 200

    async def look(self):
        for path in ("/health", "/metrics", "/v1/models", "/load"):
            assert (await self.client.get(path)).status_code == 200

    async def run(self, end):
        kinds = (self.whole, self.again, self.chat, self.stream, self.left, self.refused)
        while time.monotonic() < end:
            await self.draw.choice((*kinds, self.job, self.look))()
            self.num_done += 1


async def is_loaded(client, name):
    """Waits until a model that loads is ready; fails with what the server says once it is not."""
    state = "loading"
    while state == "loading":
        await asyncio.sleep(0.1)
        card = (await client.get(f"/v1/models/{name}")).json()
        state = card["state"]
    assert state == "ready", card


async def come_and_go(client, end):
    """Loads a third model and unloads it, again and again; returns how often."""
    count = 0
    while time.monotonic() < end:
        body = {"model": str(tiny_model_with_text()), "name": "three"}
        assert (await client.post("/v1/models/load", json=body)).status_code == 202
        await is_loaded(client, "three")
        asked = await client.post("/v1/completions", json={"model": "three", "prompt": "Hello"})
        assert asked.status_code == 200
        await client.post("/v1/models/unload", json={"model": "three"})
        while (await client.get("/v1/models/three")).status_code != 404:
            await asyncio.sleep(0.1)
        count += 1
    return count


async def weigh(pids, begin, end):
    """Returns the memory of processes as it was, from `begin` to `end`."""
    await asyncio.sleep(begin - time.monotonic())
    sizes = []
    while time.monotonic() < end:
        sizes.append(sum(map(anonymous_bytes, pids)))
        await asyncio.sleep(0.2)
    return sizes


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_mixed_traffic_leaves_memory_flat(server):
    pids = [server.process.pid, *server.children]
    assert len(pids) == 3

    async def soak():
        end = time.monotonic() + SECONDS
        async with server.async_http() as client:
            clients = [Traffic(client, number) for number in range(NUM_CLIENTS)]
            sizes, num_loads, *_ = await asyncio.gather(
                weigh(pids, end - SECONDS * (1 - WARM_UP), end),
                come_and_go(client, end),
                *(one.run(end) for one in clients),
            )
        return sizes, num_loads, sum(one.num_done for one in clients)

    sizes, num_loads, num_done = asyncio.run(soak())
    third = len(sizes) // 3
    growth = statistics.median(sizes[-third:]) - statistics.median(sizes[:third])
    print(f"{num_done} requests, {num_loads} loads, growth {growth / (1 << 20):.1f} MiB")
    assert growth < MAX_GROWTH_BYTES, [size >> 20 for size in sizes]
    assert num_loads and num_done > NUM_CLIENTS
    with server.http() as http:
        assert until(lambda: http.get("/load").json() == {"server_load": 0, "models": EMPTY})
        text = http.get("/metrics").text
    assert text.count("octavo:kv_blocks_held{") == 2
    for name in EMPTY:
        assert f'octavo:kv_blocks_held{{engine="0",model_name="{name}"}} 0.0' in text
    assert sorted(server.children) == sorted(pids[1:])


EMPTY = {"one": 0, "two": 0}
