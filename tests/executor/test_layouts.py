"""KV layouts belong to a prepared Program: what a backend prepares later does not change them."""

import ml_dtypes
import numpy as np
import pytest

from octavo.api.errors import ConfigError
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.quant.packed import PackedWeight
from octavo.worker.loaded_model import get_common_layouts
from tests.executor.test_key_indices import attention_program, batch_of, load
from tests.support.native_harness import require_native

BACKENDS = pytest.mark.parametrize("kind", [NativeBackend, TorchBackend])


def load_bf16(weight):
    return PackedWeight.plain(load(weight).codes.astype(ml_dtypes.bfloat16))


def backend_of(kind, **options):
    if kind is NativeBackend:
        require_native()
    return kind(BackendOptions(num_threads=1, **options))


@BACKENDS
def test_a_program_keeps_its_layout_when_another_is_prepared(kind):
    backend, program = backend_of(kind), attention_program(None)
    precise = backend.prepare_program(program, load)
    assert [layout.dtype for layout in precise.kv_layouts] == ["fp32"]
    halved = backend.prepare_program(program, load_bf16)
    assert [layout.dtype for layout in halved.kv_layouts] == ["bf16"]
    assert [layout.dtype for layout in precise.kv_layouts] == ["fp32"]
    assert precise.kv_layouts[0].block_bytes == 2 * halved.kv_layouts[0].block_bytes


@BACKENDS
def test_a_program_runs_the_same_beside_one_of_another_precision(kind):
    """A Program gives the same logits where its cache is allocated only once another one is
    prepared.
    """
    program, batch = attention_program(None), batch_of([(0, 37), (0, 1), (0, 20)])
    backend = backend_of(kind)
    runnable = backend.prepare_program(program, load)
    alone = runnable.run(batch, backend.allocate(runnable.kv_layouts, [9])).arrays["logits"]
    backend.prepare_program(program, load_bf16)
    beside = runnable.run(batch, backend.allocate(runnable.kv_layouts, [9])).arrays["logits"]
    np.testing.assert_array_equal(beside, alone)


def test_programs_of_one_model_must_agree_on_their_layouts():
    backend, program = backend_of(TorchBackend), attention_program(None)
    precise, halved = (
        backend.prepare_program(program, load),
        backend.prepare_program(program, load_bf16),
    )
    assert get_common_layouts({"encoder": precise, "decoder": precise}) == precise.kv_layouts
    with pytest.raises(
        ConfigError,
        match="the Programs encoder and decoder use different KV cache dtypes, got fp32 and bf16\n"
        "hint: set kv_cache_dtype",
    ):
        get_common_layouts({"encoder": precise, "decoder": halved})
