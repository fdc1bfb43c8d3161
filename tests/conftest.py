"""What every test may ask for."""

import pytest

BACKENDS = ["reference", "native"]
"""Backends that the engine's own tests run on."""


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request) -> str:
    return request.param
