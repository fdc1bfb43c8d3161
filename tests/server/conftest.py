"""One live server with a tiny model, for all tests that leave it as it was."""

import pytest

from tests.support.live_server import PACE_FLAGS, LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text


@pytest.fixture(scope="session")
def server():
    server = LiveServer(str(tiny_model_with_text()), "--served-model-name=tiny", *PACE_FLAGS)
    yield server
    assert server.stop() == 0
    said = [line for line in server.lines if not line.endswith(" is ignored")]
    assert len(said) == 4, "a server that does its work says nothing but how it started"


@pytest.fixture(scope="session")
def strict_server():
    """A server that ignores no field of a request."""
    server = LiveServer(str(tiny_model_with_text()), "--served-model-name=tiny", "--strict")
    yield server
    assert server.stop() == 0


@pytest.fixture
def strict(strict_server):
    with strict_server.http() as client:
        yield client


@pytest.fixture
def http(server):
    with server.http() as client:
        yield client


@pytest.fixture
def client(server):
    with server.openai() as client:
        yield client


OTHER_KEY = "another key"


@pytest.fixture(scope="session")
def keeper(tmp_path_factory):
    """A server that keeps what it is given, for two keys."""
    folder = tmp_path_factory.mktemp("state")
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        f"--state-dir={folder}",
        f"--api-key={OTHER_KEY}",
        "--max-file-bytes=1MiB",
        "--max-batch-lines=100",
        key="a key",
    )
    yield server
    assert server.stop() == 0


@pytest.fixture
def kept(keeper):
    """A client of the server that keeps things."""
    with keeper.openai() as client:
        yield client


@pytest.fixture
def other(keeper):
    """A client with another key."""
    with keeper.openai() as client:
        yield client.with_options(api_key=OTHER_KEY)


@pytest.fixture
def start():
    """Starts servers and ends those that a test has left."""
    started = []

    def start(*arguments, model=None, **options):
        server = LiveServer(
            str(model or tiny_model_with_text()), "--served-model-name=tiny", *arguments, **options
        )
        started.append(server)
        return server

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()
