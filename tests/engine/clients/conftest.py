"""A way to start supervised cores that are closed after the test."""

import pytest

from tests.support.supervised_cores import NotedClient


@pytest.fixture
def start():
    started = []

    def start(kind="hang", **options):
        started.append(NotedClient(kind, **options))
        return started[-1]

    yield start
    for client in started:
        client.close()
