"""The real model on the torch backend: as the file is packed and in fp32 its logits are the native fp32 ones but for rounding, and in bf16
its forced tokens' logprobs are near them. Bounds are of logits whose standard deviation is 4."""

from functools import cache

import numpy as np
import pytest

from octavo.backends.base import BackendOptions
from octavo.backends.native.backend import NativeBackend
from octavo.backends.torch.backend import TorchBackend
from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from tests.paged_runner import PagedRunner

pytestmark = pytest.mark.model

IDS = np.random.default_rng(0).integers(100, 40000, 90)


def logits(kind, dtype, *, chunk=None):
    path = resolve("smollm2")
    backend = kind(BackendOptions(dtype=dtype, num_threads=1, max_tokens=128))
    return PagedRunner(path, backend, load=WeightReader(open_checkpoint(path), dtype).load, num_blocks=16).logits(IDS, chunk)


@cache
def wanted():
    return logits(NativeBackend, "float32")


def forced(found):
    """Logprobs of the tokens as they are."""
    found = found[:-1].astype(np.float64)
    found -= np.log(np.exp(found - found.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) + found.max(axis=1, keepdims=True)
    return found[np.arange(len(found)), IDS[1:]]


@pytest.mark.parametrize(("dtype", "chunk"), [("auto", None), ("float32", None), ("float32", 40)])
def test_fp32(dtype, chunk):
    np.testing.assert_allclose(logits(TorchBackend, dtype, chunk=chunk), wanted(), rtol=0, atol=5e-4)


def test_bf16():
    errors = abs(forced(logits(TorchBackend, "bfloat16")) - forced(wanted()))
    assert errors.mean() < 0.09, errors.mean()
