"""The real model on the torch backend: as packed and in fp32 its logits are native's in fp32 but
for rounding, and in bf16 forced tokens' logprobs are near them.

Bounds are of logits whose standard deviation is 4. What fp8 costs is measured over the first window
of Opticks (`benchmarks/perplexity.py` has the recipe), against what transformers gives in fp32.
"""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from octavo.text.tokenizer import load_tokenizer
from tests.support.paged_runner import PagedRunner

pytestmark = pytest.mark.model

IDS = np.random.default_rng(0).integers(100, 40000, 90)


def logits(kind, dtype, *, chunk=None):
    path = resolve("smollm2")
    backend = kind(BackendOptions(dtype=dtype, num_threads=1, max_tokens=128))
    return PagedRunner(
        path, backend, load=WeightReader(open_checkpoint(path), dtype).load, num_blocks=16
    ).logits(IDS, chunk)


@cache
def wanted():
    return logits(NativeBackend, "float32")


def forced(found, ids=IDS):
    """Returns the logprobs of given tokens."""
    found = found[:-1].astype(np.float64)
    found -= np.log(
        np.exp(found - found.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
    ) + found.max(axis=1, keepdims=True)
    return found[np.arange(len(found)), ids[1:]]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("dtype", "chunk"), [("auto", None), ("float32", None), ("float32", 40)])
def test_fp32(dtype, chunk):
    np.testing.assert_allclose(
        logits(TorchBackend, dtype, chunk=chunk), wanted(), rtol=0, atol=5e-4
    )


def test_bf16():
    errors = abs(forced(logits(TorchBackend, "bfloat16")) - forced(wanted()))
    assert errors.mean() < 0.09, errors.mean()


def nll_of_a_window(kv_cache_dtype, quantization):
    """Returns the mean over a window's tokens after its first, given those before them."""
    path, data = resolve("smollm2"), Path(__file__).parents[1] / "data"
    checkpoint, window = (
        open_checkpoint(path),
        json.loads((data / "opticks.json").read_text())["window"],
    )
    source = checkpoint.tokenizer_source()
    assert source is not None
    ids = np.array(
        load_tokenizer(source).encode(
            (data / "opticks.txt").read_text(encoding="utf-8"), add_special_tokens=False
        )[:window]
    )
    program = build_programs(checkpoint.config)["decoder"]
    backend = TorchBackend(
        BackendOptions(num_threads=1, max_tokens=window, kv_cache_dtype=kv_cache_dtype)
    )
    found = PagedRunner(
        path,
        backend,
        load=WeightReader(checkpoint, "auto", quantization, program).load,
        num_blocks=window // 16,
    ).logits(ids)
    return -forced(found, ids).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_cache_dtype", "quantization", "bound_percent"), [("fp8", None, 2.0), ("auto", "fp8", 7.0)]
)
def test_fp8(kv_cache_dtype, quantization, bound_percent):
    """fp8 raises the perplexity by as much as was measured: KV 1.1%, weights and rows 5.7%; over
    the first four windows 0.6% and 3.1%.
    """
    wanted = json.loads((Path(__file__).parents[1] / "data" / "opticks.json").read_text())[
        "per_window_mean_nll"
    ][0]
    rise_percent = 100 * (math.exp(nll_of_a_window(kv_cache_dtype, quantization) - wanted) - 1)
    assert 0 < rise_percent < bound_percent
