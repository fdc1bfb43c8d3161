"""A server that is killed at random moments loses nothing that it has acknowledged, leaves nothing
half there, and answers each line of a batch once.
"""

import contextlib
import json
import os
import random
import signal
import threading

import httpx
import openai
import pytest

from tests.server.test_batches import ENDED, line, lines_of
from tests.support.live_server import LETTERS, LiveServer, until
from tests.support.tiers import tier
from tests.support.tiny_tokenizer import tiny_model_with_text

NUM_PARTS = {"sample": 1, "all": 1, "soak": 10}
NUM_KILLS = {"sample": 3, "all": 20, "soak": 20}
"""Kills of a part; a soak that was stopped goes on behind the last whole part."""
MOST_UNTIL_KILL_S = 1.5
NUM_LINES = 12


class Writer:
    """Clients of a server that may die under them; remembers what was acknowledged."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.files = {}
        self.batches = []
        self.responses = {}
        self.background = []
        self.has_written = threading.Event()
        """Set once something of each kind was acknowledged."""

    def write_until_gone(self, server):
        with server.openai() as client, contextlib.suppress(openai.APIConnectionError):
            while True:
                try:
                    self.write(client)
                except (openai.APIStatusError, httpx.TransportError):
                    return

    def write(self, client):
        lines = [
            line(index, max_tokens=self.draw.randrange(2, 30), ignore_eos=True)
            for index in range(NUM_LINES)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        self.files[file.id] = content
        asked = {
            "input": "Hello",
            "max_output_tokens": 8,
            "extra_body": {"allowed_token_ids": LETTERS, "ignore_eos": True},
        }
        response = client.responses.create(model="tiny", **asked)
        self.responses[response.id] = response
        self.background.append(client.responses.create(model="tiny", background=True, **asked).id)
        self.batches.append(
            client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            ).id
        )
        self.has_written.set()

    def check(self, client):
        """Checks that the newest of what was acknowledged is there, whole."""
        for file_id in list(self.files)[-3:]:
            assert client.files.content(file_id).content == self.files[file_id]
        for response_id in list(self.responses)[-3:]:
            assert client.responses.retrieve(response_id) == self.responses[response_id]
        for response_id in self.background[-3:]:
            assert client.responses.retrieve(response_id).status in (
                "queued",
                "in_progress",
                "incomplete",
            )
        for batch_id in self.batches[-3:]:
            assert client.batches.retrieve(batch_id).status in (*ENDED, *RUNNING)


RUNNING = ("validating", "in_progress", "finalizing")


def start(folder):
    return LiveServer(
        str(tiny_model_with_text()), "--served-model-name=tiny", f"--state-dir={folder}"
    )


def kill_at_random(server, writer):
    """Kills a server while it is written to, the first one after something was acknowledged."""
    is_first = not writer.has_written.is_set()
    thread = threading.Thread(target=writer.write_until_gone, args=[server])
    thread.start()
    if is_first:
        assert writer.has_written.wait(60)
    thread.join(writer.draw.uniform(0.02, MOST_UNTIL_KILL_S))
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    thread.join()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(NUM_PARTS[tier()]))
def test_what_was_acknowledged_survives_kills(tmp_path, seed):
    writer = Writer(seed)
    for _ in range(NUM_KILLS[tier()]):
        server = start(tmp_path)
        with server.openai() as client:
            writer.check(client)
        kill_at_random(server, writer)
    server = start(tmp_path)
    try:
        with server.openai() as client:
            assert writer.batches and writer.background
            ends_once(client, writer)
            known = {file.id: file.bytes for file in client.files.list()}
        found = {path.name: path.stat().st_size for path in (tmp_path / "files").iterdir()}
        assert found == known, "no file is half there, and none without a record"
        assert not list((tmp_path / "incoming").iterdir())
    finally:
        assert server.stop() == 0


def ends_once(client, writer):
    """Checks that all that was accepted ends, each line of each batch once."""
    for batch_id in writer.batches:
        assert until(lambda one=batch_id: client.batches.retrieve(one).status in ENDED, 120)
        batch = client.batches.retrieve(batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", NUM_LINES)
        assert len(lines_of(client, batch.output_file_id)) == NUM_LINES
    for response_id in writer.background:
        assert until(lambda one=response_id: client.responses.retrieve(one).status == "incomplete")
        assert len(client.responses.retrieve(response_id).output_text) == 8
    for file_id, content in writer.files.items():
        assert client.files.content(file_id).content == content
    for response_id, response in writer.responses.items():
        assert client.responses.retrieve(response_id) == response
