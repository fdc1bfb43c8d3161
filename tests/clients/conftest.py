"""One live server with SmolLM2, for every client; run by `make clients`, which installs them.

`make test` leaves this directory out (`norecursedirs` in pyproject.toml): the clients need versions
of their dependencies that differ from the tests' own.
"""

import os

import pytest

from tests.support.live_server import LiveServer

MODEL = "smollm2"
QUESTION = "Name the capital of France. Answer in one word."

# Some of the clients report their use, or look for newer prices; the tests need no network.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = LiveServer(
        MODEL,
        "--max-model-len=2048",
        f"--model-alias=claude-*={MODEL}",
        "--threads=2",
        "--kv-cache-memory-bytes=256MiB",
        f"--state-dir={tmp_path_factory.mktemp('state')}",
    )
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="session")
def base_url(server):
    return f"{server.url}/v1"


@pytest.fixture(scope="session")
def ask(server):
    """Returns the greedy answer to a text, as plain HTTP gives it."""

    def ask(text: str) -> str:
        body = {
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 12,
        }
        with server.http() as http:
            found = http.post("/v1/chat/completions", json=body).json()
        return found["choices"][0]["message"]["content"]

    return ask


@pytest.fixture(scope="session")
def answer(ask):
    """The greedy answer to the question."""
    return ask(QUESTION)
