"""A prompt of megabytes holds up no other client: /health answers while it is read, rendered,
tokenized and refused.
"""

import gc
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.slowness import slowness

SIZE = 4 << 20
TEXT = "The quick brown fox jumps over the lazy dog. " * (SIZE // 45)
MOST_MS = 100
MESSAGES = [{"role": "user", "content": TEXT}]
SHORT_ONES = [{"role": "user", "content": "Hi"}] * 5000
ASKED = {
    "many messages": ("/v1/chat/completions", {"messages": SHORT_ONES}, 400),
    "completion": ("/v1/completions", {"prompt": TEXT}, 400),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, 400),
    "message": ("/v1/messages", {"model": "tiny", "messages": MESSAGES}, 400),
    "response": ("/v1/responses", {"input": TEXT}, 400),
    "cohere": ("/v2/chat", {"model": "tiny", "messages": MESSAGES}, 400),
    "ollama": ("/api/chat", {"model": "tiny", "messages": MESSAGES}, 400),
    "ollama text": ("/api/generate", {"model": "tiny", "prompt": TEXT}, 400),
    "cut completion": ("/v1/completions", {"prompt": TEXT, "truncate_prompt_tokens": 99}, 200),
    "cut chat": ("/v1/chat/completions", {"messages": MESSAGES, "truncate_prompt_tokens": 99}, 200),
}
"""Requests with a prompt that is too long, or cut to what the context holds, and their statuses."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps this process's garbage collection, which takes longer after other tests, out of what is
    measured.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.alone
@pytest.mark.parametrize("name", ASKED)
def test_health_answers_while_a_long_prompt_is_taken_in(server, name):
    path, body, status = ASKED[name]
    content = json.dumps(body | ({"max_tokens": 1} if path == "/v1/messages" else {}))
    headers = {"Content-Type": "application/json"}
    times_ms = []
    answers = []

    with server.http() as asker, server.http() as watcher, uncollected():

        def ask():
            answers.append(asker.post(path, content=content, headers=headers))

        asking = threading.Thread(target=ask)
        asking.start()
        while asking.is_alive() or len(times_ms) < 200:
            began = time.perf_counter()
            assert watcher.get("/health").status_code == 200
            times_ms.append((time.perf_counter() - began) * 1000)
            time.sleep(0.002)
        asking.join()
    assert answers[0].status_code == status, answers[0].text[:300]
    late_ms = sorted(times_ms)[int(len(times_ms) * 0.99)]
    print(f"{name}: p99 {late_ms:.1f} ms, worst {max(times_ms):.1f} ms of {len(times_ms)}")
    assert late_ms < MOST_MS * slowness()
