"""What a backend does not implement is refused with its name."""

import pytest

from octavo.api.errors import BackendUnavailable
from tests.support.worker_fakes import FakeRunnable


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda one: one.start_profile(), "does not support profiling ops"),
        (lambda one: one.decode(None, None, None, None), "computes one decode step per call"),
        (lambda one: one.launch(None, None), "does not support asynchronous steps"),
        (lambda one: one.join(None), "does not share experts among engines"),
        (lambda one: one.adapters, "does not support adapters"),
        (lambda one: one.kv_written, "does not report KV writes during a step"),
    ],
)
def test_an_unsupported_operation_names_its_backend(ask, text):
    with pytest.raises(BackendUnavailable) as caught:
        ask(FakeRunnable())
    assert caught.value.message == f"the fake backend {text}"
    assert caught.value.hint
