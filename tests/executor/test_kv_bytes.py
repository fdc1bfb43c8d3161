"""Whole KV blocks as bytes: a block that is read and written elsewhere is the same block, in every
layer and group.
"""

from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest

from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.program.program import CacheGroup
from tests.support.kv_layouts import layouts_of

GROUPS = (
    CacheGroup("full", "full", 3, 2, 8, 8),
    CacheGroup("window", "window", 2, 1, 5, 3, window=32),
)
NUM_BLOCKS = [4, 2]


KINDS = {"reference": ReferenceBackend, "native": NativeBackend, "torch": TorchBackend}


ON_DEMAND = (
    *("reference-bf16", "reference-int8", "reference-int4", "reference-fp8"),
    *("native-bf16", "native-int8", "native-k8v4", "native-int4"),
)
"""Backends that give memory on demand; torch refuses it by name
(`tests/equivalence/test_virtual_kv.py`)."""


def backend_of(name):
    kind, dtype = name.split("-")
    return KINDS[kind](BackendOptions(kv_cache_dtype=dtype, num_threads=1))


@pytest.fixture(params=[*ON_DEMAND, "torch-bf16", "torch-int8", "torch-fp8"])
def backend(request):
    return backend_of(request.param)


@pytest.mark.parametrize(("group", "source", "target"), [(0, 1, 3), (1, 0, 1)])
def test_a_block_that_went_out_comes_back(backend, group, source, target):
    layouts = layouts_of(backend, GROUPS)
    kv = backend.allocate(layouts, NUM_BLOCKS)
    size = layouts[group].block_bytes
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    kv.write_block(group, source, data)
    kv.copy_block(group, source, target)
    kv.write_block(group, source, np.zeros(size, np.uint8))
    found = np.empty(size, np.uint8)
    kv.read_block(group, target, found)
    np.testing.assert_array_equal(found, data)
    kv.read_block(group, source, found)
    assert not found.any()


def test_native_refuses_a_block_that_is_not_there():
    backend = backend_of("native-fp32")
    kv = backend.allocate(layouts_of(backend, GROUPS), NUM_BLOCKS)
    with pytest.raises(ValueError, match="block 2 of group 1 is outside the KV memory"):
        kv.read_block(1, 2, np.empty(10, np.uint8))
    with pytest.raises(ValueError, match=r"a block has \d+ bytes, got an array of 10"):
        kv.write_block(1, 1, np.zeros(10, np.uint8))


LARGE = CacheGroup("full", "full", 2, 2, 64, 64)
"""A group whose block of one head and layer is a page, in bf16."""


@pytest.fixture(params=ON_DEMAND)
def on_demand(request):
    backend = backend_of(request.param)
    assert backend.allocates_on_demand
    return backend


def blocks_of(kv, count: int, block_bytes: int) -> np.ndarray:
    found = np.empty((count, block_bytes), np.uint8)
    for block, into in enumerate(found):
        kv.read_block(0, block, into)
    return found


def test_blocks_that_are_given_back_are_zeros_and_their_neighbours_stay(on_demand):
    (layout,) = layouts_of(on_demand, (LARGE,))
    kv = on_demand.allocate_on_demand((layout,), [16])
    for block in range(16):
        kv.write_block(0, block, np.full(layout.block_bytes, block + 1, np.uint8))
    before = blocks_of(kv, 16, layout.block_bytes)
    kv.give_back(0, 2, 8)
    after = blocks_of(kv, 16, layout.block_bytes)
    np.testing.assert_array_equal(after[[0, 1, *range(10, 16)]], before[[0, 1, *range(10, 16)]])
    if all(piece % PAGESIZE == 0 for piece in layout.pieces):
        assert not after[2:10].any()
    else:
        assert {0, 3} <= set(np.unique(after[2:10])), "a page that reaches beyond the blocks stays"


def test_native_refuses_to_give_back_blocks_that_are_not_there():
    backend = backend_of("native-fp32")
    kv = backend.allocate_on_demand(layouts_of(backend, GROUPS), NUM_BLOCKS)
    for first, count in ((3, 2), (0, 0), (-1, 2)):
        with pytest.raises(
            ValueError, match=f"{count} blocks from {first} on of group 0 are not in the KV memory"
        ):
            kv.give_back(0, first, count)


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the system does not say what is resident"
)
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_torch_takes_a_cpus_memory_where_blocks_are_written(dtype):
    group, size = CacheGroup("full", "full", 1, 8, 128, 128), 512 << 20
    backend = backend_of(f"torch-{dtype}")
    (layout,) = layouts_of(backend, (group,))
    before = _resident_bytes()
    kv = backend.allocate((layout,), [size // layout.block_bytes])
    assert _resident_bytes() - before < size // 8
    found = np.ones(layout.block_bytes, np.uint8)
    kv.read_block(0, 7, found)
    assert not found.any()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


@pytest.mark.parametrize(
    ("dtype", "kept"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")]
)
def test_torch_keeps_k_and_v_as_they_are_computed(dtype, kept):
    backend = TorchBackend(BackendOptions(dtype=dtype, num_threads=1))
    layout = layouts_of(backend, GROUPS)[0]
    assert (layout.dtype, layout.layer_bytes) == (kept, 16 * 2 * 16 * (4 if kept == "fp32" else 2))
