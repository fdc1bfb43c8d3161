"""Fixtures that tests of quality share."""

from pathlib import Path

import pytest

from tests.support.shuffled_model import write_shuffled


@pytest.fixture(scope="session")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the default model in fp32, its channels in another order."""
    return write_shuffled(tmp_path_factory.mktemp("shuffled"))
