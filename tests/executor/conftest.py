"""The instruction-set levels that tests of the native backend run at."""

import pytest

from tests.support.native_harness import levels, require_native


@pytest.fixture(params=levels())
def level(request) -> str:
    """Each level that this machine runs."""
    require_native(request.param)
    return request.param
