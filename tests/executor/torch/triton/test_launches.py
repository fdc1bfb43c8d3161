"""How many of Triton's kernels one decode step launches: each takes about a microsecond of a
captured step.
"""

from collections import Counter

import numpy as np
import pytest
from triton.runtime.interpreter import InterpretedFunction

from octavo.executor.base import BackendOptions
from octavo.executor.torch.backend import TorchBackend
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model

LAYERS = 2


@pytest.fixture
def launches(monkeypatch):
    """Launches of each kernel so far."""
    found = Counter()
    run = InterpretedFunction.run

    def counted(self, *args, grid, warmup, **kwargs):
        found[self.__name__] += 1
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    return found


def test_launches_of_a_decode_step(launches):
    tiny = tiny_model("llama", num_hidden_layers=LAYERS)
    options = BackendOptions(num_threads=1, attention_backend="triton", torch_kernels="triton")
    runner = PagedRunner(tiny.path, TorchBackend(options))
    ids = np.random.default_rng(1).integers(0, tiny.config["vocab_size"], (3, 12))
    requests = [runner.add(row) for row in ids]
    runner.step([(request, 0, 10) for request in requests])
    launches.clear()
    runner.step([(request, 10, 11) for request in requests])
    assert launches == {
        "norm_kernel": 2 * LAYERS + 1,
        "rope_write_kernel": LAYERS,
        "decode_kernel": LAYERS,
        "merge_kernel": LAYERS,
        "act_mul_kernel": LAYERS,
    }
