"""The largest step, by which a device's memory is measured, runs on every family's Programs; the
table of memory adds up.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions, DeviceMemory
from octavo.executor.torch import memory as torch_memory
from octavo.executor.torch.backend import TorchBackend
from octavo.executor.torch.memory import CudaMemory, count_written_blocks, largest_step
from octavo.models.registry import build_programs
from octavo.program.passes.adapters import with_sites
from octavo.worker.memory import memory_table
from tests.support.tiny_models import each_family, tiny_model


@pytest.mark.parametrize("family", each_family())
def test_the_largest_step_runs(family):
    checkpoint = open_checkpoint(tiny_model(family).path)
    backend = TorchBackend(
        BackendOptions(max_tokens=150, max_requests=140, max_context=64, num_threads=1)
    )
    for program in build_programs(checkpoint.config).values():
        if "logits" in program.outputs:
            backend.run_largest_step(
                backend.prepare_program(program, WeightReader(checkpoint).load)
            )


def test_steps_before_the_first_request_have_adapters():
    """The largest step, and steps that compile kernels, have rows with adapters if requests may."""
    checkpoint = open_checkpoint(tiny_model("llama", num_hidden_layers=1).path)
    options = BackendOptions(
        max_tokens=80, max_requests=8, max_context=64, num_adapters=2, max_adapter_rank=4
    )
    backend = TorchBackend(options)
    program = with_sites(build_programs(checkpoint.config)["decoder"])
    prepared = backend.prepare_program(program, WeightReader(checkpoint).load)
    assert prepared.adapters.num_bytes == 0, "on a CPU only what is put takes memory"
    prepared.adapters.reserve(2, 4, now=True)
    launched = []
    launch = prepared.launch
    prepared.launch = lambda batch, kv: launched.append(batch.adapter_rows) or launch(batch, kv)
    backend.run_largest_step(prepared)
    assert len(launched.pop()) == 80
    backend.warm_up(prepared, backend.allocate(prepared.kv_layouts, [4]))
    assert sum(rows is None for rows in launched) * 2 == len(launched) > 10


def test_the_largest_step_is_as_large_as_may_be():
    batch = largest_step(BackendOptions(max_tokens=150, max_requests=140, max_context=64), 2, 100)
    assert (len(batch.token_ids), len(batch.sample_rows), count_written_blocks(batch)) == (
        150,
        140,
        10,
    )
    assert batch.context_lens.tolist() == [[64, 64, 22]] * 2
    assert len(np.unique(batch.slots[1])) == 150


GIB = 1 << 30


@pytest.fixture
def cuda(monkeypatch):
    """Replaces CUDA's counters by those of a device of 80 GiB, of which other processes use 3."""
    state = SimpleNamespace(allocated=0, peak=0)

    def run():
        state.peak = state.allocated + 5 * GIB

    fake = SimpleNamespace(
        empty_cache=lambda: None,
        memory_allocated=lambda device: state.allocated,
        reset_peak_memory_stats=lambda device: None,
        max_memory_allocated=lambda device: state.peak,
        synchronize=lambda device: None,
        mem_get_info=lambda device: (77 * GIB - state.allocated, 80 * GIB),
    )
    monkeypatch.setattr(torch_memory, "torch", SimpleNamespace(cuda=fake))
    return SimpleNamespace(state=state, run=run)


def test_what_is_left_for_the_kv_cache(cuda):
    memory = CudaMemory(None, 0.9)
    assert memory.now().kv_bytes == 69 * GIB
    cuda.state.allocated = 16 * GIB
    memory.measure(16 * GIB, cuda.run)
    memory.reserve("graphs", GIB)
    found = memory.now()
    assert found.parts == {
        "weights": 16 * GIB,
        "largest step": 5 * GIB,
        "graphs": GIB,
        "others, and PyTorch": 3 * GIB,
    }
    assert found.kv_bytes == (72 - 16 - 3 - 5 - 1) * GIB


def test_the_table():
    memory = DeviceMemory(80 * GIB, {"weights": 16 * GIB, "largest step": 5 * GIB}, 51 * GIB)
    assert memory_table(memory, 51 * GIB).splitlines() == [
        "device          80.0 GiB",
        "weights         16.0 GiB",
        "largest step     5.0 GiB",
        "KV cache        51.0 GiB",
        "left free        8.0 GiB",
    ]
