"""One live server with a tiny model, for all tests that leave it as it was."""

import pytest

from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text


@pytest.fixture(scope="session")
def server():
    server = LiveServer(str(tiny_model_with_text()), "--served-model-name=tiny")
    yield server
    assert server.stop() == 0
    assert len(server.lines) == 4, "a server that does its work says nothing but how it started"


@pytest.fixture
def http(server):
    with server.http() as client:
        yield client


@pytest.fixture
def client(server):
    with server.openai() as client:
        yield client
