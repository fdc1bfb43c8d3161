"""Whole KV blocks as bytes: what is read from one block and written to another is the same block, in every layer and group."""

import numpy as np
import pytest

from octavo.backends.base import BackendOptions
from octavo.backends.native.backend import NativeBackend
from octavo.backends.reference import ReferenceBackend
from octavo.backends.torch.backend import TorchBackend
from octavo.program.program import CacheGroup

GROUPS = (CacheGroup("full", "full", 3, 2, 8, 8), CacheGroup("window", "window", 2, 1, 5, 3, window=32))
NUM_BLOCKS = [4, 2]


KINDS = {"reference": ReferenceBackend, "native": NativeBackend, "torch": TorchBackend}


@pytest.fixture(params=["reference-bf16", "reference-int8", "native-bf16", "native-int8", "torch-bf16"])
def backend(request):
    kind, dtype = request.param.split("-")
    return KINDS[kind](BackendOptions(kv_cache_dtype=dtype, num_threads=1))


@pytest.mark.parametrize(("group", "source", "target"), [(0, 1, 3), (1, 0, 1)])
def test_a_block_that_went_out_comes_back(backend, group, source, target):
    kv = backend.allocate(GROUPS, NUM_BLOCKS)
    size = backend.kv_layout(GROUPS[group]).block_bytes
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
    kv = NativeBackend(BackendOptions(kv_cache_dtype="fp32", num_threads=1)).allocate(GROUPS, NUM_BLOCKS)
    with pytest.raises(ValueError, match="block 2 of group 1 is outside the KV memory"):
        kv.read_block(1, 2, np.empty(10, np.uint8))
    with pytest.raises(ValueError, match=r"a block has \d+ bytes, got an array of 10"):
        kv.write_block(1, 1, np.zeros(10, np.uint8))
