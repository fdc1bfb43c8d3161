"""vLLM's own router before two Octavo servers: with `--policy kv_aware` it follows their KV events,
and sends a prompt to the server that has its beginning.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.conftest import MODEL
from tests.support.free_ports import free_port
from tests.support.live_server import LiveServer, until

NAME = "vllm-router"
ROUTER = shutil.which(NAME, path=Path(sys.executable).parent) or shutil.which(NAME)
OPTIONS = ("--max-model-len=2048", "--threads=1", "--kv-cache-memory-bytes=128MiB")
EVENTS_S = 2.0
"""Time in which the router must have learnt of blocks, in seconds."""
TOPICS = ("the tides", "glass", "volcanoes", "bridges", "clocks", "salt")

pytestmark = pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed")


class PublishingServer:
    """A server that publishes its KV events, and the addresses of these."""

    def __init__(self) -> None:
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        config = {
            "enable_kv_cache_events": True,
            "endpoint": self.events,
            "replay_endpoint": self.replay,
        }
        self.server = LiveServer(MODEL, *OPTIONS, f"--kv-events-config={json.dumps(config)}")

    @property
    def num_requests(self) -> float:
        """Requests that it has answered."""
        text = httpx.get(f"{self.server.url}/metrics").text
        counts = re.findall(r"^octavo:request_success_total\{.*\} (\S+)$", text, re.MULTILINE)
        return sum(map(float, counts))


class VllmRouter:
    """The router in a process of its own; `lines` holds what it logs."""

    def __init__(self, workers: list[PublishingServer]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        assert ROUTER is not None
        command = [ROUTER, "--host=127.0.0.1", f"--port={self.url.rpartition(':')[2]}"]
        command += ["--policy=kv_aware", f"--prometheus-port={free_port()}"]
        command += [
            "--kv-event-block-size=16",
            f"--kv-event-model={MODEL}",
            "--worker-urls",
            *(w.server.url for w in workers),
        ]
        for worker in workers:
            command += ["--kv-event-source", f"{worker.server.url}={worker.events}"]
            command += ["--kv-event-replay-source", f"{worker.server.url}={worker.replay}"]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()
        if not until(lambda: self._is_up() or self.process.poll() is not None, 120):
            self.process.kill()
            raise RuntimeError("the router did not start:\n" + "\n".join(self.lines))
        assert self.process.poll() is None, "\n".join(self.lines)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).is_success
        except httpx.HTTPError:
            return False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


@pytest.fixture(scope="module")
def workers() -> Iterator[list[PublishingServer]]:
    workers = [PublishingServer(), PublishingServer()]
    yield workers
    assert [worker.server.stop() for worker in workers] == [0, 0]


@pytest.fixture(scope="module")
def router(workers: list[PublishingServer]) -> Iterator[VllmRouter]:
    router = VllmRouter(workers)
    yield router
    router.stop()


def test_a_prompt_goes_to_the_server_that_has_its_beginning(
    router: VllmRouter, workers: list[PublishingServer]
) -> None:
    """Each server is given some topics' texts by itself; the router learns of them by events, and
    sends further questions about a topic to the server that has its text.
    """
    texts = {
        topic: f"Notes about {topic}. " + f"It is said of {topic} that " * 40 for topic in TOPICS
    }
    for number, text in enumerate(texts.values()):
        complete(workers[number % 2].server.url, text)
    time.sleep(EVENTS_S)
    for topic, text in texts.items():
        usage = complete(router.url, f"{text} What else about {topic}?")["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] * 0.8
    assert [worker.num_requests for worker in workers] == [len(TOPICS)] * 2


def complete(url: str, prompt: str) -> dict:
    """Returns the answer of a server or a router to a completion."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    found: dict = answer.json()
    return found
